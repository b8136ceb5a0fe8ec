"""NeMo AutoModel's keys (commit 36044ad, 2026-08-22)."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.recipes.foreign.automodel_joints import DTYPES, JOINTS
from meshwright.recipes.foreign.values import DECAYS, NULL_IS_0, NULL_IS_TRUE, ON, READ_NULL_AS_1, SCHEDULES, STRATEGIES
from meshwright.recipes.foreign.word import Values, Word

__all__ = ["COMMON", "JOINTS", "OPTIONS", "SIZES", "WORDS"]

GATE: Values = {"float32": "fp32", "null": "bf16", "torch.float32": "fp32", "bfloat16": "bf16"}
RECOMPUTE: Values = {**ON, "full": "full", "enabled": "full", "disabled": "none", "none": "none"}
GROUPED: Values = {"torch_mm": "true", "torch": "false", "te": "true", "gmm": "true", "torch_mm_mxfp8": "true"}
TEMPLATE: Values = {"null": ""}

SIZES = ("tp", "pp", "cp", "ep")
FSDP2 = (
    "sequence_parallel", "tp_plan", "patch_is_packed_sequence", "mp_policy", "offload_policy", "autocast_dtype",
    "activation_checkpointing_scope", "defer_fsdp_grad_sync", "reshard_after_forward", "enable_async_tensor_parallel",
    "enable_compile", "enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth",
    "multimodal",
)  # fmt: skip
MEGATRON_FSDP = (
    "megatron_fsdp_unit_modules", "zero_dp_strategy", "init_fsdp_with_meta_device", "grad_reduce_in_fp32",
    "preserve_fp32_weights", "overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad",
    "report_nan_in_param_grad", "average_in_collective", "disable_bucketing", "calculate_per_token_loss",
    "keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer",
)  # fmt: skip
DDP = (
    "activation_checkpointing_scope", "broadcast_buffers", "find_unused_parameters", "static_graph", "bucket_cap_mb",
    "gradient_as_bucket_view", "autocast_dtype",
)  # fmt: skip
OPTIONS: Mapping[str, tuple[str, ...]] = {"fsdp2": FSDP2, "megatron_fsdp": MEGATRON_FSDP, "ddp": DDP}
"""What each strategy's own part of the distributed section may say."""
COMMON = (
    "strategy", "dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size", "pipeline", "moe",
    "activation_checkpointing", "_target_", "_recursive_", "_convert_",
)  # fmt: skip
TRUTHS = (
    *(key for key in MEGATRON_FSDP[2:] if key != "grad_reduce_in_fp32"), *DDP[1:4], "gradient_as_bucket_view",
    "patch_is_packed_sequence", "enable_fsdp2_prefetch",
)  # fmt: skip


WORDS: tuple[Word, ...] = (
    Word("recipe", takes="text"),
    Word("recipe._target_", takes="text"),
    Word("seed", "train.seed", default=42),
    Word("step_scheduler.global_batch_size", "train.global_batch_size", default=32),
    Word("step_scheduler.local_batch_size", "layout.micro_batch_size", default=1),
    Word("step_scheduler.max_steps", "train.steps", note="unset: as many as num_epochs make"),
    Word("step_scheduler.num_epochs", default=10, takes="int"),
    Word("step_scheduler.val_every_steps", "train.eval_every", NULL_IS_0, default=None),
    Word("step_scheduler.ckpt_every_steps", "checkpoint.save_every", NULL_IS_0, default=100),
    Word("step_scheduler.save_checkpoint_every_epoch", default=True, takes="truth"),
    Word("step_scheduler.validate_on_checkpoint", default=True, takes="truth"),
    Word("step_scheduler.log_remote_every_steps", default=1, takes="int"),
    Word("step_scheduler.loss_average_window_steps", default=50, takes="int"),
    Word("step_scheduler.gc_every_steps", default=None, takes="int"),
    Word("step_scheduler.start_step", default=0, takes="int"),
    Word("step_scheduler.start_epoch", default=0, takes="int"),
    Word("step_scheduler.preemption_signal", default="SIGTERM"),
    Word("step_scheduler.dp_size", takes="int", fate="ignored", note="the data-parallel ranks follow from the mesh"),
    Word("step_scheduler.dataloader", fate="ignored", note="the loader comes from its own section"),
    Word(
        "step_scheduler.checkpoint_interval",
        fate="gone",
        instead="step_scheduler.ckpt_every_steps: 500",
        note="guides name it, the section has no such field",
    ),
    Word(
        "step_scheduler.grad_acc_steps",
        fate="gone",
        instead="step_scheduler.global_batch_size: 64",
        note="accumulation follows from the global batch",
    ),
    Word("dist_env.backend", default="nccl", takes="text"),
    Word("dist_env.timeout_minutes", default=1, takes="int"),
    Word("model._target_", takes="text"),
    Word("model.pretrained_model_name_or_path", "checkpoint.pretrained"),
    Word("model.config", takes="text"),
    Word("model.config._target_", takes="text"),
    Word("model.config.pretrained_model_name_or_path", takes="text"),
    Word("model.torch_dtype", default=None, takes="text", note="unset: float32 for all weights with a torch optimizer"),
    Word("model.attn_implementation", takes="text"),
    Word("model.backend._target_", takes="text"),
    Word(
        "model.backend.attn",
        "kernels.attention",
        choices=("te", "sdpa", "flex", "eager", "tilelang", "cudnn", "magi"),
        note="unset: te where it is installed, else sdpa",
    ),
    Word("model.backend.linear", choices=("torch", "te", "quack")),
    Word("model.backend.experts", "moe.grouped_gemm", GROUPED, default="torch_mm", choices=tuple(GROUPED)),
    Word(
        "model.backend.dispatcher",
        "moe.dispatcher",
        default="deepep",
        choices=("torch", "deepep", "hybridep", "uccl_ep", "mok"),
        note="unset: deepep where it is installed",
    ),
    Word("model.backend.gate_precision", "moe.router_dtype", GATE, default=None),
    Word("model.backend.fake_balanced_gate", "moe.force_balance", default=False),
    Word("model.backend.te_fp8.recipe", choices=("current", "block", "mxfp8")),
    Word("model.backend.enable_deepep", takes="truth", note="old spelling of dispatcher: deepep"),
    Word(
        "distributed.strategy",
        "layout.strategy",
        STRATEGIES,
        default="fsdp2",
        choices=("fsdp2", "megatron_fsdp", "megatron-fsdp", "mfsdp", "ddp"),
    ),
    Word("distributed.dp_size", default=None, note="unset: what the other degrees leave; a number is not checked"),
    Word("distributed.dp_replicate_size", "layout.dp_replicate", READ_NULL_AS_1, default=1),
    Word("distributed.tp_size", "layout.tp", READ_NULL_AS_1, default=1),
    Word("distributed.pp_size", "layout.pp", READ_NULL_AS_1, default=1),
    Word("distributed.cp_size", "layout.cp", READ_NULL_AS_1, default=1),
    Word("distributed.ep_size", "layout.ep", READ_NULL_AS_1, default=1),
    Word("distributed.sequence_parallel", "layout.sp", default=False, note="fsdp2 only: a key too many elsewhere"),
    Word(
        "distributed.activation_checkpointing", "layout.recompute", RECOMPUTE, default=False, choices=tuple(RECOMPUTE)
    ),
    Word("distributed.activation_checkpointing_scope", default="all"),
    Word("distributed.defer_fsdp_grad_sync", "layout.defer_grad_sync", default=True),
    Word("distributed.reshard_after_forward", "layout.reshard_after_forward", NULL_IS_TRUE, default=None),
    Word("distributed.enable_compile", "kernels.compile", default=False),
    Word("distributed.enable_async_tensor_parallel", "kernels.tp_comm_overlap", default=False),
    Word("distributed.mp_policy._target_", takes="text"),
    Word("distributed.mp_policy.param_dtype", default="bfloat16", choices=tuple(DTYPES)),
    Word("distributed.mp_policy.reduce_dtype", default="float32", choices=tuple(DTYPES)),
    Word("distributed.mp_policy.output_dtype", choices=tuple(DTYPES)),
    Word("distributed.mp_policy.cast_forward_inputs", takes="truth"),
    Word("distributed.autocast_dtype", default=None, choices=tuple(DTYPES)),
    Word("distributed.offload_policy._target_", takes="text"),
    Word("distributed.offload_policy.pin_memory", takes="truth"),
    Word("distributed.offload_policy"),
    Word("distributed.tp_plan", default=None),
    Word("distributed.fsdp2_backward_prefetch_depth", default=2, takes="int"),
    Word("distributed.fsdp2_forward_prefetch_depth", default=1, takes="int"),
    Word("distributed.megatron_fsdp_unit_modules", default=None),
    Word("distributed.zero_dp_strategy", default=3, takes="int"),
    Word("distributed.grad_reduce_in_fp32", default=False, takes="truth"),
    Word("distributed.bucket_cap_mb", default=None),
    *(Word(f"distributed.{key}", takes="truth") for key in TRUTHS),
    *(Word(f"distributed.{key}") for key in ("_target_", "_recursive_", "_convert_", "pipeline", "moe")),
    Word("distributed.pipeline.pp_schedule", "layout.pp_schedule", SCHEDULES, default="1f1b"),
    Word("distributed.pipeline.pp_schedule_csv", default=None, takes="text"),
    Word("distributed.pipeline.pp_microbatch_size", takes="int", note="unset: 1"),
    Word(
        "distributed.pipeline.pp_batch_size",
        takes="int",
        fate="replaced",
        instead="step_scheduler.local_batch_size: 8",
        note="the recipe puts step_scheduler.local_batch_size there",
    ),
    Word("distributed.pipeline.layers_per_stage", default=None, note="unset: two stages a rank where they interleave"),
    Word("distributed.pipeline.round_virtual_stages_to_pp_multiple", default=None, choices=("up", "down", "null")),
    Word("distributed.pipeline.module_fqns_per_model_part", default=None),
    Word("distributed.pipeline.patch_inner_model", default=True, takes="truth"),
    Word("distributed.pipeline.patch_causal_lm_model", default=True, takes="truth"),
    Word("distributed.pipeline.patch_stage_backward_maybe_with_nosync", default=False, takes="truth"),
    Word("distributed.pipeline.dtype", default=None, choices=tuple(DTYPES)),
    Word("distributed.pipeline.scale_grads_in_schedule", default=False, takes="truth"),
    Word("distributed.pipeline.loss_fn", takes="text"),
    Word("distributed.pipeline.pp_seq_len", default=None, takes="int"),
    Word("distributed.pipeline.pp_recv_buffer_pool", default=True, takes="truth", since="2026-09"),
    Word("distributed.pipeline.pp_recv_buffer_pool_slack", default=2, takes="int", since="2026-09"),
    Word("distributed.moe.ignore_router_for_ac", default=True, takes="truth"),
    Word("distributed.moe.reshard_after_forward", "layout.reshard_after_forward", NULL_IS_TRUE),
    Word("distributed.moe.lm_head_precision", default=None),
    Word("distributed.moe.wrap_outer_model", default=True, takes="truth"),
    Word("loss_fn._target_", takes="text"),
    Word("dataset._target_", takes="text"),
    Word("dataset.path_or_dataset_id"),
    Word("dataset.path_or_dataset"),
    Word("dataset.dataset_name", takes="text"),
    Word("dataset.paths"),
    Word("dataset.file_pattern"),
    Word("dataset.split"),
    Word("dataset.column_mapping.question", takes="text"),
    Word("dataset.column_mapping.answer", takes="text"),
    Word("dataset.seq_len", "data.seq_length"),
    Word("dataset.seq_length", "data.seq_length"),
    Word("dataset.tokenizer.pretrained_model_name_or_path", "data.tokenizer", default=""),
    Word("dataset.chat_template", "data.chat_template", TEMPLATE, default=None),
    Word("dataset.mask_history", default=False, takes="truth"),
    Word("packed_sequence.packed_sequence_size", default=0),
    Word("packed_sequence.pack_size", default=0),
    Word("packed_sequence.packing_strategy", default="thd", takes="text"),
    Word("packed_sequence.max_packs", default=None, takes="int"),
    Word("packed_sequence.num_proc", default=1, takes="int"),
    Word("packed_sequence.prepacked", default=False, takes="truth"),
    Word("packed_sequence.drop_long_samples", default=True, takes="truth"),
    Word("packed_sequence.split_across_pack", fate="ignored", note="packing no longer splits samples"),
    *(
        Word(f"packed_sequence.{key}")
        for key in ("packing_ratio", "balance_media_tokens", "collate_max_length", "attn_implementation")
    ),
    *(Word(f"packed_sequence.{key}") for key in ("packing_format", "pretokenize", "max_length", "enabled")),
    Word("packed_sequence.post_tokenize_hook_fn"),
    *(
        Word(f"{loader}.{key}")
        for loader in ("dataloader", "validation_dataloader")
        for key in ("_target_", "collate_fn", "shuffle", "shuffle_buffer_size", "batch_size", "pin_memory")
    ),
    Word("dataloader.num_workers", "data.workers", default=0),
    Word("validation_dataloader.num_workers", default=0, takes="int"),
    *(
        Word(f"{loader}.{key}")
        for loader in ("dataloader", "validation_dataloader")
        for key in ("persistent_workers", "prefetch_factor", "drop_last", "dataloader_type")
    ),
    Word("dataloader.group_by_length", "data.group_by_length", default=False),
    Word("validation_dataloader.group_by_length", takes="truth"),
    Word("optimizer._target_", takes="text"),
    Word("optimizer.lr", "optimizer.lr", default=1e-3),
    Word("optimizer.betas", default=[0.9, 0.999]),
    Word("optimizer.eps", "optimizer.eps", default=1e-8),
    Word("optimizer.epsilon", "optimizer.eps"),
    Word("optimizer.mu", "optimizer.muon_momentum"),
    Word("optimizer.weight_decay", "optimizer.weight_decay", default=0.01),
    Word("optimizer.master_weights", takes="truth"),
    Word("optimizer.exp_avg_dtype", choices=tuple(DTYPES)),
    Word("clip_grad_norm.max_norm", default=1.0),
    Word("lr_scheduler.lr_decay_style", "schedule.name", DECAYS, default="cosine"),
    Word("lr_scheduler.lr_warmup_steps", "schedule.warmup_steps"),
    Word("lr_scheduler.lr_decay_steps", "schedule.decay_steps", NULL_IS_0, default=None),
    Word("lr_scheduler.min_lr", "schedule.min_lr"),
    *(Word(f"lr_scheduler.{key}", takes="float") for key in ("init_lr", "max_lr", "start_wd", "end_wd")),
    *(Word(f"lr_scheduler.{key}", takes="int") for key in ("wd_incr_steps", "wsd_decay_steps")),
    *(Word(f"lr_scheduler.{key}", takes="text") for key in ("wd_incr_style", "lr_wsd_decay_style")),
    Word("lr_scheduler.use_checkpoint_opt_param_scheduler", default=True, takes="truth"),
    Word("lr_scheduler.override_opt_param_scheduler", default=False, takes="truth"),
    Word("lr_scheduler._target_", takes="text"),
    Word("checkpoint.enabled", default=True, takes="truth"),
    Word("checkpoint.checkpoint_dir", default="checkpoints/", takes="text"),
    Word("checkpoint.model_save_format", default="safetensors", choices=("safetensors", "torch_save")),
    Word("checkpoint.save_consolidated", default="final", choices=("false", "final", "every", "true")),
    Word("checkpoint.is_async", "checkpoint.async_save", default=False),
    Word("checkpoint.max_recent_checkpoints", "checkpoint.keep", note="unset: all are kept"),
    Word("checkpoint.restore_from", default=None, takes="text"),
    *(
        Word(f"checkpoint.{key}")
        for key in ("model_cache_dir", "model_repo_id", "is_peft", "model_state_dict_keys", "original_model_root_dir")
    ),
    *(
        Word(f"checkpoint.{key}")
        for key in ("dequantize_base_checkpoint", "skip_task_head_prefixes_for_base_model", "staging_dir")
    ),
    *(
        Word(f"checkpoint.{key}", takes="truth")
        for key in ("single_rank_consolidation", "v4_compatible", "diffusers_compatible", "wait_for_staging")
    ),
    Word("checkpoint.best_metric_key", default="default", takes="text"),
    Word("checkpoint.load_base_model", fate="gone", instead="model.load_base_model: false", note="moved to the model"),
    Word("peft._target_", takes="text"),
    Word("peft.target_modules"),
    Word("peft.exclude_modules"),
    Word("peft.match_all_linear", takes="truth"),
    Word("peft.dim", "peft.rank", default=8),
    Word("peft.alpha", "peft.alpha", default=32),
    Word("peft.dropout", "peft.dropout", default=0.0),
    Word("peft.lora_dtype", default=None),
    Word("peft.use_dora", default=False, takes="truth"),
    *(
        Word(f"peft.{old}", fate="gone", instead=f"peft.{new}")
        for old, new in (
            ("r", "dim: 16"),
            ("rank", "dim: 16"),
            ("lora_alpha", "alpha: 32"),
            ("lora_dropout", "dropout: 0.0"),
        )
    ),
    Word("quantization.load_in_4bit", default=False, takes="truth"),
    Word("fp8.enabled", default=False, takes="truth"),
    Word("fp8.recipe_name", default="tensorwise", choices=("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    Word("fp8.enable_fsdp_float8_all_gather", "precision.fp8_gather", default=False),
    Word("freeze_config.freeze_language_model", takes="truth"),
    Word("freeze_config.freeze_vision_tower", takes="truth"),
)

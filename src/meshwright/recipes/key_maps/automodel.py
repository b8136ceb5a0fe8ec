"""Key map of NeMo AutoModel (commit 36044ad, 2026-08-22)."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.recipes.key_maps.automodel_composite_keys import COMPOSITE_KEYS, DTYPES
from meshwright.recipes.key_maps.key import ConfigKey, Values
from meshwright.recipes.key_maps.value_maps import (
    DECAY_STYLES,
    NULL_IS_0,
    PIPELINE_SCHEDULES,
    READ_NULL_AS_1,
    READ_NULL_AS_TRUE,
    RECOMPUTE_SWITCH,
    STRATEGIES,
)

__all__ = ["COMMON_OPTIONS", "COMPOSITE_KEYS", "KEYS", "PARALLEL_AXES", "STRATEGY_OPTIONS"]

GATE_DTYPES: Values = {"float32": "fp32", "null": "bf16", "torch.float32": "fp32", "bfloat16": "bf16"}
RECOMPUTE_VALUES: Values = {**RECOMPUTE_SWITCH, "full": "full", "enabled": "full", "disabled": "none", "none": "none"}
EXPERT_BACKENDS: Values = {"torch_mm": "true", "torch": "false", "te": "true", "gmm": "true", "torch_mm_mxfp8": "true"}
CHAT_TEMPLATE: Values = {"null": ""}

PARALLEL_AXES = ("tp", "pp", "cp", "ep")
FSDP2_OPTIONS = (
    "sequence_parallel", "tp_plan", "patch_is_packed_sequence", "mp_policy", "offload_policy", "autocast_dtype",
    "activation_checkpointing_scope", "defer_fsdp_grad_sync", "reshard_after_forward", "enable_async_tensor_parallel",
    "enable_compile", "enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth",
    "multimodal",
)  # fmt: skip
MEGATRON_FSDP_OPTIONS = (
    "megatron_fsdp_unit_modules", "zero_dp_strategy", "init_fsdp_with_meta_device", "grad_reduce_in_fp32",
    "preserve_fp32_weights", "overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad",
    "report_nan_in_param_grad", "average_in_collective", "disable_bucketing", "calculate_per_token_loss",
    "keep_fp8_transpose_cache", "nccl_ub", "fsdp_double_buffer",
)  # fmt: skip
DDP_OPTIONS = (
    "activation_checkpointing_scope", "broadcast_buffers", "find_unused_parameters", "static_graph", "bucket_cap_mb",
    "gradient_as_bucket_view", "autocast_dtype",
)  # fmt: skip
STRATEGY_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "fsdp2": FSDP2_OPTIONS,
    "megatron_fsdp": MEGATRON_FSDP_OPTIONS,
    "ddp": DDP_OPTIONS,
}
"""Options of the distributed section that each strategy accepts."""
COMMON_OPTIONS = (
    "strategy", "dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size", "pipeline", "moe",
    "activation_checkpointing", "_target_", "_recursive_", "_convert_",
)  # fmt: skip
BOOL_OPTIONS = (
    *(key for key in MEGATRON_FSDP_OPTIONS[2:] if key != "grad_reduce_in_fp32"), *DDP_OPTIONS[1:4],
      "gradient_as_bucket_view",
    "patch_is_packed_sequence", "enable_fsdp2_prefetch",
)  # fmt: skip


KEYS: tuple[ConfigKey, ...] = (
    ConfigKey("recipe", type="str"),
    ConfigKey("recipe._target_", type="str"),
    ConfigKey("seed", "train.seed", default=42),
    ConfigKey("step_scheduler.global_batch_size", "train.global_batch_size", default=32),
    ConfigKey("step_scheduler.local_batch_size", "layout.micro_batch_size", default=1),
    ConfigKey("step_scheduler.max_steps", default=None, type="int", note="unset: num_epochs"),
    ConfigKey("step_scheduler.num_epochs", default=10, type="int"),
    ConfigKey("step_scheduler.val_every_steps", "train.eval_every", NULL_IS_0, default=None),
    ConfigKey("step_scheduler.ckpt_every_steps", "checkpoint.save_every", NULL_IS_0, default=100),
    ConfigKey("step_scheduler.save_checkpoint_every_epoch", default=True, type="bool"),
    ConfigKey("step_scheduler.validate_on_checkpoint", default=True, type="bool"),
    ConfigKey("step_scheduler.log_remote_every_steps", default=1, type="int"),
    ConfigKey("step_scheduler.loss_average_window_steps", default=50, type="int"),
    ConfigKey("step_scheduler.gc_every_steps", default=None, type="int"),
    ConfigKey("step_scheduler.start_step", default=0, type="int"),
    ConfigKey("step_scheduler.start_epoch", default=0, type="int"),
    ConfigKey("step_scheduler.preemption_signal", default="SIGTERM"),
    ConfigKey("step_scheduler.dp_size", type="int", status="ignored", note="derived from the mesh"),
    ConfigKey("step_scheduler.dataloader", status="ignored", note="the dataloader has its own section"),
    ConfigKey(
        "step_scheduler.checkpoint_interval",
        status="removed",
        replacement="step_scheduler.ckpt_every_steps: …",
        note="appears in guides, but the section has no such field",
    ),
    ConfigKey(
        "step_scheduler.grad_acc_steps", status="removed", note="accumulation is derived from the global batch size"
    ),
    ConfigKey("dist_env.backend", default="nccl", type="str"),
    ConfigKey("dist_env.timeout_minutes", default=1, type="int"),
    ConfigKey("model._target_", type="str"),
    ConfigKey("model.pretrained_model_name_or_path", "checkpoint.pretrained"),
    ConfigKey("model.config", type="str"),
    ConfigKey("model.config._target_", type="str"),
    ConfigKey("model.config.pretrained_model_name_or_path", type="str"),
    ConfigKey(
        "model.torch_dtype",
        default=None,
        type="str",
        note="unset: the checkpoint's dtype, mostly bfloat16; float32 in knowledge distillation with a torch optimizer",
    ),
    ConfigKey("model.attn_implementation", type="str"),
    ConfigKey("model.backend._target_", type="str"),
    ConfigKey(
        "model.backend.attn",
        "kernels.attention",
        choices=("te", "sdpa", "flex", "eager", "tilelang", "cudnn", "magi", "torch"),
        note="unset: te if installed, else sdpa",
    ),
    ConfigKey("model.backend.linear", choices=("torch", "te", "quack")),
    ConfigKey(
        "model.backend.experts", "moe.grouped_gemm", EXPERT_BACKENDS, default="torch_mm", choices=tuple(EXPERT_BACKENDS)
    ),
    ConfigKey(
        "model.backend.dispatcher",
        "moe.dispatcher",
        default="deepep",
        choices=("torch", "deepep", "hybridep", "uccl_ep", "mok"),
        note="unset: deepep if installed",
    ),
    ConfigKey("model.backend.gate_precision", "moe.router_dtype", GATE_DTYPES, default=None),
    ConfigKey("model.backend.fake_balanced_gate", "moe.force_balance", default=False),
    ConfigKey("model.backend.te_fp8.recipe", choices=("current", "block", "mxfp8")),
    ConfigKey("model.backend.enable_deepep", type="bool", note="old form of dispatcher: deepep"),
    ConfigKey(
        "distributed.strategy",
        "layout.strategy",
        STRATEGIES,
        default="fsdp2",
        choices=("fsdp2", "megatron_fsdp", "megatron-fsdp", "mfsdp", "ddp"),
    ),
    ConfigKey(
        "distributed.dp_size",
        default=None,
        note="unset: derived from the other degrees; an explicit value is not checked",
    ),
    ConfigKey("distributed.dp_replicate_size", "layout.dp_replicate", READ_NULL_AS_1, default=1),
    ConfigKey("distributed.tp_size", "layout.tp", READ_NULL_AS_1, default=1),
    ConfigKey("distributed.pp_size", "layout.pp", READ_NULL_AS_1, default=1),
    ConfigKey("distributed.cp_size", "layout.cp", READ_NULL_AS_1, default=1),
    ConfigKey("distributed.ep_size", "layout.ep", READ_NULL_AS_1, default=1),
    ConfigKey("distributed.sequence_parallel", "layout.sp", default=False, note="fsdp2 only: rejected elsewhere"),
    ConfigKey(
        "distributed.activation_checkpointing",
        "layout.recompute",
        RECOMPUTE_VALUES,
        default=False,
        choices=tuple(RECOMPUTE_VALUES),
    ),
    ConfigKey("distributed.activation_checkpointing_scope", default="all"),
    ConfigKey("distributed.defer_fsdp_grad_sync", "layout.defer_grad_sync", default=True),
    ConfigKey("distributed.reshard_after_forward", "layout.reshard_after_forward", READ_NULL_AS_TRUE, default=None),
    ConfigKey("distributed.enable_compile", "kernels.compile", default=False),
    ConfigKey("distributed.enable_async_tensor_parallel", "kernels.tp_comm_overlap", default=False),
    ConfigKey("distributed.mp_policy._target_", type="str"),
    ConfigKey("distributed.mp_policy.param_dtype", default="bfloat16", choices=tuple(DTYPES)),
    ConfigKey("distributed.mp_policy.reduce_dtype", default="float32", choices=tuple(DTYPES)),
    ConfigKey("distributed.mp_policy.output_dtype", choices=tuple(DTYPES)),
    ConfigKey("distributed.mp_policy.cast_forward_inputs", type="bool"),
    ConfigKey("distributed.autocast_dtype", default=None, choices=tuple(DTYPES)),
    ConfigKey("distributed.offload_policy._target_", type="str"),
    ConfigKey("distributed.offload_policy.pin_memory", type="bool"),
    ConfigKey("distributed.offload_policy"),
    ConfigKey("distributed.tp_plan", default=None),
    ConfigKey("distributed.fsdp2_backward_prefetch_depth", default=2, type="int"),
    ConfigKey("distributed.fsdp2_forward_prefetch_depth", default=1, type="int"),
    ConfigKey("distributed.megatron_fsdp_unit_modules", default=None),
    ConfigKey("distributed.zero_dp_strategy", default=3, type="int"),
    ConfigKey("distributed.grad_reduce_in_fp32", default=False, type="bool"),
    ConfigKey("distributed.bucket_cap_mb", default=None),
    *(ConfigKey(f"distributed.{key}", type="bool") for key in BOOL_OPTIONS),
    *(ConfigKey(f"distributed.{key}") for key in ("_target_", "_recursive_", "_convert_", "pipeline", "moe")),
    ConfigKey("distributed.pipeline.pp_schedule", "layout.pp_schedule", PIPELINE_SCHEDULES, default="1f1b"),
    ConfigKey("distributed.pipeline.pp_schedule_csv", default=None, type="str"),
    ConfigKey("distributed.pipeline.pp_microbatch_size", type="int", note="unset: 1"),
    ConfigKey(
        "distributed.pipeline.pp_batch_size",
        type="int",
        status="overwritten",
        replacement="step_scheduler.local_batch_size: …",
        note="overwritten with step_scheduler.local_batch_size",
    ),
    ConfigKey(
        "distributed.pipeline.layers_per_stage",
        default=None,
        note="unset: two stages per rank with interleaved schedules",
    ),
    ConfigKey("distributed.pipeline.round_virtual_stages_to_pp_multiple", default=None, choices=("up", "down", "null")),
    ConfigKey("distributed.pipeline.module_fqns_per_model_part", default=None),
    ConfigKey("distributed.pipeline.patch_inner_model", default=True, type="bool"),
    ConfigKey("distributed.pipeline.patch_causal_lm_model", default=True, type="bool"),
    ConfigKey("distributed.pipeline.patch_stage_backward_maybe_with_nosync", default=False, type="bool"),
    ConfigKey("distributed.pipeline.dtype", default=None, choices=tuple(DTYPES)),
    ConfigKey("distributed.pipeline.scale_grads_in_schedule", default=False, type="bool"),
    ConfigKey("distributed.pipeline.loss_fn", type="str"),
    ConfigKey("distributed.pipeline.pp_seq_len", default=None, type="int"),
    ConfigKey("distributed.pipeline.pp_recv_buffer_pool", default=True, type="bool", since="2026-09"),
    ConfigKey("distributed.pipeline.pp_recv_buffer_pool_slack", default=2, type="int", since="2026-09"),
    ConfigKey("distributed.moe.ignore_router_for_ac", default=True, type="bool"),
    ConfigKey("distributed.moe.reshard_after_forward", "layout.reshard_after_forward", READ_NULL_AS_TRUE),
    ConfigKey("distributed.moe.lm_head_precision", default=None),
    ConfigKey("distributed.moe.wrap_outer_model", default=True, type="bool"),
    ConfigKey("loss_fn._target_", type="str"),
    ConfigKey("dataset._target_", type="str"),
    ConfigKey("dataset.path_or_dataset_id"),
    ConfigKey("dataset.path_or_dataset"),
    ConfigKey("dataset.dataset_name", type="str"),
    ConfigKey("dataset.paths"),
    ConfigKey("dataset.file_pattern"),
    ConfigKey("dataset.split"),
    ConfigKey("dataset.column_mapping.question", type="str"),
    ConfigKey("dataset.column_mapping.answer", type="str"),
    ConfigKey("dataset.seq_len", "data.seq_length"),
    ConfigKey("dataset.seq_length", "data.seq_length"),
    ConfigKey("dataset.tokenizer.pretrained_model_name_or_path", "data.tokenizer", default=""),
    ConfigKey("dataset.chat_template", "data.chat_template", CHAT_TEMPLATE, default=None),
    ConfigKey("dataset.mask_history", default=False, type="bool"),
    ConfigKey("packed_sequence.packed_sequence_size", default=0),
    ConfigKey("packed_sequence.pack_size", default=0),
    ConfigKey("packed_sequence.packing_strategy", default="thd", type="str"),
    ConfigKey("packed_sequence.max_packs", default=None, type="int"),
    ConfigKey("packed_sequence.num_proc", default=1, type="int"),
    ConfigKey("packed_sequence.prepacked", default=False, type="bool"),
    ConfigKey("packed_sequence.drop_long_samples", default=True, type="bool"),
    ConfigKey("packed_sequence.split_across_pack", status="ignored", note="packing no longer splits samples"),
    *(
        ConfigKey(f"packed_sequence.{key}")
        for key in ("packing_ratio", "balance_media_tokens", "collate_max_length", "attn_implementation")
    ),
    *(ConfigKey(f"packed_sequence.{key}") for key in ("packing_format", "pretokenize", "max_length", "enabled")),
    ConfigKey("packed_sequence.post_tokenize_hook_fn"),
    *(
        ConfigKey(f"{loader}.{key}")
        for loader in ("dataloader", "validation_dataloader")
        for key in ("_target_", "collate_fn", "shuffle", "shuffle_buffer_size", "batch_size", "pin_memory")
    ),
    ConfigKey("dataloader.num_workers", "data.workers", default=0),
    ConfigKey("validation_dataloader.num_workers", default=0, type="int"),
    *(
        ConfigKey(f"{loader}.{key}")
        for loader in ("dataloader", "validation_dataloader")
        for key in ("persistent_workers", "prefetch_factor", "drop_last", "dataloader_type")
    ),
    ConfigKey("dataloader.group_by_length", "data.group_by_length", default=False),
    ConfigKey("validation_dataloader.group_by_length", type="bool"),
    ConfigKey("optimizer._target_", type="str"),
    ConfigKey("optimizer.lr", "optimizer.lr", default=1e-3),
    ConfigKey("optimizer.betas", default=[0.9, 0.999]),
    ConfigKey("optimizer.eps", "optimizer.eps", default=1e-8),
    ConfigKey("optimizer.epsilon", "optimizer.eps"),
    ConfigKey("optimizer.mu", "optimizer.muon_momentum"),
    ConfigKey("optimizer.weight_decay", "optimizer.weight_decay", default=0.01),
    ConfigKey("optimizer.master_weights", type="bool"),
    ConfigKey("optimizer.exp_avg_dtype", choices=tuple(DTYPES)),
    ConfigKey("clip_grad_norm.max_norm", default=1.0),
    ConfigKey("lr_scheduler.lr_decay_style", "schedule.name", DECAY_STYLES, default="cosine"),
    ConfigKey("lr_scheduler.lr_warmup_steps", "schedule.warmup_steps"),
    ConfigKey("lr_scheduler.lr_decay_steps", "schedule.decay_steps", NULL_IS_0, default=None),
    ConfigKey("lr_scheduler.min_lr", "schedule.min_lr"),
    *(ConfigKey(f"lr_scheduler.{key}", type="float") for key in ("init_lr", "max_lr", "start_wd", "end_wd")),
    *(ConfigKey(f"lr_scheduler.{key}", type="int") for key in ("wd_incr_steps", "wsd_decay_steps")),
    *(ConfigKey(f"lr_scheduler.{key}", type="str") for key in ("wd_incr_style", "lr_wsd_decay_style")),
    ConfigKey("lr_scheduler.use_checkpoint_opt_param_scheduler", default=True, type="bool"),
    ConfigKey("lr_scheduler.override_opt_param_scheduler", default=False, type="bool"),
    ConfigKey("lr_scheduler._target_", type="str"),
    ConfigKey("checkpoint.enabled", default=True, type="bool"),
    ConfigKey("checkpoint.checkpoint_dir", "checkpoint.folder", {"checkpoints/": ""}, default="checkpoints/"),
    ConfigKey("checkpoint.model_save_format", default="safetensors", choices=("safetensors", "torch_save")),
    ConfigKey("checkpoint.save_consolidated", default="final", choices=("false", "final", "every", "true")),
    ConfigKey("checkpoint.is_async", "checkpoint.async_save", default=False),
    ConfigKey("checkpoint.max_recent_checkpoints", "checkpoint.keep", note="unset: keep all"),
    ConfigKey("checkpoint.restore_from", default=None, type="str"),
    *(
        ConfigKey(f"checkpoint.{key}")
        for key in ("model_cache_dir", "model_repo_id", "is_peft", "model_state_dict_keys", "original_model_root_dir")
    ),
    *(
        ConfigKey(f"checkpoint.{key}")
        for key in ("dequantize_base_checkpoint", "skip_task_head_prefixes_for_base_model", "staging_dir")
    ),
    *(
        ConfigKey(f"checkpoint.{key}", type="bool")
        for key in ("single_rank_consolidation", "v4_compatible", "diffusers_compatible", "wait_for_staging")
    ),
    ConfigKey("checkpoint.best_metric_key", default="default", type="str"),
    ConfigKey(
        "checkpoint.load_base_model",
        status="removed",
        replacement="model.load_base_model: …",
        note="moved to the model section",
    ),
    ConfigKey("peft._target_", type="str"),
    ConfigKey("peft.target_modules"),
    ConfigKey("peft.exclude_modules"),
    ConfigKey("peft.match_all_linear", type="bool"),
    ConfigKey("peft.dim", "peft.rank", default=8),
    ConfigKey("peft.alpha", "peft.alpha", default=32),
    ConfigKey("peft.dropout", "peft.dropout", default=0.0),
    ConfigKey("peft.lora_dtype", default=None),
    ConfigKey("peft.use_dora", default=False, type="bool"),
    ConfigKey("quantization.load_in_4bit", default=False, type="bool"),
    ConfigKey("quantization.load_in_8bit", default=False, type="bool"),
    ConfigKey("fp8.enabled", default=False, type="bool"),
    ConfigKey("fp8.recipe_name", default="tensorwise", choices=("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    ConfigKey("fp8.enable_fsdp_float8_all_gather", "precision.fp8_gather", default=False),
    ConfigKey("freeze_config.freeze_language_model", type="bool"),
    ConfigKey("freeze_config.freeze_vision_tower", type="bool"),
)

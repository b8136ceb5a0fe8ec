"""NeMo AutoModel's keys (commit 36044ad, 2026-08-22)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.recipes.foreign import together
from meshwright.recipes.foreign.values import DECAYS, NULL_IS_0, NULL_IS_TRUE, ON, READ_NULL_AS_1, SCHEDULES, STRATEGIES
from meshwright.recipes.foreign.word import Joint, Meaning, Texts, Values, Word
from meshwright.recipes.types import Recipe

DTYPES: Values = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "bf16": "bf16",
    "fp32": "fp32",
    "fp16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float16": "fp16",
}
GATE: Values = {"float32": "fp32", "null": "bf16", "torch.float32": "fp32", "bfloat16": "bf16"}
RECOMPUTE: Values = {**ON, "full": "full", "enabled": "full", "disabled": "none", "none": "none"}
GROUPED: Values = {"torch_mm": "true", "torch": "false", "te": "true", "gmm": "true", "torch_mm_mxfp8": "true"}
HISTORY: Values = {"true": "last_answer", "false": "answers"}
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

TORCH_ADAMW = "torch.optim.AdamW"
FUSED_ADAM = "transformer_engine.pytorch.optimizers.FusedAdam"
LOSS = "nemo_automodel.components.loss"
DATASETS = "nemo_automodel.components.datasets.llm"
MOCK = f"{DATASETS}.mock_iterable_dataset.MockIterableDataset"
TOKENS = f"{DATASETS}.megatron_dataset.MegatronPretraining"
CHAT = f"{DATASETS}.chat_dataset.ChatDataset"
COLUMNS = f"{DATASETS}.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
CPU_OFFLOAD = "torch.distributed.fsdp.CPUOffloadPolicy"

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
    Word("dataset.tokenizer.pretrained_model_name_or_path", "data.tokenizer"),
    Word("dataset.chat_template", "data.chat_template", TEMPLATE),
    Word("dataset.mask_history", "data.train_on", HISTORY, default=False),
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


def _dtype(text: str) -> str:
    return next((our for their, our in DTYPES.items() if their == text.strip().lower()), "")


def target(text: str) -> str:
    """The last part of an import path, in small letters and without Config: what a section builds."""
    return text.strip().strip("'\"").rpartition(".")[2].lower().removesuffix("config").replace("_", "")


OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "flashadamw": "adamw",
    "muon": "muon",
    "normuon": "muon",
    "muown": "muon",
    "sgd": "sgd",
    "lion": "lion",
    "adamwschedulefree": "schedule_free_adamw",
}


def _keeps_masters(name: str, given: Texts) -> bool:
    """Whether an optimizer keeps weights of its own, wider than those of the model."""
    if name == "flashadamw":
        return True
    return name == "fusedadam" and given.get("optimizer.master_weights", "false").lower() == "true"


def _storage(given: Texts, recipe: Recipe) -> Meaning:
    """The optimizer updates the weights as they are stored, unless it keeps wider ones itself."""
    name = target(given.get("optimizer._target_", TORCH_ADAMW))
    torch_own = name in ("adam", "adamw", "sgd")
    stored = _dtype(given.get("model.torch_dtype", "null"))
    if not stored:  # unset, or auto: as published, which is bf16 of nearly all models
        stored = "fp32" if torch_own and recipe.goal != "peft" else "bf16"
    if recipe.goal == "peft":
        stored = _dtype(given.get("peft.lora_dtype", "null")) or stored
    stored = "bf16" if stored == "fp16" else stored
    moments = stored
    if name == "fusedadam":
        moments = _dtype(given.get("optimizer.exp_avg_dtype", "null")) or "fp32"
    elif name == "flashadamw":
        moments = "bf16"
    said = {"precision.master": "fp32" if _keeps_masters(name, given) else stored, "precision.moments": moments}
    named = "optimizer._target_" in given and name in OPTIMIZERS
    return Meaning({**said, "optimizer.name": OPTIMIZERS[name]} if named else said)


def _storage_keys(recipe: Recipe) -> Mapping[str, Any]:
    name, master, moments = recipe.optimizer.name, recipe.precision.master, recipe.precision.moments
    if name not in ("adamw", "muon", "sgd"):
        raise InputError(f"there is no {name} among its optimizers", field="optimizer.name")
    wide = {"fp32": "float32", "bf16": "bfloat16"}
    found: dict[str, Any] = {"model.torch_dtype": "bfloat16" if recipe.goal == "peft" else wide[master]}
    if recipe.goal == "peft":
        found["peft.lora_dtype"] = wide[master]
    paths = {"adamw": TORCH_ADAMW, "muon": "dion.Muon", "sgd": "torch.optim.SGD"}
    if master == moments:
        return {**found, "optimizer._target_": paths[name]}
    if name != "adamw" or recipe.goal == "peft":
        raise InputError(f"its moments are kept as the weights are, in {master}", field="precision.moments")
    return {
        "model.torch_dtype": "bfloat16",
        "optimizer._target_": FUSED_ADAM,
        "optimizer.master_weights": master == "fp32",
        "optimizer.exp_avg_dtype": wide[moments],
    }


def _is_ddp(recipe: Recipe) -> bool:
    return recipe.layout.strategy == "ddp"


def _compute(given: Texts, recipe: Recipe) -> Meaning:
    """FSDP2 computes in a format of its own; plain replicas compute as they are stored, or under autocast."""
    cast = _dtype(given.get("distributed.autocast_dtype", "null"))
    if _is_ddp(recipe):
        stored = "bf16" if recipe.goal == "peft" else recipe.precision.master
        return Meaning({"precision.compute": cast or stored})
    return Meaning({"precision.compute": cast or _dtype(given.get("distributed.mp_policy.param_dtype", "")) or "bf16"})


def _compute_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.precision.compute
    spelled = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[wanted]
    if _is_ddp(recipe):
        same = wanted == ("bf16" if recipe.goal == "peft" else recipe.precision.master)
        return {} if same else {"distributed.autocast_dtype": spelled}
    if recipe.layout.strategy == "megatron_fsdp":
        if wanted != "bf16":
            raise InputError("megatron_fsdp computes in bf16", field="precision.compute")
        return {}
    return {"distributed.mp_policy.param_dtype": spelled}


def _reduce(given: Texts, recipe: Recipe) -> Meaning:
    if recipe.layout.strategy == "megatron_fsdp":
        wide = given.get("distributed.grad_reduce_in_fp32", "false").lower() == "true"
        return Meaning({"precision.reduce": "fp32" if wide else "bf16"})
    if _is_ddp(recipe):
        return Meaning({"precision.reduce": recipe.precision.master})
    text = given.get("distributed.mp_policy.reduce_dtype", "float32")
    return Meaning({"precision.reduce": "fp32" if _dtype(text) == "fp32" else "bf16"})


def _reduce_keys(recipe: Recipe) -> Mapping[str, Any]:
    wide = recipe.precision.reduce == "fp32"
    if recipe.layout.strategy == "megatron_fsdp":
        return {"distributed.grad_reduce_in_fp32": wide}
    if _is_ddp(recipe):
        if recipe.precision.reduce != recipe.precision.master:
            raise InputError("ddp sums gradients as the weights are stored", field="precision.reduce")
        return {}
    return {"distributed.mp_policy.reduce_dtype": "float32" if wide else "bfloat16"}


IMPLEMENTATIONS = {
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "flash_attention_4": "flash",
    "sdpa": "sdpa",
    "eager": "eager",
    "flex_attention": "flex",
}
KERNELS = {
    "te": "te",
    "sdpa": "sdpa",
    "flex": "flex",
    "eager": "eager",
    "cudnn": "cudnn",
    "magi": "te",
    "tilelang": "te",
}
"""Their attention backends; magi and tilelang are kernels of the same kind as Transformer Engine's."""


def _attention(given: Texts, recipe: Recipe) -> Meaning:
    backend = given.get("model.backend.attn", "null")
    if not together.null(backend):
        if backend.lower() not in KERNELS:
            raise InputError(f"allowed: {', '.join(KERNELS)}", field="model.backend.attn", value=backend)
        return Meaning({"kernels.attention": KERNELS[backend.lower()]})
    known = IMPLEMENTATIONS.get(given.get("model.attn_implementation", "").lower())
    return Meaning({"kernels.attention": known or "auto"})


def _attention_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.kernels.attention
    if wanted == "auto":
        return {}
    if wanted in ("flash", "eager", "sdpa"):
        return {"model.attn_implementation": next(key for key, our in IMPLEMENTATIONS.items() if our == wanted)}
    return {"model.backend.attn": wanted}


DISPATCHERS = {"torch": "allgather", "deepep": "deepep", "hybridep": "hybridep", "uccl_ep": "deepep", "mok": "deepep"}


def _dispatcher(given: Texts, recipe: Recipe) -> Meaning:
    text = given.get("model.backend.dispatcher", "deepep").lower()
    if given.get("model.backend.enable_deepep", "").lower() == "false":
        text = "torch"
    if text not in DISPATCHERS:
        raise InputError(f"allowed: {', '.join(DISPATCHERS)}", field="model.backend.dispatcher", value=text)
    return Meaning({"moe.dispatcher": DISPATCHERS[text]})


def _dispatcher_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.moe.dispatcher
    if wanted == "alltoall":
        raise InputError("its dispatchers gather (torch) or use deepep or hybridep", field="moe.dispatcher")
    return {"model.backend.dispatcher": "torch" if wanted == "allgather" else wanted}


LOSSES = {
    "plain": f"{LOSS}.masked_ce.MaskedCrossEntropy",
    "fused_linear": f"{LOSS}.linear_ce.FusedLinearCrossEntropy",
    "chunked": f"{LOSS}.chunked_ce.ChunkedCrossEntropy",
    "vocab_parallel": f"{LOSS}.te_parallel_ce.TEParallelCrossEntropy",
}


def _loss(given: Texts, recipe: Recipe) -> Meaning:
    wanted = target(given.get("loss_fn._target_", ""))
    known = {target(path): name for name, path in LOSSES.items()}
    return Meaning({"kernels.loss": known[wanted]} if wanted in known else {})


def _matmul(given: Texts, recipe: Recipe) -> Meaning:
    """8-bit linear layers come from torchao (fp8) or from Transformer Engine (model.backend.te_fp8)."""
    engine = given.get("model.backend.te_fp8.recipe", "null").lower()
    if not together.null(engine):
        known = {"current": "fp8_tensor", "block": "fp8_block", "mxfp8": "mxfp8"}
        return Meaning({"precision.matmul": known.get(engine, "same")})
    if given.get("fp8.enabled", "false").lower() != "true":
        return Meaning({"precision.matmul": "same"})
    rows = given.get("fp8.recipe_name", "tensorwise").lower().startswith("rowwise")
    return Meaning({"precision.matmul": "fp8_row" if rows else "fp8_tensor"})


def _matmul_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.precision.matmul
    torchao = {"fp8_tensor": "tensorwise", "fp8_row": "rowwise"}
    if wanted == "same":
        return {}
    if wanted in torchao:
        return {"fp8.enabled": True, "fp8.recipe_name": torchao[wanted]}
    if wanted not in ("fp8_block", "mxfp8"):
        raise InputError(f"there are no {wanted} layers", field="precision.matmul")
    return {"model.backend.linear": "te", "model.backend.te_fp8.recipe": wanted.removeprefix("fp8_")}


def _schedule(given: Texts, recipe: Recipe) -> Meaning:
    """The order of micro batches, and how many chunks of layers a rank holds."""
    text = given.get("distributed.pipeline.pp_schedule", "1f1b")
    known = {their.lower(): our for their, our in SCHEDULES.items()}
    if text.lower() not in known:
        raise InputError(f"allowed: {', '.join(SCHEDULES)}", field="distributed.pipeline.pp_schedule", value=text)
    name = known[text.lower()]
    if recipe.layout.pp == 1:
        return Meaning({"layout.pp_schedule": name})
    layers = given.get("distributed.pipeline.layers_per_stage", "null")
    if together.null(layers):
        return Meaning({"layout.pp_schedule": name}, {"layout.vp": "1" if name in ("1f1b", "gpipe") else "2"})
    rounding = given.get("distributed.pipeline.round_virtual_stages_to_pp_multiple", "null")
    each = together.count("distributed.pipeline.layers_per_stage", layers, 1)
    chunks = chunks_of(_layers(recipe), each, recipe.layout.pp, rounding)
    return Meaning({"layout.pp_schedule": name, "layout.vp": str(max(1, chunks))})


def _layers(recipe: Recipe) -> int:
    """The layers of the recipe's model; 0 where nobody knows it."""
    from meshwright.recipes.case import model_of

    if not recipe.model:
        return 0
    try:
        return model_of(recipe).num_layers
    except InputError:
        return 0


def chunks_of(layers: int, each: int, pp: int, rounding: str) -> int:
    """Chunks of layers per rank; what is no whole number without rounding rounds up here, and a rule tells."""
    stages = -(-layers // each)
    return stages // pp if rounding == "down" else -(-stages // pp)


def _schedule_keys(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    if layout.pp == 1:
        return {}
    if layout.pp_schedule == "dualpipe_v":
        raise InputError("DualPipeV is named there, but its stages are not placed in a V", field="layout.pp_schedule")
    found: dict[str, Any] = {
        "distributed.pipeline.pp_schedule": next(t for t, o in SCHEDULES.items() if o == layout.pp_schedule).lower()
    }
    if layout.vp == (1 if layout.pp_schedule in ("1f1b", "gpipe") else 2):
        return found
    layers = _layers(recipe)
    each = -(-layers // (layout.pp * layout.vp))
    if not each or chunks_of(layers, each, layout.pp, "up") != layout.vp:
        raise InputError(f"no layers_per_stage gives {layout.vp} chunks a rank", field="layout.vp")
    rounding = {"distributed.pipeline.round_virtual_stages_to_pp_multiple": "up"}
    whole = -(-layers // each) == layout.pp * layout.vp
    return {**found, "distributed.pipeline.layers_per_stage": each, **({} if whole else rounding)}


def _batch_keys(recipe: Recipe) -> Mapping[str, Any]:
    key = "distributed.pipeline.pp_microbatch_size" if recipe.layout.pp > 1 else "step_scheduler.local_batch_size"
    return {key: recipe.layout.micro_batch_size}


def _ranks_keys(recipe: Recipe) -> Mapping[str, Any]:
    layout = recipe.layout
    return {} if layout.dp_shard < 1 else {"distributed.dp_size": layout.dp_shard * layout.dp_replicate}


def _packing(given: Texts, recipe: Recipe) -> Meaning:
    size = next((text for text in given.values() if not together.null(text) and text != "0"), "0")
    key = next(iter(given))
    return together.packed_size({key: size}, recipe)


def _length_keys(recipe: Recipe) -> Mapping[str, Any]:
    length = recipe.data.seq_length
    if recipe.data.packing:
        return {"packed_sequence.packed_sequence_size": length}
    return {"dataset.seq_len" if recipe.data.dataset == "mock" else "dataset.seq_length": length}


PLACES = ("path_or_dataset_id", "path_or_dataset", "dataset_name", "paths", "file_pattern")


def _corpus(given: Texts, recipe: Recipe) -> Meaning:
    """What is trained on: random tokens, token files with their weights, or a set of samples."""
    kind = target(given.get("dataset._target_", ""))
    if "mock" in kind or ".mock" in given.get("dataset._target_", ""):
        return Meaning({"data.dataset": "mock"})
    place = next((given[f"dataset.{name}"] for name in PLACES if f"dataset.{name}" in given), "")
    said = {"data.dataset": place} if place else {}
    parts = [part.strip() for part in place.strip("[]").split(",")] if place.startswith("[") else []
    if len(parts) > 1 and len(parts) % 2 == 0 and all(_is_weight(part) for part in parts[::2]):
        pairs = zip(parts[1::2], parts[::2], strict=True)
        said |= {"data.blend": ",".join(f"{path}:{weight}" for path, weight in pairs)}
    if "megatron" not in kind and "dataset.split" in given and not together.null(given["dataset.split"]):
        said["data.split"] = given["dataset.split"]
    names = {"prompt": "question", "response": "answer"}
    columns = {ours: given.get(f"dataset.column_mapping.{theirs}", "") for ours, theirs in names.items()}
    if all(columns.values()):
        said["data.columns"] = ",".join(f"{ours}:{theirs}" for ours, theirs in columns.items())
    return Meaning(said)


def _is_weight(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() and float(text) > 0


def _corpus_keys(recipe: Recipe) -> Mapping[str, Any]:
    data = recipe.data
    if data.dataset == "mock":
        return {"dataset._target_": MOCK}
    if recipe.goal == "pretrain":
        weighted = [part for path, weight in data.blend.items() for part in (repr(weight), path)]
        return {"dataset._target_": TOKENS, "dataset.paths": weighted or data.dataset}
    if data.blend:
        raise InputError("its sets of conversations are not blended", field="data.blend")
    split = {"dataset.split": data.split}
    if not data.columns:
        return {"dataset._target_": CHAT, "dataset.path_or_dataset_id": data.dataset, **split}
    if set(data.columns) != {"prompt", "response"}:
        raise InputError("its column mapping names a question and an answer", field="data.columns")
    return {
        "dataset._target_": COLUMNS,
        "dataset.path_or_dataset_id": data.dataset,
        **split,
        "dataset.column_mapping.question": data.columns["prompt"],
        "dataset.column_mapping.answer": data.columns["response"],
    }


def _decay_keys(recipe: Recipe) -> Mapping[str, Any]:
    name, key = recipe.schedule.name, "lr_scheduler.lr_decay_style"
    if name == "rex":
        raise InputError("there is no rex decay", field="schedule.name")
    if name != "wsd":
        return {key: next((their for their, our in DECAYS.items() if our == name), name)}
    end = recipe.schedule.decay_steps or recipe.train.steps
    last = max(1, round(0.2 * (end - recipe.schedule.warmup_steps)))  # the part over which our own wsd decays
    return {key: "WSD", "lr_scheduler.wsd_decay_steps": last, "lr_scheduler.lr_wsd_decay_style": "minus_sqrt"}


def _decay(given: Texts, recipe: Recipe) -> Meaning:
    text = given.get("lr_scheduler.lr_decay_style", "cosine")
    known = {"constant", "linear", "cosine"} | {their.lower() for their in DECAYS}
    if text.lower() not in known:
        raise InputError(
            f"allowed: constant, linear, cosine, {', '.join(DECAYS)}", field="lr_scheduler.lr_decay_style", value=text
        )
    return Meaning(
        {"schedule.name": next((our for their, our in DECAYS.items() if their.lower() == text.lower()), text)}
    )


def _clip(given: Texts, recipe: Recipe) -> Meaning:
    text = given.get("clip_grad_norm.max_norm", "1.0")
    return Meaning({"optimizer.clip_grad": "1.0" if together.null(text) else text})


def _clip_keys(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.optimizer.clip_grad == 0:
        raise InputError("gradients are always clipped there: unset means 1.0", field="optimizer.clip_grad")
    return {"clip_grad_norm.max_norm": recipe.optimizer.clip_grad}


def _folder(given: Texts, recipe: Recipe) -> Meaning:
    if given.get("checkpoint.model_save_format", "safetensors").lower() == "torch_save":
        return Meaning({"checkpoint.export": "none"})
    whole = given.get("checkpoint.save_consolidated", "final").lower() != "false"
    return Meaning({"checkpoint.export": "consolidated" if whole else "sharded"})


def _folder_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.checkpoint.export
    return {
        "checkpoint.model_save_format": "torch_save" if wanted == "none" else "safetensors",
        "checkpoint.save_consolidated": "final" if wanted == "consolidated" else False,
    }


def _offload(given: Texts, recipe: Recipe) -> Meaning:
    text = next(iter(given.values()))
    return Meaning({"layout.offload": "none" if together.null(text) else "params"})


def _offload_keys(recipe: Recipe) -> Mapping[str, Any]:
    wanted = recipe.layout.offload
    if wanted not in ("none", "params"):
        raise InputError("only parameters can be kept in host memory", field="layout.offload")
    return {"distributed.offload_policy._target_": CPU_OFFLOAD} if wanted == "params" else {}


def _freeze(given: Texts, recipe: Recipe) -> Meaning:
    parts = {"freeze_config.freeze_language_model": "language", "freeze_config.freeze_vision_tower": "vision"}
    frozen = [part for key, part in parts.items() if given.get(key, "false").lower() == "true"]
    return Meaning({"train.freeze": f"[{','.join(frozen)}]"})


def _freeze_keys(recipe: Recipe) -> Mapping[str, Any]:
    frozen = recipe.train.freeze
    if "projector" in frozen:
        raise InputError("there is no switch for the projector", field="train.freeze")
    if not frozen:
        return {}
    return {
        "freeze_config.freeze_language_model": "language" in frozen,
        "freeze_config.freeze_vision_tower": "vision" in frozen,
    }


def _adapter(given: Texts, recipe: Recipe) -> Meaning:
    if recipe.goal == "peft" and given.get("quantization.load_in_4bit", "false").lower() == "true":
        return Meaning({"peft.method": "qlora"})
    return Meaning({"peft.method": "dora" if given.get("peft.use_dora", "false").lower() == "true" else "lora"})


def _adapter_keys(recipe: Recipe) -> Mapping[str, Any]:
    method = recipe.peft.method
    if recipe.goal != "peft" or method == "lora":
        return {}
    if method not in ("dora", "qlora"):
        raise InputError(f"there are no {method} adapters", field="peft.method")
    return {"peft.use_dora": True} if method == "dora" else {"quantization.load_in_4bit": True}


JOINTS: tuple[Joint, ...] = (
    Joint(
        (
            "model.torch_dtype",
            "peft.lora_dtype",
            "optimizer._target_",
            "optimizer.master_weights",
            "optimizer.exp_avg_dtype",
        ),
        ("precision.master", "precision.moments", "optimizer.name"),
        _storage,
        _storage_keys,
    ),
    Joint(
        ("distributed.mp_policy.param_dtype", "distributed.autocast_dtype"),
        ("precision.compute",),
        _compute,
        _compute_keys,
    ),
    Joint(
        ("distributed.mp_policy.reduce_dtype", "distributed.grad_reduce_in_fp32"),
        ("precision.reduce",),
        _reduce,
        _reduce_keys,
    ),
    Joint(
        ("optimizer.betas",),
        ("optimizer.beta1", "optimizer.beta2"),
        together.betas,
        lambda recipe: {"optimizer.betas": [recipe.optimizer.beta1, recipe.optimizer.beta2]},
    ),
    Joint(
        ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size"),
        ("data.packing", "data.seq_length"),
        _packing,
        _length_keys,
    ),
    Joint(("distributed.dp_size",), ("layout.dp_shard",), together.dp_size, _ranks_keys),
    Joint(
        ("step_scheduler.local_batch_size", "distributed.pipeline.pp_microbatch_size"),
        ("layout.micro_batch_size",),
        together.local_batch,
        _batch_keys,
    ),
    Joint(
        (
            "distributed.pipeline.pp_schedule",
            "distributed.pipeline.layers_per_stage",
            "distributed.pipeline.round_virtual_stages_to_pp_multiple",
        ),
        ("layout.pp_schedule", "layout.vp"),
        _schedule,
        _schedule_keys,
    ),
    Joint(("model.backend.attn", "model.attn_implementation"), ("kernels.attention",), _attention, _attention_keys),
    Joint(
        ("model.backend.dispatcher", "model.backend.enable_deepep"), ("moe.dispatcher",), _dispatcher, _dispatcher_keys
    ),
    Joint(
        ("loss_fn._target_",),
        ("kernels.loss",),
        _loss,
        lambda recipe: {"loss_fn._target_": LOSSES[recipe.kernels.loss]},
    ),
    Joint(
        ("fp8.enabled", "fp8.recipe_name", "model.backend.te_fp8.recipe"), ("precision.matmul",), _matmul, _matmul_keys
    ),
    Joint(
        (
            "dataset._target_",
            *(f"dataset.{name}" for name in PLACES),
            "dataset.split",
            "dataset.column_mapping.question",
            "dataset.column_mapping.answer",
        ),
        ("data.dataset", "data.blend", "data.split", "data.columns"),
        _corpus,
        _corpus_keys,
    ),
    Joint(("lr_scheduler.lr_decay_style",), ("schedule.name",), _decay, _decay_keys),
    Joint(("clip_grad_norm.max_norm",), ("optimizer.clip_grad",), _clip, _clip_keys),
    Joint(
        ("checkpoint.model_save_format", "checkpoint.save_consolidated"),
        ("checkpoint.export",),
        _folder,
        _folder_keys,
    ),
    Joint(("distributed.offload_policy._target_",), ("layout.offload",), _offload, _offload_keys),
    Joint(
        ("freeze_config.freeze_language_model", "freeze_config.freeze_vision_tower"),
        ("train.freeze",),
        _freeze,
        _freeze_keys,
    ),
    Joint(("peft.use_dora", "quantization.load_in_4bit"), ("peft.method",), _adapter, _adapter_keys),
)

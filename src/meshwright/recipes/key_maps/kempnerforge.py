"""Key map of KempnerForge (commit 5666d0d, 2026-06-30)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.recipes.key_maps import shared_composite_keys as shared
from meshwright.recipes.key_maps import wsd_keys
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields, RawValues
from meshwright.recipes.key_maps.value_maps import (
    ASYNC_MODES,
    KEMPNERFORGE_LOSSES,
    KEMPNERFORGE_SCHEDULES,
    PRECISION_NAMES,
    ROUTER_TYPES,
)
from meshwright.recipes.types import Recipe

KEYS: tuple[ConfigKey, ...] = (
    ConfigKey("model.dim", "architecture.hidden", default=4096),
    ConfigKey("model.n_layers", "architecture.layers", default=32),
    ConfigKey("model.n_heads", "architecture.heads", default=32),
    ConfigKey("model.n_kv_heads", "architecture.kv_heads", default=None, note="unset: n_heads"),
    ConfigKey("model.vocab_size", "architecture.vocab", default=32000),
    ConfigKey("model.ffn_dim_multiplier", default=1.0, type="float", note="used while ffn_hidden_dim is unset"),
    ConfigKey("model.ffn_hidden_dim", "architecture.ffn", default=None),
    ConfigKey("model.norm_type", default="rmsnorm", type="str"),
    ConfigKey("model.norm_eps", "architecture.norm_eps", default=1e-5),
    ConfigKey("model.activation", default="silu", type="str"),
    ConfigKey("model.max_seq_len", default=2048, type="int"),
    ConfigKey("model.rope_theta", "architecture.rope_theta", default=10000.0),
    ConfigKey("model.tie_embeddings", default=False, type="bool"),
    ConfigKey("model.qk_norm", default=False, type="bool"),
    ConfigKey("model.init_std", "train.init_std", note="0.02 when unset"),
    ConfigKey("model.model_type", default="transformer", type="str"),
    ConfigKey("model.sdpa_backend", default="auto", choices=("auto", "flash", "efficient", "cudnn", "math")),
    ConfigKey("model.num_experts", "architecture.experts", default=0),
    ConfigKey("model.moe_top_k", "architecture.topk", default=2),
    ConfigKey("model.moe_frequency", default=1, type="int"),
    ConfigKey("model.moe_router", "moe.balancing", ROUTER_TYPES, default="softmax_topk", choices=tuple(ROUTER_TYPES)),
    ConfigKey("model.moe_shared_experts", default=0, type="int"),
    ConfigKey("model.moe_aux_loss_weight", "moe.aux_loss", default=0.01),
    ConfigKey("model.moe_capacity_factor", "moe.capacity_factor", default=0.0),
    ConfigKey("model.moe_sequence_aux_loss_weight", default=0.0, type="float"),
    ConfigKey("model.moe_gradient_scale", default=False, type="bool"),
    ConfigKey("model.moe_bias_schedule", default="constant", choices=("constant", "cosine_decay", "linear_warmup")),
    ConfigKey("model.moe_packed_experts", default=False, type="bool"),
    ConfigKey("model.moe_expert_ffn_multiplier", default=1.0, type="float"),
    ConfigKey("model.moe_router_z_loss_weight", "moe.router_z_loss", default=0.0),
    ConfigKey("train.batch_size", "layout.micro_batch_size", default=8),
    ConfigKey("train.seq_len", "data.seq_length", default=2048),
    ConfigKey("train.max_steps", "train.steps", default=100000),
    ConfigKey(
        "train.grad_accum_steps",
        default=1,
        type="int",
        note="global batch = batch_size × grad_accum_steps × data-parallel ranks",
    ),
    ConfigKey("train.grad_clip_norm", "optimizer.clip_grad", default=1.0),
    ConfigKey("train.seed", "train.seed", default=42),
    ConfigKey("train.data_seed", default=None),
    ConfigKey("train.compile_model", "kernels.compile", default=True),
    ConfigKey("train.mixed_precision", default="bf16", choices=("bf16", "fp16", "fp32", "fp8")),
    ConfigKey("train.activation_checkpointing", "layout.recompute", default="none"),
    ConfigKey(
        "train.loss_fn",
        "kernels.loss",
        KEMPNERFORGE_LOSSES,
        default="cross_entropy",
        choices=tuple(KEMPNERFORGE_LOSSES),
    ),
    ConfigKey("train.z_loss_weight", "train.z_loss", default=0.0),
    ConfigKey("train.ce_chunk_size", default=0, type="int", note="0: 4096"),
    ConfigKey("train.shutdown_timeout_sec", "checkpoint.grace_s", default=600.0),
    ConfigKey("train.nccl_health_check_interval", default=0, type="int"),
    ConfigKey(
        "optimizer.name", "optimizer.name", default="adamw", choices=("adamw", "muon", "lion", "schedule_free_adamw")
    ),
    ConfigKey("optimizer.lr", "optimizer.lr", default=3e-4),
    ConfigKey("optimizer.weight_decay", "optimizer.weight_decay", default=0.1),
    ConfigKey("optimizer.betas", default=[0.9, 0.95], type="list"),
    ConfigKey("optimizer.eps", "optimizer.eps", default=1e-8),
    ConfigKey("optimizer.fused", default=True, type="bool"),
    ConfigKey("optimizer.muon_momentum", "optimizer.muon_momentum", default=0.95),
    ConfigKey("optimizer.muon_ns_steps", "optimizer.muon_ns_steps", default=5),
    ConfigKey("optimizer.muon_adam_lr", default=None),
    ConfigKey("optimizer.schedule_free_warmup_steps", default=0, type="int"),
    ConfigKey(
        "scheduler.name",
        "schedule.name",
        KEMPNERFORGE_SCHEDULES,
        default="cosine",
        choices=("cosine", "linear", "wsd", "constant", "rex", "none"),
    ),
    ConfigKey("scheduler.warmup_steps", "schedule.warmup_steps", default=2000),
    ConfigKey("scheduler.decay_steps", default=None, note="counts from the end of the warmup or stable phase"),
    ConfigKey("scheduler.min_lr_ratio", default=0.1, type="float", note="final / peak learning rate"),
    ConfigKey("scheduler.stable_steps", default=None),
    ConfigKey("scheduler.wsd_decay_type", default="cosine", choices=("cosine", "linear", "sqrt")),
    ConfigKey("scheduler.rex_alpha", default=1.0, type="float"),
    ConfigKey("data.dataset_path", "data.dataset", {"": "mock"}, default="", note="empty: random tokens"),
    ConfigKey("data.file_pattern", default="*.npy", type="str"),
    ConfigKey("data.tokenizer_path", "data.tokenizer", default=""),
    ConfigKey("data.num_workers", "data.workers", default=4),
    ConfigKey("data.pin_memory", default=True, type="bool"),
    ConfigKey("data.prefetch_factor", default=2, type="int"),
    ConfigKey("data.hf_dataset_name", default=None),
    ConfigKey("data.hf_dataset_config", default=None),
    ConfigKey("data.hf_dataset_split", type="str"),
    ConfigKey("data.hf_dataset_text_field", type="str"),
    ConfigKey("data.hf_dataset_image_field", type="str"),
    ConfigKey("data.hf_dataset_prompt_field", type="str"),
    ConfigKey("data.hf_image_size", default=224, type="int"),
    ConfigKey("data.hf_streaming", "data.streaming", default=False),
    ConfigKey("data.pack_sequences", "data.packing", default=False),
    ConfigKey("data.mix_temperature", "data.temperature", default=1.0),
    ConfigKey("data.anneal_start_step", default=0, type="int"),
    ConfigKey("eval.enabled", default=False, type="bool"),
    ConfigKey("eval.interval", default=1000, type="int"),
    ConfigKey("eval.steps", "train.eval_steps", default=50),
    ConfigKey("eval.dataset_path", "data.validation", default=""),
    ConfigKey("eval.file_pattern", default="*.npy", type="str"),
    *(ConfigKey(f"eval.hf_dataset_{name}", type="str") for name in ("name", "config", "split")),
    ConfigKey("distributed.dp_shard", "layout.dp_shard", default=-1),
    ConfigKey("distributed.dp_replicate", "layout.dp_replicate", default=1),
    ConfigKey("distributed.tp", "layout.tp", default=1),
    ConfigKey("distributed.pp", "layout.pp", default=1),
    ConfigKey("distributed.cp", "layout.cp", default=1, note="part of the world-size check; no mesh axis is built"),
    ConfigKey("distributed.ep", "layout.ep", default=1, note="a separate factor of the world size"),
    ConfigKey(
        "distributed.pp_schedule", "layout.pp_schedule", default="1f1b", choices=("1f1b", "gpipe", "interleaved_1f1b")
    ),
    ConfigKey("distributed.nccl_timeout_sec", default=1800, type="int"),
    ConfigKey("distributed.backend", default="cpu:gloo,cuda:nccl", type="str"),
    ConfigKey("checkpoint.dir", "checkpoint.folder", default=""),
    ConfigKey("checkpoint.interval", "checkpoint.save_every", default=1000),
    ConfigKey(
        "checkpoint.async_mode", "checkpoint.async_save", ASYNC_MODES, default="disabled", choices=tuple(ASYNC_MODES)
    ),
    ConfigKey("checkpoint.keep_last_n", "checkpoint.keep", default=3),
    ConfigKey("checkpoint.load_path", default=None),
    ConfigKey("checkpoint.export_dtype", default="bfloat16", type="str"),
    ConfigKey("checkpoint.exclude_from_loading", default=[], type="list"),
    ConfigKey("checkpoint.ignore_freeze_mismatch", default=False, type="bool"),
    ConfigKey("metrics.log_interval", "train.log_every", default=10),
    ConfigKey("metrics.enable_wandb", default=False, type="bool"),
    ConfigKey("metrics.enable_tensorboard", default=False, type="bool"),
    ConfigKey("metrics.tensorboard_dir", type="str"),
    *(ConfigKey(f"metrics.wandb_{name}", type="str") for name in ("project", "run_name", "run_id")),
    ConfigKey("profiling.enable", "train.profile", default=False),
    ConfigKey("profiling.start_step", default=5, type="int"),
    ConfigKey("profiling.end_step", default=8, type="int"),
    ConfigKey("profiling.trace_dir", type="str"),
    ConfigKey("vision_encoder.type", default="random", type="str"),
    ConfigKey("vision_encoder.path", default="", type="str"),
    ConfigKey("vision_encoder.feature_dim", default=0, type="int"),
    ConfigKey("vision_encoder.num_tokens", default=0, type="int"),
    ConfigKey("adapter.type", default="mlp_2layer", type="str"),
    ConfigKey("adapter.hidden_dim", default=0, type="int"),
    ConfigKey("adapter.activation", default="gelu", type="str"),
    ConfigKey("adapter.pool_window", default=2, type="int"),
    ConfigKey("adapter.pool_heads", default=16, type="int"),
    ConfigKey("vlm.arch", default="joint_decoder", type="str"),
    ConfigKey("vlm.max_text_len", default=512, type="int"),
    ConfigKey("vlm.cross_attention_every_n_layers", default=4, type="int"),
    ConfigKey("vlm.cross_attention_n_heads", default=0, type="int"),
    ConfigKey("vlm.cross_attention_n_kv_heads", default=0, type="int"),
    ConfigKey("vlm.mot_modalities", type="list"),
    ConfigKey("vlm.mot_image_n_heads", default=0, type="int"),
    ConfigKey("vlm.mot_image_n_kv_heads", default=0, type="int"),
    ConfigKey("vlm.mot_warm_start_from_text", default=False, type="bool"),
    ConfigKey("vlm.mot_warm_start_path", default="", type="str"),
    ConfigKey("vlm.moma_modalities", type="list"),
    ConfigKey("vlm.moma_capacity_factor", default=0.0, type="float"),
    ConfigKey("vlm.moma_gumbel_noise", default=True, type="bool"),
    ConfigKey("video.data_root", default="", type="str"),
    ConfigKey("video.dataset_type", default="webvid", type="str"),
    ConfigKey("video.dataset_name", default="webvid-10M", type="str"),
    ConfigKey("video.sampling_policy", default="uniform", type="str"),
    ConfigKey("video.split", default="train", type="str"),
    ConfigKey("video.max_samples", default=0, type="int"),
    ConfigKey("video.max_frames", default=16, type="int"),
    ConfigKey("video.min_frames", default=4, type="int"),
    ConfigKey("video.fps", default=2.0, type="float"),
    ConfigKey("video.frame_size", default=224, type="int"),
    ConfigKey("video.prompt", default="", type="str"),
)


def _last_lr(raw: RawValues, recipe: Recipe) -> MappedFields:
    ((key, text),) = raw.items()
    return MappedFields({"schedule.min_lr": repr(shared.plain(shared.as_float(key, text) * recipe.optimizer.lr))})


def _ratio(recipe: Recipe) -> Mapping[str, Any]:
    ratio = recipe.schedule.min_lr / recipe.optimizer.lr
    if ratio > 1:
        raise InputError("must not exceed optimizer.lr: scheduler.min_lr_ratio is at most 1", field="schedule.min_lr")
    return {"scheduler.min_lr_ratio": float(f"{ratio:.12g}")}  # 1e-6 / 1e-5 is written as 0.1


WSD_STYLES = {"cosine": "cosine", "linear": "linear", "sqrt": "sqrt"}
DECAY_STEPS, STABLE_STEPS, WSD_TYPE = "scheduler.decay_steps", "scheduler.stable_steps", "scheduler.wsd_decay_type"


def _decay(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Return the end of the decay: KempnerForge counts its steps from the end of the warmup or stable phase."""
    warmup, steps = recipe.schedule.warmup_steps, recipe.train.steps
    length, stable = (
        0 if shared.is_null(raw.get(key, "null")) else shared.as_count(key, raw[key])
        for key in (DECAY_STEPS, STABLE_STEPS)
    )
    if recipe.schedule.name != "wsd":
        return MappedFields({"schedule.decay_steps": str(warmup + length if length else 0)})
    length = length or steps - warmup - stable
    style = WSD_STYLES.get(raw.get(WSD_TYPE, "cosine").strip().lower(), "cosine")
    if length < 1:  # the warmup never ends
        return MappedFields({"schedule.decay_steps": "0", "schedule.wsd_decay_style": style})
    end = warmup + stable + length
    there = wsd_keys.ending_at(recipe, 0 if end == steps else end)
    return MappedFields(
        {"schedule.decay_steps": str(there.schedule.decay_steps), **wsd_keys.fields_of(length, style, there)}
    )


def _decay_keys(recipe: Recipe) -> Mapping[str, Any]:
    schedule, warmup = recipe.schedule, recipe.schedule.warmup_steps
    if schedule.name != "wsd":
        return {DECAY_STEPS: max(1, schedule.decay_steps - warmup) if schedule.decay_steps else None}
    length = wsd_keys.decay_length(recipe)
    stable = max(0, wsd_keys.decay_end(recipe) - warmup - length)
    style = wsd_keys.style_in(recipe, WSD_STYLES)
    return {DECAY_STEPS: length if schedule.decay_steps else None, STABLE_STEPS: stable, WSD_TYPE: style}


def _precision(recipe: Recipe) -> Mapping[str, Any]:
    wanted = (recipe.precision.compute, recipe.precision.matmul)
    if wanted not in PRECISION_NAMES["kempnerforge"]:
        raise InputError("has no equivalent in train.mixed_precision", field="precision.matmul")
    return {"train.mixed_precision": PRECISION_NAMES["kempnerforge"][wanted]}


def _evaluation(recipe: Recipe) -> Mapping[str, Any]:
    every = recipe.train.eval_every
    if every and not recipe.data.validation:
        raise InputError("KempnerForge evaluates on a dataset of its own, and data.validation names none")
    return {"eval.enabled": True, "eval.interval": every} if every else {"eval.enabled": False}


COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    CompositeKey(("optimizer.betas",), ("optimizer.beta1", "optimizer.beta2"), shared.betas,
        lambda recipe: {"optimizer.betas": [recipe.optimizer.beta1, recipe.optimizer.beta2]}),
    CompositeKey(("train.mixed_precision",), ("precision.compute", "precision.matmul"), shared.mixed_precision,
        _precision),
    CompositeKey(("eval.enabled", "eval.interval"), ("train.eval_every",), shared.evaluation, _evaluation),
    CompositeKey(("scheduler.min_lr_ratio",), ("schedule.min_lr",), _last_lr, _ratio),
    CompositeKey((DECAY_STEPS, STABLE_STEPS, WSD_TYPE), ("schedule.decay_steps", *wsd_keys.FIELDS), _decay,
        _decay_keys),
)  # fmt: skip

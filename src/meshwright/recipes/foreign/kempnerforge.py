"""KempnerForge's keys (commit 5666d0d, 2026-06-30)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.recipes.foreign import together
from meshwright.recipes.foreign.values import KEMPNER_DECAYS, LOSSES, NULL_IS_0, PRECISION_NAMES, ROUTERS, SAVES
from meshwright.recipes.foreign.word import Joint, Meaning, Texts, Word
from meshwright.recipes.types import Recipe

WORDS: tuple[Word, ...] = (
    Word("model.dim", "architecture.hidden", default=4096),
    Word("model.n_layers", "architecture.layers", default=32),
    Word("model.n_heads", "architecture.heads", default=32),
    Word("model.n_kv_heads", "architecture.kv_heads", default=None, note="unset means as many as n_heads"),
    Word("model.vocab_size", "architecture.vocab", default=32000),
    Word("model.ffn_dim_multiplier", default=1.0, takes="float", note="used while ffn_hidden_dim is unset"),
    Word("model.ffn_hidden_dim", "architecture.ffn", default=None),
    Word("model.norm_type", default="rmsnorm", takes="text"),
    Word("model.norm_eps", default=1e-5, takes="float"),
    Word("model.activation", default="silu", takes="text"),
    Word("model.max_seq_len", default=2048, takes="int"),
    Word("model.rope_theta", default=10000.0, takes="float"),
    Word("model.tie_embeddings", default=False, takes="truth"),
    Word("model.qk_norm", default=False, takes="truth"),
    Word("model.init_std", default=0.02, takes="float"),
    Word("model.model_type", default="transformer", takes="text"),
    Word("model.sdpa_backend", default="auto", choices=("auto", "flash", "efficient", "cudnn", "math")),
    Word("model.num_experts", "architecture.experts", default=0),
    Word("model.moe_top_k", "architecture.topk", default=2),
    Word("model.moe_frequency", default=1, takes="int"),
    Word("model.moe_router", "moe.balancing", ROUTERS, default="softmax_topk", choices=tuple(ROUTERS)),
    Word("model.moe_shared_experts", default=0, takes="int"),
    Word("model.moe_aux_loss_weight", "moe.aux_loss", default=0.01),
    Word("model.moe_capacity_factor", "moe.capacity_factor", default=0.0),
    Word("model.moe_sequence_aux_loss_weight", default=0.0, takes="float"),
    Word("model.moe_gradient_scale", default=False, takes="truth"),
    Word("model.moe_bias_schedule", default="constant", choices=("constant", "cosine_decay", "linear_warmup")),
    Word("model.moe_packed_experts", default=False, takes="truth"),
    Word("model.moe_expert_ffn_multiplier", default=1.0, takes="float"),
    Word("model.moe_router_z_loss_weight", "moe.router_z_loss", default=0.0),
    Word("train.batch_size", "layout.micro_batch_size", default=8),
    Word("train.seq_len", "data.seq_length", default=2048),
    Word("train.max_steps", "train.steps", default=100000),
    Word("train.grad_accum_steps", default=1, takes="int", note="the global batch is batch_size × this × data ranks"),
    Word("train.grad_clip_norm", "optimizer.clip_grad", default=1.0),
    Word("train.seed", "train.seed", default=42),
    Word("train.data_seed", default=None),
    Word("train.compile_model", "kernels.compile", default=True),
    Word("train.mixed_precision", default="bf16", choices=("bf16", "fp16", "fp32", "fp8")),
    Word("train.activation_checkpointing", "layout.recompute", default="none"),
    Word("train.loss_fn", "kernels.loss", LOSSES, default="cross_entropy", choices=tuple(LOSSES)),
    Word("train.z_loss_weight", "train.z_loss", default=0.0),
    Word("train.ce_chunk_size", default=0, takes="int", note="0 means 4096"),
    Word("train.shutdown_timeout_sec", "checkpoint.grace_s", default=600.0),
    Word("train.nccl_health_check_interval", default=0, takes="int"),
    Word("optimizer.name", "optimizer.name", default="adamw", choices=("adamw", "muon", "lion", "schedule_free_adamw")),
    Word("optimizer.lr", "optimizer.lr", default=3e-4),
    Word("optimizer.weight_decay", "optimizer.weight_decay", default=0.1),
    Word("optimizer.betas", default=[0.9, 0.95], takes="list"),
    Word("optimizer.eps", "optimizer.eps", default=1e-8),
    Word("optimizer.fused", default=True, takes="truth"),
    Word("optimizer.muon_momentum", "optimizer.muon_momentum", default=0.95),
    Word("optimizer.muon_ns_steps", "optimizer.muon_ns_steps", default=5),
    Word("optimizer.muon_adam_lr", default=None),
    Word("optimizer.schedule_free_warmup_steps", default=0, takes="int"),
    Word(
        "scheduler.name",
        "schedule.name",
        KEMPNER_DECAYS,
        default="cosine",
        choices=("cosine", "linear", "wsd", "constant", "rex", "none"),
    ),
    Word("scheduler.warmup_steps", "schedule.warmup_steps", default=2000),
    Word("scheduler.decay_steps", "schedule.decay_steps", NULL_IS_0, default=None),
    Word("scheduler.min_lr_ratio", default=0.1, takes="float", note="the last learning rate over the peak"),
    Word("scheduler.stable_steps", default=None),
    Word("scheduler.wsd_decay_type", default="cosine", choices=("cosine", "linear", "sqrt")),
    Word("scheduler.rex_alpha", default=1.0, takes="float"),
    Word("data.dataset_path", "data.dataset", {"": "mock"}, default="", note="empty means random tokens"),
    Word("data.file_pattern", default="*.npy", takes="text"),
    Word("data.tokenizer_path", "data.tokenizer", default=""),
    Word("data.num_workers", "data.workers", default=4),
    Word("data.pin_memory", default=True, takes="truth"),
    Word("data.prefetch_factor", default=2, takes="int"),
    Word("data.hf_dataset_name", default=None),
    Word("data.hf_dataset_config", default=None),
    Word("data.hf_dataset_split", takes="text"),
    Word("data.hf_dataset_text_field", takes="text"),
    Word("data.hf_dataset_image_field", takes="text"),
    Word("data.hf_dataset_prompt_field", takes="text"),
    Word("data.hf_image_size", default=224, takes="int"),
    Word("data.hf_streaming", "data.streaming", default=False),
    Word("data.pack_sequences", "data.packing", default=False),
    Word("data.mix_temperature", "data.temperature", default=1.0),
    Word("data.anneal_start_step", default=0, takes="int"),
    Word("eval.enabled", default=False, takes="truth"),
    Word("eval.interval", default=1000, takes="int"),
    Word("eval.steps", "train.eval_steps", default=50),
    Word("eval.dataset_path", default="", takes="text"),
    Word("eval.file_pattern", default="*.npy", takes="text"),
    Word("distributed.dp_shard", "layout.dp_shard", default=-1),
    Word("distributed.dp_replicate", "layout.dp_replicate", default=1),
    Word("distributed.tp", "layout.tp", default=1),
    Word("distributed.pp", "layout.pp", default=1),
    Word("distributed.cp", "layout.cp", default=1, note="counts in the arithmetic; no mesh axis is built for it"),
    Word("distributed.ep", "layout.ep", default=1, note="a factor of the world size of its own"),
    Word(
        "distributed.pp_schedule", "layout.pp_schedule", default="1f1b", choices=("1f1b", "gpipe", "interleaved_1f1b")
    ),
    Word("distributed.nccl_timeout_sec", default=1800, takes="int"),
    Word("distributed.backend", default="cpu:gloo,cuda:nccl", takes="text"),
    Word("checkpoint.dir", takes="text"),
    Word("checkpoint.interval", "checkpoint.save_every", default=1000),
    Word("checkpoint.async_mode", "checkpoint.async_save", SAVES, default="disabled", choices=tuple(SAVES)),
    Word("checkpoint.keep_last_n", "checkpoint.keep", default=3),
    Word("checkpoint.load_path", default=None),
    Word("checkpoint.export_dtype", default="bfloat16", takes="text"),
    Word("checkpoint.exclude_from_loading", default=[], takes="list"),
    Word("checkpoint.ignore_freeze_mismatch", default=False, takes="truth"),
    Word("metrics.log_interval", "train.log_every", default=10),
    Word("metrics.enable_wandb", default=False, takes="truth"),
    Word("metrics.enable_tensorboard", default=False, takes="truth"),
    Word("metrics.tensorboard_dir", takes="text"),
    Word("profiling.enable", "train.profile", default=False),
    Word("profiling.start", default=5, takes="int"),
    Word("profiling.end", default=8, takes="int"),
    Word("profiling.trace_dir", takes="text"),
)


def _last_lr(given: Texts, recipe: Recipe) -> Meaning:
    ((key, text),) = given.items()
    return Meaning({"schedule.min_lr": repr(together.number(key, text) * recipe.optimizer.lr)})


def _ratio(recipe: Recipe) -> Mapping[str, Any]:
    ratio = recipe.schedule.min_lr / recipe.optimizer.lr
    if ratio > 1:
        raise InputError("min_lr_ratio is at most 1", field="schedule.min_lr")
    return {"scheduler.min_lr_ratio": ratio}


def _precision(recipe: Recipe) -> Mapping[str, Any]:
    wanted = (recipe.precision.compute, recipe.precision.matmul)
    if wanted not in PRECISION_NAMES["kempnerforge"]:
        raise InputError("train.mixed_precision has no word for it", field="precision.matmul")
    return {"train.mixed_precision": PRECISION_NAMES["kempnerforge"][wanted]}


def _evaluation(recipe: Recipe) -> Mapping[str, Any]:
    every = recipe.train.eval_every
    return {"eval.enabled": True, "eval.interval": every} if every else {"eval.enabled": False}


JOINTS: tuple[Joint, ...] = (
    Joint(
        ("optimizer.betas",),
        ("optimizer.beta1", "optimizer.beta2"),
        together.betas,
        lambda recipe: {"optimizer.betas": [recipe.optimizer.beta1, recipe.optimizer.beta2]},
    ),
    Joint(("train.mixed_precision",), ("precision.compute", "precision.matmul"), together.mixed_precision, _precision),
    Joint(("eval.enabled", "eval.interval"), ("train.eval_every",), together.evaluation, _evaluation),
    Joint(("scheduler.min_lr_ratio",), ("schedule.min_lr",), _last_lr, _ratio),
)

"""KempnerForge's keys (commit 5666d0d, 2026-06-30)."""

from __future__ import annotations

from meshwright.recipes.foreign import together
from meshwright.recipes.foreign.values import KEMPNER_DECAYS, LOSSES, NULL_IS_0, ROUTERS, SAVES
from meshwright.recipes.foreign.word import Joint, Word

WORDS: tuple[Word, ...] = (
    Word("distributed.tp", "layout.tp"),
    Word("distributed.pp", "layout.pp"),
    Word("distributed.cp", "layout.cp"),
    Word("distributed.ep", "layout.ep"),
    Word("distributed.dp_shard", "layout.dp_shard"),
    Word("distributed.dp_replicate", "layout.dp_replicate"),
    Word("distributed.pp_schedule", "layout.pp_schedule"),
    Word("train.batch_size", "layout.micro_batch_size"),
    Word("train.activation_checkpointing", "layout.recompute"),
    Word("train.seq_len", "data.seq_length"),
    Word("train.max_steps", "train.steps"),
    Word("train.seed", "train.seed"),
    Word("train.compile_model", "kernels.compile"),
    Word("train.loss_fn", "kernels.loss", LOSSES),
    Word("train.z_loss_weight", "train.z_loss"),
    Word("train.grad_clip_norm", "optimizer.clip_grad"),
    Word("optimizer.name", "optimizer.name"),
    Word("optimizer.lr", "optimizer.lr"),
    Word("optimizer.weight_decay", "optimizer.weight_decay"),
    Word("optimizer.eps", "optimizer.eps"),
    Word("optimizer.muon_momentum", "optimizer.muon_momentum"),
    Word("optimizer.muon_ns_steps", "optimizer.muon_ns_steps"),
    Word("scheduler.name", "schedule.name", KEMPNER_DECAYS),
    Word("scheduler.warmup_steps", "schedule.warmup_steps"),
    Word("scheduler.decay_steps", "schedule.decay_steps", NULL_IS_0),
    Word("data.dataset_path", "data.dataset"),
    Word("data.tokenizer_path", "data.tokenizer"),
    Word("data.num_workers", "data.workers"),
    Word("data.pack_sequences", "data.packing"),
    Word("eval.steps", "train.eval_steps"),
    Word("metrics.log_interval", "train.log_every"),
    Word("profiling.enable", "train.profile"),
    Word("checkpoint.interval", "checkpoint.save_every"),
    Word("checkpoint.keep_last_n", "checkpoint.keep"),
    Word("checkpoint.async_mode", "checkpoint.async_save", SAVES),
    Word("model.dim", "architecture.hidden"),
    Word("model.n_layers", "architecture.layers"),
    Word("model.n_heads", "architecture.heads"),
    Word("model.n_kv_heads", "architecture.kv_heads"),
    Word("model.ffn_hidden_dim", "architecture.ffn"),
    Word("model.vocab_size", "architecture.vocab"),
    Word("model.num_experts", "architecture.experts"),
    Word("model.moe_top_k", "architecture.topk"),
    Word("model.moe_router", "moe.balancing", ROUTERS),
    Word("model.moe_aux_loss_weight", "moe.aux_loss"),
    Word("model.moe_router_z_loss_weight", "moe.router_z_loss"),
    Word("model.moe_capacity_factor", "moe.capacity_factor"),
)

JOINTS: tuple[Joint, ...] = (
    Joint(("optimizer.betas",), ("optimizer.beta1", "optimizer.beta2"), together.betas),
    Joint(("train.mixed_precision",), ("precision.compute", "precision.matmul"), together.mixed_precision),
    Joint(("eval.enabled", "eval.interval"), ("train.eval_every",), together.evaluation),
)

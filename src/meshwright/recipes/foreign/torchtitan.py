"""torchtitan's keys (0.2 line, and what is left of them on 2026-08-21)."""

from __future__ import annotations

from meshwright.recipes.foreign.values import SCHEDULES
from meshwright.recipes.foreign.word import Joint, Word

WORDS: tuple[Word, ...] = (
    Word("parallelism.tensor_parallel_degree", "layout.tp"),
    Word("parallelism.pipeline_parallel_degree", "layout.pp"),
    Word("parallelism.context_parallel_degree", "layout.cp"),
    Word("parallelism.expert_parallel_degree", "layout.ep"),
    Word("parallelism.expert_tensor_parallel_degree", "layout.etp"),
    Word("parallelism.data_parallel_shard_degree", "layout.dp_shard"),
    Word("parallelism.data_parallel_replicate_degree", "layout.dp_replicate"),
    Word("parallelism.pipeline_parallel_schedule", "layout.pp_schedule", SCHEDULES),
    Word("activation_checkpoint.mode", "layout.recompute"),
    Word("training.local_batch_size", "layout.micro_batch_size"),
    Word("training.global_batch_size", "train.global_batch_size"),
    Word("training.seq_len", "data.seq_length"),
    Word("training.steps", "train.steps"),
    Word("training.max_norm", "optimizer.clip_grad"),
    Word("optimizer.lr", "optimizer.lr"),
    Word("optimizer.weight_decay", "optimizer.weight_decay"),
    Word("optimizer.beta1", "optimizer.beta1"),
    Word("optimizer.beta2", "optimizer.beta2"),
    Word("optimizer.eps", "optimizer.eps"),
    Word("lr_scheduler.warmup_steps", "schedule.warmup_steps"),
    Word("lr_scheduler.decay_type", "schedule.name"),
    Word("compile.enable", "kernels.compile"),
    Word("checkpoint.interval", "checkpoint.save_every"),
    Word("checkpoint.keep_latest_k", "checkpoint.keep"),
    Word("metrics.log_freq", "train.log_every"),
    Word("profiling.enable_profiling", "train.profile"),
    Word("validation.freq", "train.eval_every"),
    Word("validation.steps", "train.eval_steps"),
)

JOINTS: tuple[Joint, ...] = ()

"""NeMo AutoModel's keys (commit 36044ad, 2026-08-22)."""

from __future__ import annotations

from meshwright.recipes.foreign import together
from meshwright.recipes.foreign.values import DECAYS, NULL_IS_0, NULL_IS_TRUE, ON, READ_NULL_AS_1, SCHEDULES, STRATEGIES
from meshwright.recipes.foreign.word import Joint, Word

WORDS: tuple[Word, ...] = (
    Word("distributed.strategy", "layout.strategy", STRATEGIES),
    Word("distributed.tp_size", "layout.tp", READ_NULL_AS_1),
    Word("distributed.pp_size", "layout.pp", READ_NULL_AS_1),
    Word("distributed.cp_size", "layout.cp", READ_NULL_AS_1),
    Word("distributed.ep_size", "layout.ep", READ_NULL_AS_1),
    Word("distributed.dp_replicate_size", "layout.dp_replicate", READ_NULL_AS_1),
    Word("distributed.sequence_parallel", "layout.sp"),
    Word("distributed.activation_checkpointing", "layout.recompute", ON),
    Word("distributed.defer_fsdp_grad_sync", "layout.defer_grad_sync"),
    Word("distributed.reshard_after_forward", "layout.reshard_after_forward", NULL_IS_TRUE),
    Word("distributed.moe.reshard_after_forward", "layout.reshard_after_forward", NULL_IS_TRUE),
    Word("step_scheduler.local_batch_size", "layout.micro_batch_size"),
    Word("distributed.pipeline.pp_schedule", "layout.pp_schedule", SCHEDULES),
    Word("distributed.enable_compile", "kernels.compile"),
    Word("step_scheduler.global_batch_size", "train.global_batch_size"),
    Word("step_scheduler.max_steps", "train.steps"),
    Word("step_scheduler.val_every_steps", "train.eval_every", NULL_IS_0),
    Word("step_scheduler.ckpt_every_steps", "checkpoint.save_every", NULL_IS_0),
    Word("dataset.seq_len", "data.seq_length"),
    Word("lr_scheduler.lr_decay_style", "schedule.name", DECAYS),
    Word("lr_scheduler.lr_warmup_steps", "schedule.warmup_steps"),
    Word("lr_scheduler.min_lr", "schedule.min_lr"),
    Word("clip_grad_norm.max_norm", "optimizer.clip_grad"),
    Word("optimizer.lr", "optimizer.lr"),
    Word("optimizer.weight_decay", "optimizer.weight_decay"),
    Word("optimizer.eps", "optimizer.eps"),
    Word("peft.dim", "peft.rank"),
    Word("peft.alpha", "peft.alpha"),
    Word("peft.dropout", "peft.dropout"),
    Word("model.backend.attn", "kernels.attention"),
    Word("model.backend.dispatcher", "moe.dispatcher", {"torch": "alltoall"}),
    Word("model.pretrained_model_name_or_path", "checkpoint.pretrained"),
    Word("seed", "train.seed"),
)

JOINTS: tuple[Joint, ...] = (
    Joint(("optimizer.betas",), ("optimizer.beta1", "optimizer.beta2"), together.betas),
    Joint(("packed_sequence.packed_sequence_size",), ("data.packing", "data.seq_length"), together.packed_size),
    Joint(("distributed.dp_size",), ("layout.dp_shard",), together.dp_size),
    Joint(
        ("step_scheduler.local_batch_size", "distributed.pipeline.pp_microbatch_size"),
        ("layout.micro_batch_size",),
        together.local_batch,
    ),
)

"""Names that NeMo AutoModel knows beside the keys of its table."""

from __future__ import annotations

from collections.abc import Mapping

TOP = frozenset(
    {
        "recipe", "seed", "step_scheduler", "dist_env", "model", "distributed", "loss_fn", "dataset",
        "packed_sequence", "dataloader", "validation_dataloader", "optimizer", "lr_scheduler", "checkpoint", "peft",
        "clip_grad_norm", "wandb", "mlflow", "comet", "compile", "fp8", "quantization", "qat", "nvtx", "sdpa_method",
        "moe_metrics", "neftune", "prewarm", "embedding_row_repair", "mfu", "processor", "tokenizer",
        "freeze_config", "benchmark", "ci", "skypilot", "nemo_run", "rng", "ema", "task_weights", "domain_mixture",
        "cuda_graph", "cuda_graphs", "partial_cuda_graphs", "full_iteration_cuda_graph", "mtp",
    }
)  # fmt: skip
"""Blocks that its language and vision-language recipes, its launchers or its own tests read."""

SPOKEN = (
    "distributed",
    "step_scheduler",
    "dist_env",
    "lr_scheduler",
    "checkpoint",
    "model",
    "optimizer",
    "seed",
    "peft",
)
"""Blocks that mean the same in every recipe; of other trainings only these are judged."""

TYPED = ("distributed.", "step_scheduler.", "lr_scheduler.", "checkpoint.", "packed_sequence.", "dataloader.")
"""Sections that refuse a key they do not know."""

OPEN = (
    "distributed.mp_policy.", "distributed.offload_policy.", "distributed.tp_plan.", "distributed.multimodal.",
    "distributed.moe.mp_policy.", "dataloader.collate_fn.", "dataloader.dynamic_batching.", "dataloader.dataset.",
    "step_scheduler.preemption_signal",
)  # fmt: skip
"""Parts of typed sections that go on as they are to what they configure."""

NEW = (
    "distributed.multimodal", "distributed.pipeline.module_fqns_per_model_part", "checkpoint.cpu_offload",
    "checkpoint.trainable_only", "checkpoint.allow_legacy_pickle_restore", "checkpoint.consolidation_timeout_minutes",
    "checkpoint.legacy_paramwrapper_layout", "packed_sequence.pad_to_multiple_of",
)  # fmt: skip
"""Keys that came after the version spoken here: in its later code, or in its own examples."""

STRATEGIES: Mapping[str, str] = {
    "fsdp2": "fsdp2",
    "megatron_fsdp": "megatron_fsdp",
    "megatron-fsdp": "megatron_fsdp",
    "mfsdp": "megatron_fsdp",
    "ddp": "ddp",
}

SCHEDULES = frozenset(
    {
        "1f1b", "interleaved1f1b", "gpipe", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev",
        "pipelineschedulesingle", "pipelineschedulemulti",
    }
)  # fmt: skip
"""Names that torch looks a schedule up by; case does not matter, underscores do."""

INSTEAD: Mapping[str, str] = {
    "interleaved_1f1b": "interleaved1f1b",
    "looped_bfs": "loopedbfs",
    "zero_bubble": "interleavedzerobubble",
    "v_schedule": "zbvzerobubble",
    "pipelineschedulemulti": "interleaved1f1b",
}
"""What was meant by names that guides use or that no recipe should; 1f1b for others."""

ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused")
DION = (
    "lr", "weight_decay", "mu", "betas", "epsilon", "adjust_lr", "nesterov", "flatten", "use_triton", "scalar_opt",
    "scalar_betas", "scalar_eps", "scalar_lr", "embed_lr", "lm_head_lr",
)  # fmt: skip
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "torch.optim.Adam": (*ADAM, "decoupled_weight_decay"),
    "torch.optim.AdamW": ADAM,
    "torch.optim.SGD": (
        "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "differentiable", "fused",
    ),
    "dion.Muon": DION,
}  # fmt: skip
"""What the optimizers that everybody uses take; others are not known here."""

NARROW = frozenset({"bf16", "bfloat16", "torch.bfloat16"})

SHORT_SETS = ("squad", "hellaswag", "xlam", "glue", "make_xlam_dataset")
"""Data sets whose samples are a few hundred tokens long."""


def is_known(key: str) -> bool:
    """Whether a key is right there although the table leaves it out: most sections go on to what they configure."""
    top = key.split(".")[0].split("[")[0]
    if key.startswith((*OPEN, *NEW)):
        return True
    if key.startswith(("validation_dataset", "validation_dataloader.collate_fn.")):
        return True
    return (top in TOP or top not in SPOKEN) and not is_closed(key)


def is_closed(key: str) -> bool:
    """Whether an unknown key stops the run."""
    return key.startswith(TYPED)

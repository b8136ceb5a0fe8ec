"""AutoModel's keys and names outside the key map."""

from __future__ import annotations

from collections.abc import Mapping

TOP_LEVEL_KEYS = frozenset(
    {
        "recipe", "seed", "step_scheduler", "dist_env", "model", "distributed", "loss_fn", "dataset",
        "packed_sequence", "dataloader", "validation_dataloader", "optimizer", "lr_scheduler", "checkpoint", "peft",
        "clip_grad_norm", "wandb", "mlflow", "comet", "compile", "fp8", "quantization", "qat", "nvtx", "sdpa_method",
        "moe_metrics", "neftune", "prewarm", "embedding_row_repair", "mfu", "processor", "tokenizer",
        "freeze_config", "benchmark", "ci", "skypilot", "nemo_run", "rng", "ema", "task_weights", "domain_mixture",
        "cuda_graph", "cuda_graphs", "partial_cuda_graphs", "full_iteration_cuda_graph", "mtp",
    }
)  # fmt: skip
"""Top-level blocks used by its LLM and VLM recipes, its launchers or its tests."""

COMMON_BLOCKS = (
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
"""Blocks with the same meaning in every recipe; only these are checked for other recipes."""

STRICT_SECTIONS = ("distributed.", "step_scheduler.", "lr_scheduler.", "checkpoint.", "packed_sequence.", "dataloader.")
"""Sections that reject unknown keys."""

OPEN_SECTIONS = (
    "distributed.mp_policy.", "distributed.offload_policy.", "distributed.tp_plan.", "distributed.multimodal.",
    "distributed.moe.mp_policy.", "dataloader.collate_fn.", "dataloader.dynamic_batching.", "dataloader.dataset.",
    "step_scheduler.preemption_signal",
)  # fmt: skip
"""Parts of strict sections that are passed through unchecked."""

NEWER_KEYS = (
    "distributed.multimodal", "distributed.pipeline.module_fqns_per_model_part", "checkpoint.cpu_offload",
    "checkpoint.trainable_only", "checkpoint.allow_legacy_pickle_restore", "checkpoint.consolidation_timeout_minutes",
    "checkpoint.legacy_paramwrapper_layout", "packed_sequence.pad_to_multiple_of",
)  # fmt: skip
"""Keys added after the mapped version, or used only in AutoModel's examples."""

STRATEGIES: Mapping[str, str] = {
    "fsdp2": "fsdp2",
    "megatron_fsdp": "megatron_fsdp",
    "megatron-fsdp": "megatron_fsdp",
    "mfsdp": "megatron_fsdp",
    "ddp": "ddp",
}

TORCH_SCHEDULES = frozenset(
    {
        "1f1b", "interleaved1f1b", "gpipe", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev",
        "pipelineschedulesingle", "pipelineschedulemulti",
    }
)  # fmt: skip
"""Schedule names of torch; case-insensitive, underscores matter."""

SCHEDULE_REPLACEMENTS: Mapping[str, str] = {
    "interleaved_1f1b": "interleaved1f1b",
    "looped_bfs": "loopedbfs",
    "zero_bubble": "interleavedzerobubble",
    "v_schedule": "zbvzerobubble",
    "pipelineschedulemulti": "interleaved1f1b",
}
"""Replacements for wrong schedule names from guides; 1f1b for others."""

ADAM_ARGUMENTS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
)
DION_ARGUMENTS = (
    "lr", "weight_decay", "mu", "betas", "epsilon", "adjust_lr", "nesterov", "flatten", "use_triton", "scalar_opt",
    "scalar_betas", "scalar_eps", "scalar_lr", "embed_lr", "lm_head_lr",
)  # fmt: skip
OPTIMIZER_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "torch.optim.Adam": (*ADAM_ARGUMENTS, "decoupled_weight_decay"),
    "torch.optim.AdamW": ADAM_ARGUMENTS,
    "torch.optim.SGD": (
        "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "differentiable", "fused",
    ),
    "dion.Muon": DION_ARGUMENTS,
}  # fmt: skip
"""Arguments of common optimizers; others are not checked."""

OWN_PACKED_KERNELS = ("Qwen3_5Moe", "GlmMoeDsa", "MiniMaxM3", "KimiLinear", "DeepseekV4", "MuseGlimmer")
"""Architectures whose own attention splits packed sequences over ranks, with sdpa, eager or tilelang."""

BF16_NAMES = frozenset({"bf16", "bfloat16", "torch.bfloat16"})

SHORT_DATASETS = ("squad", "hellaswag", "xlam", "glue", "make_xlam_dataset")
"""Datasets with samples of a few hundred tokens."""


def is_extra_key(key: str) -> bool:
    """Return whether a key outside the key map is valid: most sections are passed through."""
    top = key.split(".")[0].split("[")[0]
    if key.startswith((*OPEN_SECTIONS, *NEWER_KEYS)):
        return True
    if key.startswith(("validation_dataset", "validation_dataloader.collate_fn.")):
        return True
    return (top in TOP_LEVEL_KEYS or top not in COMMON_BLOCKS) and not rejects_unknown(key)


def rejects_unknown(key: str) -> bool:
    """Return whether an unknown key is an error."""
    return key.startswith(STRICT_SECTIONS)

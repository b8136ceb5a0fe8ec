"""DeepSpeed's sections: which reject unknown keys, and which ignore them."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.recipes.key_maps import config_keys

TABLE = "deepspeed"
STRICT_SECTIONS = (
    "zero_optimization", "bf16", "bfloat16", "fp16", "tensor_parallel", "compile", "hybrid_engine", "comms_logger",
    "tensorboard", "wandb", "csv_monitor", "comet", "weight_quantization",
)  # fmt: skip
"""Sections that reject unknown keys."""
ARGUMENT_SECTIONS = ("optimizer.params", "scheduler.params")
"""Sections passed as keyword arguments: an unknown one raises TypeError."""
TYPED_SECTIONS = ("optimizer", "scheduler")
"""Sections that DeepSpeed reads only if they name a type."""
SECTIONS = (
    *STRICT_SECTIONS, "optimizer", "scheduler", "activation_checkpointing", "data_types", "torch_autocast",
    "checkpoint", "flops_profiler", "autotuning", "data_efficiency", "aio", "pipeline", "timers", "expert_parallel",
    "datastates_ckpt", "datastates_config", "deepspeed_checkpoint_engine",
)  # fmt: skip
"""All sections."""
UNMAPPED_SECTIONS = (
    "flops_profiler.", "autotuning.", "timers.", "data_efficiency.", "aio.", "checkpoint.", "weight_quantization.",
    "expert_parallel.",
    "zero_optimization.zenflow.", "tensor_parallel.partition_config",
    "tensor_parallel.tp.", "datastates_ckpt.", "datastates_config.", "deepspeed_checkpoint_engine.",
)  # fmt: skip
"""Sections that are not in the key map because no recipe field depends on them."""


COMMENT_PREFIXES = ("_", "//", "#", "comment")
"""Prefixes of keys used as comments, which JSON lacks."""


def known(key: str) -> bool:
    """Return whether a key outside the key map exists, or is reported with its whole section."""
    return key.startswith((*UNMAPPED_SECTIONS, *COMMENT_PREFIXES)) or is_section(key) or is_ignored_section(key)


def is_section(key: str) -> bool:
    """Return whether a key names a section (an empty section is a leaf)."""
    return key in SECTIONS or any(other.startswith(f"{key}.") for other in config_keys(TABLE))


def is_ignored_section(key: str) -> bool:
    """Return whether a key is in a section that DeepSpeed ignores."""
    return "." in key.replace("[", ".") and top_level_key(key) not in SECTIONS


def top_level_key(key: str) -> str:
    """Return the top-level key."""
    return key.split(".")[0].split("[")[0]


def ignored_sections(keys: Iterable[str]) -> dict[str, str]:
    """Return the sections that DeepSpeed ignores, with the first key in each."""
    found: dict[str, str] = {}
    for key in keys:
        if is_ignored_section(key) and not key.startswith(COMMENT_PREFIXES):
            found.setdefault(top_level_key(key), key)
    return found


def closed(key: str) -> bool:
    """Return whether an unknown key is an error; otherwise it is ignored."""
    return (top_level_key(key) in STRICT_SECTIONS and "." in key) or key.startswith(
        tuple(f"{name}." for name in ARGUMENT_SECTIONS)
    )

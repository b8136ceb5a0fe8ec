"""Which of DeepSpeed's sections refuse keys they do not know, and which never look at them."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.recipes.key_maps import config_keys

TABLE = "deepspeed"
REFUSING = (
    "zero_optimization", "bf16", "bfloat16", "fp16", "tensor_parallel", "compile", "hybrid_engine", "comms_logger",
    "tensorboard", "wandb", "csv_monitor", "comet", "weight_quantization",
)  # fmt: skip
"""Sections that are checked key by key."""
CALLED = ("optimizer.params", "scheduler.params")
"""Sections that are handed over as arguments: an unknown one is refused there."""
SECTIONS = (
    *REFUSING, "optimizer", "scheduler", "activation_checkpointing", "data_types", "torch_autocast", "checkpoint",
    "flops_profiler", "autotuning", "data_efficiency", "aio", "pipeline", "timers", "expert_parallel",
    "datastates_ckpt", "datastates_config", "deepspeed_checkpoint_engine",
)  # fmt: skip
"""Every section there is."""
OPEN = (
    "flops_profiler.", "autotuning.", "timers.", "data_efficiency.", "aio.", "checkpoint.", "weight_quantization.",
    "expert_parallel.",
    "zero_optimization.zenflow.", "tensor_parallel.partition_config",
    "tensor_parallel.tp.", "datastates_ckpt.", "datastates_config.", "deepspeed_checkpoint_engine.",
)  # fmt: skip
"""Sections of parts that mean nothing here, left out of the table."""


COMMENTS = ("_", "//", "#", "comment")
"""Keys that stand in for comments, which JSON lacks."""


def known(key: str) -> bool:
    """Whether a key that the table leaves out exists, or is told of with its whole section."""
    return key.startswith((*OPEN, *COMMENTS)) or is_section(key) or unread_section(key)


def is_section(key: str) -> bool:
    """Whether a key is the name of a section, which stands alone when it is empty."""
    return key in SECTIONS or any(word.startswith(f"{key}.") for word in config_keys(TABLE))


def unread_section(key: str) -> bool:
    """Whether a key stands in a section that nothing reads."""
    return "." in key.replace("[", ".") and top_of(key) not in SECTIONS


def top_of(key: str) -> str:
    """The name at the top."""
    return key.split(".")[0].split("[")[0]


def unread_sections(keys: Iterable[str]) -> dict[str, str]:
    """Sections that nothing reads, with the first key in each."""
    found: dict[str, str] = {}
    for key in keys:
        if unread_section(key) and not key.startswith(COMMENTS):
            found.setdefault(top_of(key), key)
    return found


def closed(key: str) -> bool:
    """Whether an unknown key is an error there, or just unread."""
    return (top_of(key) in REFUSING and "." in key) or key.startswith(tuple(f"{name}." for name in CALLED))

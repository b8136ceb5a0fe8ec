"""Format a setting as a torchtitan flag."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.key_maps.torchtitan import CONTEXT_LENGTH, TOKEN_KEYS_OF


def flag(key: str, value: Any) -> str:
    """Return a flag; booleans take no value."""
    if value is None:
        return f"without --{key}"
    if isinstance(value, bool):
        section, _, last = key.rpartition(".")
        return f"--{key}" if value else f"--{section}.no_{last}" if section else f"--no_{last}"
    if isinstance(value, list | tuple):
        return f"--{key}={','.join(str(item) for item in value)}"
    return f"--{key}={value}"


OPTIMIZER_KWARGS = "optimizer.param_groups.0.optimizer_kwargs"
RENAMED_KEYS = {
    "training.seq_len": CONTEXT_LENGTH,
    "training.dataset": "dataloader.dataset",
    "optimizer.lr": f"{OPTIMIZER_KWARGS}.lr",
    "optimizer.eps": f"{OPTIMIZER_KWARGS}.eps",
    "optimizer.weight_decay": f"{OPTIMIZER_KWARGS}.weight_decay",
    "model.hf_assets_path": "hf_assets_path",
    "profiling.enable_profiling": "profiler.enable_profiling",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "validation.enable": "validator.enable",
    "validation.freq": "validator.freq",
    "validation.steps": "validator.steps",
}
"""Keys of the 0.2 line with their current names."""


def flag_main(key: str, value: Any) -> str:
    """Return a flag for main."""
    if key in TOKEN_KEYS_OF and value is not None:
        return f"--{TOKEN_KEYS_OF[key]}=$(({value} * LENGTH)), where LENGTH is --{CONTEXT_LENGTH}"
    return _format_renamed(RENAMED_KEYS.get(key, key), value)


def flag_030(key: str, value: Any) -> str:
    """Return a flag for 0.3.0, which counts in samples."""
    return _format_renamed(key if key == "training.seq_len" else RENAMED_KEYS.get(key, key), value)


def _format_renamed(key: str, value: Any) -> str:
    if key == "activation_checkpoint.mode" and value is not None:
        return f"activation-checkpoint:{str(value).replace('_', '-')}"
    return flag(key, value)

"""One setting as torchtitan's commands say it."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.key_maps.torchtitan import (
    CONTEXT_LENGTH,
    LOCAL_BATCH,
    MICRO_BATCH,
    MICRO_BATCH_TOKENS,
    STEP_TOKENS,
)


def flag(key: str, value: Any) -> str:
    """A flag of the command; truths have no value of their own."""
    if value is None:
        return f"without --{key}"
    if isinstance(value, bool):
        section, _, last = key.rpartition(".")
        return f"--{key}" if value else f"--{section}.no_{last}" if section else f"--no_{last}"
    if isinstance(value, list | tuple):
        return f"--{key}={','.join(str(item) for item in value)}"
    return f"--{key}={value}"


GROUP = "optimizer.param_groups.0.optimizer_kwargs"
RENAMED = {
    "training.seq_len": CONTEXT_LENGTH,
    "training.dataset": "dataloader.dataset",
    "optimizer.lr": f"{GROUP}.lr",
    "optimizer.eps": f"{GROUP}.eps",
    "optimizer.weight_decay": f"{GROUP}.weight_decay",
    "model.hf_assets_path": "hf_assets_path",
    "profiling.enable_profiling": "profiler.enable_profiling",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "validation.enable": "validator.enable",
    "validation.freq": "validator.freq",
    "validation.steps": "validator.steps",
}
"""Settings of the 0.2 line with their names of today."""
SAMPLES = {LOCAL_BATCH: MICRO_BATCH_TOKENS, MICRO_BATCH: MICRO_BATCH_TOKENS, "training.global_batch_size": STEP_TOKENS}
"""Settings that were counted in samples and are counted in tokens today."""


def flag_today(key: str, value: Any) -> str:
    """A setting as a command of today says it."""
    if key in SAMPLES and value is not None:
        return f"--{SAMPLES[key]}=$(({value} * LENGTH)), where LENGTH is --{CONTEXT_LENGTH}"
    return _renamed(RENAMED.get(key, key), value)


def flag_released(key: str, value: Any) -> str:
    """A setting as a command of 0.3.0 says it, which counts in samples."""
    return _renamed(key if key == "training.seq_len" else RENAMED.get(key, key), value)


def _renamed(key: str, value: Any) -> str:
    if key == "activation_checkpoint.mode" and value is not None:
        return f"activation-checkpoint:{str(value).replace('_', '-')}"
    return flag(key, value)

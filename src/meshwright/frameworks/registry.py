"""The supported frameworks. Each is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from meshwright.choices import CHECKED_ONLY, FRAMEWORKS, FRONT_ENDS
from meshwright.errors import unknown
from meshwright.frameworks.framework import Format, Framework

FORMATS: Mapping[str, Mapping[Format, tuple[str, ...]]] = {
    "megatron-lm": {
        "shell": ("pretrain_", "--num-layers", "--micro-batch-size", "model-parallel-size", "model_parallel_size")
    },
    "megatron-deepspeed": {"shell": ("pretrain_", "--deepspeed", "--micro-batch-size", "--zero-stage")},
    "megatron-bridge": {
        "shell": ("run_recipe", "setup_experiment", "train.sh", "megatron.bridge", "run_script"),
        "python": (),
        "yaml": ("model_parallel_size", "megatron.bridge", "train_iters", "ddp:", "comm_overlap:"),
    },
    "automodel": {
        "yaml": ("nemo_automodel", "distributed:", "step_scheduler:", "recipe:"),
        "shell": ("automodel", "am ", "finetune.py", "pretrain.py", "train_ft.py", "benchmark.py"),
    },
    "torchtitan": {
        "toml": (),
        "shell": ("torchtitan", "run_train", "--job.", "--module"),
        "python": ("model_registry",),
    },
    "kempnerforge": {"toml": (), "shell": (".toml",)},
    "deepspeed": {"json": (), "shell": ("deepspeed",), "python": ("deepspeed=",)},
    "accelerate": {
        "yaml": ("distributed_type", "compute_environment"),
        "shell": ("accelerate", "trl", "per_device_train_batch_size", "num_train_epochs"),
        "python": ("TrainingArguments(", "SFTConfig(", "Trainer("),
    },
}
"""File formats of each framework, with texts of which each of its files contains at least one (empty: no such text).
Importing a framework that cannot match would take longer than the check."""
NAMES = FRAMEWORKS
READ: tuple[str, ...] = (*NAMES, *CHECKED_ONLY)
"""Frameworks whose files are read; the front ends are read by check alone."""


def framework(name: str) -> Framework:
    """Return a framework by name."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in READ:
        raise unknown("framework", name, (*READ, *FRONT_ENDS, "meshwright"))
    found: Framework = import_module(f"meshwright.frameworks.{plain.replace('-', '_')}.definition").FRAMEWORK
    return found

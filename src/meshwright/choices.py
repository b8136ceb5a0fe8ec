"""Names that users choose from. Kept apart from the packages that implement them, so that reading options is fast."""

from __future__ import annotations

from typing import Literal, get_args

Goal = Literal["pretrain", "sft", "peft"]
Engine = Literal["meshwright", "megatron", "torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"]
Framework = Literal[
    "megatron-lm", "megatron-bridge", "automodel", "torchtitan", "kempnerforge", "deepspeed", "accelerate"
]
Scheduler = Literal["torchrun", "slurm", "hosts", "kubernetes", "skypilot"]
RecipeFormat = Literal["toml", "yaml", "json", "python"]

GOALS: tuple[Goal, ...] = get_args(Goal)
ENGINES: tuple[Engine, ...] = get_args(Engine)
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)
FORMATS: tuple[RecipeFormat, ...] = get_args(RecipeFormat)

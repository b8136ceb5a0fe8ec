"""Ministral 3."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

MINISTRAL3_SFT: dict[str, Any] = {
    "global_batch_size": 32,
    "seq_length": 4096,
    "min_lr": 5e-7,
    "warmup_steps": 10,
    "steps": 50,
    "beta2": 0.95,
    "packing": False,
}
MINISTRAL3_PEFT = {**MINISTRAL3_SFT, "lr": 2e-4, "min_lr": 2e-5}


@recipe(family="ministral")
def ministral3_3b_sft_config() -> Recipe:
    return sft("ministral3_3b", 1, **MINISTRAL3_SFT)


@recipe(family="ministral")
def ministral3_3b_peft_config() -> Recipe:
    return peft("ministral3_3b", 1, **MINISTRAL3_PEFT)


@recipe(family="ministral", published=Published(start={"recompute": "none"}))
def ministral3_8b_sft_config() -> Recipe:
    return sft("ministral3_8b", 2, tp=2, recompute="full", **MINISTRAL3_SFT)


@recipe(family="ministral")
def ministral3_8b_peft_config() -> Recipe:
    return peft("ministral3_8b", 1, **MINISTRAL3_PEFT)


@recipe(family="ministral")
def ministral3_14b_sft_config() -> Recipe:
    return sft("ministral3_14b", 4, tp=4, **MINISTRAL3_SFT)


@recipe(family="ministral")
def ministral3_14b_peft_config() -> Recipe:
    return peft("ministral3_14b", 2, tp=2, **MINISTRAL3_PEFT)

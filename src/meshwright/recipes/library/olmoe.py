"""OLMoE."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

OLMOE: dict[str, Any] = {"ep": 8, "recompute": "selective", "reduce": "bf16", "grads": "bf16", "moments": "bf16"}


@recipe(family="olmoe", published=Published(ep=8))
def olmoe_7b_pretrain_config() -> Recipe:
    return pretrain("olmoe_7b", 8, global_batch_size=2048, warmup_steps=2000, steps=500000, **OLMOE)


@recipe(family="olmoe", published=Published(ep=8))
def olmoe_7b_sft_config() -> Recipe:
    return sft("olmoe_7b", 8, seq_length=4096, beta2=0.95, **OLMOE)


@recipe(family="olmoe", published=Published(ep=8))
def olmoe_7b_peft_config() -> Recipe:
    return peft("olmoe_7b", 8, seq_length=4096, beta2=0.95, **OLMOE)

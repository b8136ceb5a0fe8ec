"""Wan and FLUX."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

WAN: dict[str, Any] = {
    "seq_length": 1024,
    "lr": 9e-5,
    "min_lr": 9e-6,
    "warmup_steps": 2000,
    "steps": 10_000,
    "reduce": "bf16",
    "grads": "bf16",
}
FLUX: dict[str, Any] = {
    "tp": 2,
    "global_batch_size": 16,
    "seq_length": 1024,
    "lr": 1e-4,
    "min_lr": 1e-5,
    "warmup_steps": 1000,
    "steps": 10_000,
    "reduce": "bf16",
    "grads": "bf16",
    "offload": "optimizer",
}


@recipe(family="diffusion", published=Published(tp=1, cp=8))
def wan_1_3B_pretrain_config() -> Recipe:  # noqa: N802
    return pretrain("wan_1_3b", 8, cp=8, global_batch_size=2, **WAN)


@recipe(family="diffusion", published=Published(tp=1, cp=8))
def wan_1_3B_sft_config() -> Recipe:  # noqa: N802
    return sft("wan_1_3b", 8, cp=8, global_batch_size=2, beta2=0.95, packing=False, dataset="mock", **WAN)


@recipe(family="diffusion", published=Published(tp=2, cp=4))
def wan_14B_pretrain_config() -> Recipe:  # noqa: N802
    return pretrain("wan_14b", 8, tp=2, cp=4, global_batch_size=1, recompute="full", **WAN)


@recipe(family="diffusion", published=Published(tp=2, cp=4))
def wan_14B_sft_config() -> Recipe:  # noqa: N802
    return sft(
        "wan_14b",
        8,
        tp=2,
        cp=4,
        global_batch_size=1,
        beta2=0.95,
        recompute="full",
        packing=False,
        dataset="mock",
        **WAN,
    )


@recipe(family="diffusion", published=Published(tp=2, cp=1, start={"offload": "none"}))
def flux_12b_pretrain_config() -> Recipe:
    return pretrain("flux_12b", 2, **FLUX)


@recipe(family="diffusion", published=Published(tp=2, cp=1, start={"offload": "none"}))
def flux_12b_sft_config() -> Recipe:
    return sft("flux_12b", 2, beta2=0.95, packing=False, dataset="mock", **FLUX)

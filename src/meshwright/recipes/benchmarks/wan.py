"""Benchmarks of Wan 14B: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.diffusion import wan_14B_pretrain_config
from meshwright.recipes.registry import recipe
from meshwright.recipes.types import Recipe


@recipe(family="diffusion")
def wan_14b_pretrain_16gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        wan_14B_pretrain_config(),
        "16xGB200",
        "bf16",
        cp=4,
        global_batch_size=64,
        recompute="full",
        overlap_grad_reduce=False,
    )


@recipe(family="diffusion")
def wan_14b_pretrain_32gpu_h100_bf16_config() -> Recipe:
    return benchmark(wan_14b_pretrain_16gpu_gb200_bf16_config(), "32xH100", "bf16", tp=2, recompute_layers=8)

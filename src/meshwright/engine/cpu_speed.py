"""How fast this CPU multiplies matrices in 16 bits, measured: its name does not tell."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    import torch

SIZE = 128  # 4 MFLOP: 0.1 ms in fp32, and 10 ms where it is a hundred times slower
LEAST, MOST, BUDGET_S = 2, 10, 0.01  # products per format, and when to stop repeating them
SLOW = 3.0  # times slower than fp32


def slow_precision_warning(recipe: Recipe, has_checkpoints: bool) -> str:
    """Return the warning if the recipe's 16-bit format is much slower than fp32 on this CPU; empty if it is not."""
    compute = recipe.precision.compute
    if compute == "fp32":
        return ""
    ratio = slowdown(compute)
    if ratio < SLOW:
        return ""
    also = " --accept-changes, because this run has checkpoints" if has_checkpoints else ""
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
    return (
        f"precision.compute={compute}: this CPU multiplies matrices {times} times slower in {compute} than in fp32 "
        f"(measured); faster: precision.compute=fp32{also}"
    )


def slowdown(compute: str) -> float:
    """Return how many times longer a matrix product takes in bf16 or fp16 than in fp32, in less than 50 ms."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    return _seconds(torch.ones(SIZE, SIZE, dtype=dtype)) / max(_seconds(torch.ones(SIZE, SIZE)), 1e-9)


def _seconds(matrix: torch.Tensor) -> float:
    """Return the best time of a few products: the first one sets up the kernel, and others may be interrupted."""
    began, best, count = time.perf_counter(), float("inf"), 0
    while count < LEAST or (count < MOST and time.perf_counter() - began < BUDGET_S):
        start = time.perf_counter()
        matrix @ matrix
        best, count = min(best, time.perf_counter() - start), count + 1
    return best

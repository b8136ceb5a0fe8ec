"""What is slow on a CPU: 16-bit matrix products, compiling, and steps, measured because its name does not tell."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

from meshwright.costs.flops import flops_per_token
from meshwright.display import duration, plural
from meshwright.errors import InputError
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    import torch

SIZE = 128  # 4 MFLOP: 0.1 ms in fp32, and 10 ms where it is a hundred times slower
LEAST, MOST, BUDGET_S = 2, 10, 0.01  # products per format, and when to stop repeating them
COMPILERS = ("g++", "clang++")
SLOW = 3.0  # times slower than fp32
ROWS, WIDTH = 256, 1024  # of the product that measures the rate of a step: 0.5 GFLOP
BESIDE_PRODUCTS = 1.6  # a step's time over that of its matrix products; measured: 8 layers of 512, 1.3 to 2.0
RECOMPUTED = {"full": 4 / 3, "selective": 1.1}  # of a step's FLOPs
SHORT_RUN_S = 60.0  # runs that end sooner need no announcement


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


def compile_warning(recipe: Recipe) -> str:
    """Return the warning if the recipe is compiled on a CPU; raise InputError if that is not possible here."""
    if not recipe.kernels.compile:
        return ""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS) if name):
        reason = f"on a CPU, torch.compile needs a C++ compiler ({' or '.join(COMPILERS)}), and there is none here"
        raise InputError(reason, field="kernels.compile", value="true", fix=("kernels.compile=false",))
    return (
        "kernels.compile=true: on a CPU, compiling takes minutes before the first step, and a run gains little; "
        "faster: kernels.compile=false"
    )


def step_time_note(case: Case, steps: int) -> str:
    """Return how long a step and a run of `steps` will take on this CPU; empty for short runs."""
    recipe = case.recipe
    tokens = recipe.train.global_batch_size * recipe.data.seq_length
    flops = float(flops_per_token(case)) * tokens * RECOMPUTED.get(recipe.layout.recompute, 1.0)
    rate = product_rate(recipe.precision.compute) * min(float(case.world), cores() / _threads())
    step_s = BESIDE_PRODUCTS * flops / rate
    if step_s * steps < SHORT_RUN_S:
        return ""
    days = step_s / 86_400
    whole = f", {plural(steps, 'step')} about {duration(days * steps)}" if steps > 1 else ""
    return (
        f"on this CPU, step 1 takes about {duration(days)}{whole}: {flops / 1e12:,.3g} TFLOP per step of "
        f"{plural(recipe.train.global_batch_size, 'sample')}, {rate / 1e9:,.3g} GFLOP/s (measured)"
    )


def product_rate(compute: str) -> float:
    """Return the FLOP/s of matrix products in a format, with this process's threads."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute, torch.float32)
    rows, weights = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)
    best = float("inf")
    for _ in range(LEAST + 1):
        start = time.perf_counter()
        rows @ weights
        best = min(best, time.perf_counter() - start)
        if best > 1.0:  # slower by far than what the first product sets up
            break
    return 2.0 * ROWS * WIDTH * WIDTH / best


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slowdown(compute: str) -> float:
    """Return how many times longer a matrix product takes in bf16 or fp16 than in fp32, in less than 50 ms."""
    import torch

    dtype, threads = {"bf16": torch.bfloat16, "fp16": torch.float16}[compute], torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads would mostly wait for each other
    try:
        return _seconds(torch.ones(SIZE, SIZE, dtype=dtype)) / max(_seconds(torch.ones(SIZE, SIZE)), 1e-9)
    finally:
        torch.set_num_threads(threads)


def _seconds(matrix: torch.Tensor) -> float:
    """Return the best time of a few products: the first one sets up the kernel.

    It is the thread's own time, in which other processes do not count.
    """
    began, best, count = time.thread_time(), float("inf"), 0
    while count < LEAST or (count < MOST and time.thread_time() - began < BUDGET_S):
        start = time.thread_time()
        matrix @ matrix
        best, count = min(best, time.thread_time() - start), count + 1
    return best

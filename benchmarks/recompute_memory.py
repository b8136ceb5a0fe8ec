"""Measure the memory saved by full recompute on one GPU: half of Llama 3 8B, compiled, with and without it.

python -m benchmarks.recompute_memory
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from benchmarks.engine_h200 import BF16, DEVICE, WARM, Run, ours, recipe_of, timed
from benchmarks.fp8_speed import _in

from meshwright.engine.model.config import config_for

MICRO_BATCH, LAYERS = 4, 16
RUNS = [
    Run(f"{name} {recompute}", "llama3_8b", MICRO_BATCH, precision=precision, recompute=recompute, layers=LAYERS)
    for name, precision in (("bf16", BF16), ("fp8", _in("fp8_tensor")))
    for recompute in ("none", "full")
]


def main() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for run in RUNS:
        recipe = recipe_of(run)
        torch.cuda.reset_peak_memory_stats()
        step = ours(run, recipe, config_for(recipe))
        losses = [step() for _ in range(WARM)]
        rate = MICRO_BATCH * recipe.data.seq_length / timed(step, losses)
        peak = torch.cuda.max_memory_allocated(DEVICE) / 2**30
        print(f"{run.name:<12}{rate:>8,.0f} tok/s  peak {peak:.1f} GiB  loss {float(losses[-1]):.4f}", flush=True)
        del step
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Compare fp8 linear layers with bf16 on one GPU: tokens per second, peak memory, and losses on the same samples.

    python -m benchmarks.fp8_speed OUT.json [--tiny]

Every row trains the Llama 3 8B shape from the same weights on the same samples, so losses can be compared step by
step. The last two rows are a slice of the model with fp32 weights, sharded (over one GPU here): weights gathered in
bf16 and in fp8 must give the same losses.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from benchmarks.engine_h200 import BF16, DEVICE, TINY, WARM, Run, ours, recipe_of, save, timed

from meshwright.engine.model.config import config_for, tiny
from meshwright.recipes.types import Precision

SPANS = 2  # timed spans; the faster one counts, the losses of both are kept
MICRO_BATCH = 5  # the largest that fits in bf16
SLICE = 4


def _in(matmul: str, start: Precision = BF16, **more: Any) -> Precision:
    return msgspec.structs.replace(start, matmul=matmul, **more)


MASTERS = Precision(reduce="bf16")
RUNS = (
    Run("bf16", "llama3_8b", MICRO_BATCH),
    Run("fp8_tensor", "llama3_8b", MICRO_BATCH, precision=_in("fp8_tensor"), against="bf16"),
    Run("fp8_row", "llama3_8b", MICRO_BATCH, precision=_in("fp8_row"), against="bf16"),
    Run("slice, gathered in bf16", "llama3_8b", 2, precision=_in("fp8_tensor", MASTERS), layers=SLICE),
    Run(
        "slice, gathered in fp8",
        "llama3_8b",
        2,
        precision=_in("fp8_tensor", MASTERS, fp8_gather=True),
        layers=SLICE,
        against="slice, gathered in bf16",
    ),
)


def measure(run: Run) -> dict[str, Any]:
    """Return tokens per second, peak memory and losses of a row."""
    recipe = recipe_of(run)
    config = config_for(recipe)
    if TINY:
        config = tiny(config, 2)
        recipe = msgspec.structs.replace(
            recipe, precision=msgspec.structs.replace(run.precision, compute="fp32", master="fp32")
        )
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = ours(run, recipe, config)
    losses = [step() for _ in range(WARM)]
    seconds = min(timed(step, losses) for _ in range(SPANS))
    row = {
        "name": run.name,
        "micro_batch": run.micro_batch,
        "precision": msgspec.to_builtins(recipe.precision),
        "tokens_per_s": run.micro_batch * recipe.data.seq_length / seconds,
        "step_s": seconds,
        "losses": [round(float(loss), 5) for loss in losses],
    }
    if DEVICE.type == "cuda":
        row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def compare(row: dict[str, Any], base: dict[str, Any]) -> None:
    """Add a row's speedup over its baseline and the largest difference of their losses."""
    row["ratio"] = row["tokens_per_s"] / base["tokens_per_s"]
    row["largest_loss_difference"] = max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True))


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: dict[str, dict[str, Any]] = {}
    for run in RUNS:
        row = measure(run)
        if run.against in rows:
            compare(row, rows[run.against])
        rows[run.name] = row
        print(
            f"{run.name:<26}{row['tokens_per_s']:>9,.0f} tok/s  {row.get('ratio', 1):.3f} ×  "
            f"{row.get('peak_allocated_gib', 0):6.1f} GiB  loss {row['losses'][0]} → {row['losses'][-1]}, "
            f"max difference {row.get('largest_loss_difference', 0):.5f}",
            flush=True,
        )
        save(out, list(rows.values()))
        out.write_text(
            json.dumps({**json.loads(out.read_text()), "command": "python -m benchmarks.fp8_speed"}, indent=1)
        )
        gc.collect()
        torch._dynamo.reset()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

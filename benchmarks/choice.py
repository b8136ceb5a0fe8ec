"""Does the cost model pick the right layout? For every published sweep: the layout it ranks first vs. the fastest.

    python benchmarks/choice.py [--csv benchmarks/data/measurements.csv]

A sweep is one source's rows of the same model, GPUs, global batch, sequence length and precision with at least four
different layouts. The score of a sweep is the measured speed of the layout the model ranks first, divided by that of
the fastest measured one; a layout measured several times counts with its median.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.costs.accuracy import TIME_TIERS
from meshwright.costs.measurements import BY_TFLOPS, Measurement, batches, read
from meshwright.costs.time import step_time

HERE = Path(__file__).parent
MIN_LAYOUTS = 4
SAME = ("world", "global_batch_size", "seq_length", "matmul", "compute")
LAYOUT = (
    "strategy", "tp", "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "sp", "micro_batch_size", "recompute",
    "recompute_modules", "attention", "attention_kernel", "norm_kernel", "compile", "cuda_graphs", "offload",
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """One sweep and the score of the model's choice."""

    source: str
    model: str
    gpus: str
    batch: int
    seq_length: int
    layouts: int
    score: float  # measured speed of the chosen layout over the best measured


def sweeps(rows: list[Measurement]) -> list[Sweep]:
    """Return the scored sweeps of the rows."""
    timed = [r for r in rows if r.step_s and r.timed_by != BY_TFLOPS and r.tier in TIME_TIERS]
    usable = [r for r in timed if r.case and not r.oom]
    predicted = np.empty(len(usable))
    for case, indices in batches(usable):
        predicted[indices] = step_time(case).step_s
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row, seconds in zip(usable, predicted, strict=True):
        same = (row.source, row.model, row.gpu, *(row.values[name] for name in SAME))
        layout = tuple(row.values.get(name) for name in LAYOUT)
        found[same][layout].append((float(seconds), row.step_s))
    return [_score(same, layouts) for same, layouts in found.items() if len(layouts) >= MIN_LAYOUTS]


def _score(same: tuple[Any, ...], layouts: dict[tuple[Any, ...], list[tuple[float, float]]]) -> Sweep:
    pairs = [(min(p for p, _ in runs), float(np.median([m for _, m in runs]))) for runs in layouts.values()]
    chosen = min(pairs)[1]
    best = min(measured for _, measured in pairs)
    source, model, gpu, world, batch, seq, *_ = same
    return Sweep(source, model.name, f"{world}x{gpu}", batch, seq, len(pairs), best / chosen)


def summary(found: list[Sweep]) -> dict[str, Any]:
    """Return the median and the 10th percentile of the scores."""
    scores = np.array([sweep.score for sweep in found])
    return {
        "sweeps": len(found),
        "median_pct": round(100 * float(np.median(scores)), 2),
        "worst_tenth_pct": round(100 * float(np.quantile(scores, 0.1)), 2),
        "best_found": int(np.sum(scores > 0.999)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=HERE / "data" / "measurements.csv")
    found = sweeps(read(parser.parse_args().csv))
    for sweep in sorted(found, key=lambda s: s.score):
        print(
            f"{100 * sweep.score:6.1f} %  {sweep.layouts:3d} layouts  {sweep.model:24s} {sweep.gpus:14s}"
            f" batch {sweep.batch:5d} seq {sweep.seq_length:6d}  {sweep.source}"
        )
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    main()

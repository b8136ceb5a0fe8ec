"""Pipeline schedules and calibrations, kept in a file: every pass in its order and time, every number of a profile.

`python -m tests.costs.kept_schedules` writes them anew.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace
from tests import kept

from meshwright import api
from meshwright.clusters import gpu
from meshwright.costs import calibrate
from meshwright.costs.calibration import shipped
from meshwright.costs.measurements import Measurement, read
from meshwright.costs.timeline import ORDERS, V_SHAPED, order, timeline
from meshwright.errors import InputError

FILE = Path(__file__).with_name("schedules.json")
ROOT = Path(__file__).parents[2]
SHAPES = ((1, 1, 3), (2, 1, 3), (3, 2, 7), (4, 3, 8), (4, 2, 9))
GPU = gpu("H100")
POINTS: tuple[dict[str, Any], ...] = (
    *({"kind": "gemm", "shape": [4096, 2048, size], "precision": "bf16", "tflops": size / 8} for size in (2047, 2048)),
    *({"kind": "gemm", "shape": [8192] * 3, "precision": name, "tflops": 700.0} for name in ("bf16", "fp8", "fp3")),
    {"kind": "attention", "pass": "forward", "tflops": 500.0},
    {"kind": "attention", "pass": "backward", "tflops": 600.0},
    {"kind": "copy", "pass": "forward", "gb_s": 2800.0, "tflops": 900.0},
    {"kind": "copy", "gb_s": 2900.0},
    {"kind": "link", "gb_s": 300.0},
    {"kind": "network", "gb_s": 20.0},
)
TIMELINES = (("interleaved_1f1b", 4, 2, 24), ("zbv", 2, 2, 8), ("1f1b", 1, 1, 8), ("1f1b", 8, 1, 32768))
RUNS = ((1, 1.0), (4, 1.1), (5, 0.9), (2, 0.15), (2, 8.0))  # how many, and how much slower


def orders() -> Iterator[tuple[str, Any]]:
    """Yield the passes of every rank in every schedule."""
    for name in ORDERS:
        for pp, vp, micro_batches in SHAPES:
            chunks = 2 if name in V_SHAPED else 1 if name == "1f1b" else vp
            if name == "dualpipe_v" and micro_batches < 2 * pp:
                continue
            ranks = [order(name, rank, pp, chunks, micro_batches) for rank in range(pp)]
            text = " | ".join(" ".join(f"{p.kind}{p.chunk}.{p.micro_batch}" for p in rank) for rank in ranks)
            yield f"{name} pp={pp} vp={chunks} micro_batches={micro_batches}", text


def timelines() -> Iterator[tuple[str, Any]]:
    """Yield the times of a step's passes, of whole and of partly simulated steps."""
    for name, pp, vp, batch in TIMELINES:
        options = [f"layout.pp_schedule={name}", f"layout.pp={pp}", f"layout.vp={vp}", "layout.tp=8"]
        plan = api.estimate("llama3-70b", gpus="64xH100", overrides=[*options, f"train.global_batch_size={batch}"])
        found = timeline(plan.case)
        passes = [value for one in found.passes[:60] for value in (one.rank, one.kind, one.start_s, one.end_s)]
        facts = {key: getattr(found, key) for key in found.__struct_fields__ if key != "passes"}
        yield f"timeline {name} {pp} {vp} {batch}", kept.lines({**facts, "passes": passes})


@cache
def runs() -> list[Measurement]:
    """Return published runs on A100 and H100 with a step time."""
    with (ROOT / "benchmarks" / "data" / "measurements.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "fms_fsdp"]
    with tempfile.NamedTemporaryFile("w", suffix=".csv", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        return list(read(Path(file.name)))


def calibrations() -> Iterator[tuple[str, Any]]:
    """Yield profiles of points and of runs, what they say, and where they apply."""
    found: dict[str, Callable[[], Any]] = {
        "points": lambda: calibrate.from_points(POINTS, GPU, "points"),
        "points without copies": lambda: calibrate.from_points(POINTS[:5], GPU),
        "points without matmuls": lambda: calibrate.from_points(POINTS[5:], GPU),
        "points without links": lambda: calibrate.from_points(POINTS[1:9:2] + POINTS[7:9], GPU),
    }
    for count, factor in RUNS:
        scaled = [replace(row, step_s=row.step_s * factor) for row in runs()[:count]]
        found[f"{count} runs x {factor}"] = partial(calibrate.from_runs, scaled, "a table")
    found["two types"] = lambda: calibrate.from_runs([*runs()[:2], *runs()[-1:]], "all")
    found["one type"] = lambda: calibrate.from_runs(runs(), "all", one_type=True)
    found["no runs"] = lambda: calibrate.from_runs([replace(row, step_s=0.0) for row in runs()[:2]], "none")
    for name, make in found.items():
        yield f"calibration of {name}", _described(make)


def _described(make: Callable[[], Any]) -> Any:
    try:
        made = make()
    except InputError as error:
        return f"{error.field}: {error.reason}"
    profiles = made if isinstance(made, list) else [made]
    texts = [text for one in profiles for text in (calibrate.to_text(one), *_applies(one))]
    return kept.lines(dict(enumerate(texts)))


def _applies(profile: calibrate.MachineProfile) -> Iterator[str]:
    """Yield the speeds of the architecture with a profile, and the sentence about other GPUs and engines."""
    changed = profile.apply(shipped())
    yield str(to_builtins(changed.gpus[gpu(profile.gpu).arch]))
    machine = replace(changed, machine=profile)
    for on in ("H100", "H200", "A100", "B200"):
        for engine in ("meshwright", "megatron"):
            yield calibrate.applied(machine, gpu(on), engine)[0].partition("): ")[2]


def answers() -> Iterator[tuple[str, Any]]:
    """Yield every schedule, timeline and calibration."""
    yield from orders()
    yield from timelines()
    yield from calibrations()


if __name__ == "__main__":
    kept.write(FILE, answers)

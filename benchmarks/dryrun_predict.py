"""Compare the dry run of every case with its measurement on an H200.

    python -m benchmarks.dryrun_predict MEASURED.json OUT.json [CASE or pattern …]

Runs without a GPU. Prints one table: allocated and reserved memory, measured and predicted.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fnmatch
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.dryrun_cases import CASES, Case, recipe_of

from meshwright.clusters import cluster
from meshwright.dryrun.ranks import run_parallel
from meshwright.dryrun.run import RankTask, dry_run_rank, preload, versions
from meshwright.engine.model_families import family_of

GIB = 2**30


def task_of(case: Case) -> RankTask:
    """Return the dry-run task of a case: one rank on an H200."""
    recipe = recipe_of(case)
    config = family_of(recipe).config_for(recipe)
    preload(recipe, config)
    return RankTask(recipe, config.to_dict(), cluster("1xH200"), 0, (0,), False)


def predicted(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the table."""
    start = time.process_time()
    result = run_parallel(dry_run_rank, [task_of(case)], 1, lambda _: None, lambda _: case.name)[0]
    real = {name: measured[name] / GIB for name in ("allocated", "reserved")}
    return {
        "name": case.name,
        "allocated": real["allocated"],
        "dry_allocated": result.allocated_gib,
        "allocated_pct": 100 * (result.allocated_gib / real["allocated"] - 1),
        "reserved": real["reserved"],
        "dry_reserved": result.reserved_gib,
        "reserved_pct": 100 * (result.reserved_gib / real["reserved"] - 1),
        "phases": {name: sum(parts.values()) for name, parts in result.phases.items()},
        "parts": result.memory_gib,
        "peak": f"{result.peak_phase}, {result.peak_at}",
        "holders": [f"{h.gib:.3f} {h.blocks} {h.part} {h.operation} {h.source}" for h in result.holders[:12]],
        "cpu_s": round(time.process_time() - start, 1),
    }


def chosen(patterns: list[str]) -> list[Case]:
    """Return the cases whose names match a pattern; all without patterns."""
    return [case for case in CASES if not patterns or any(fnmatch.fnmatch(case.name, p) for p in patterns)]


def main() -> None:
    source, out, *patterns = sys.argv[1:]
    rows = json.loads(Path(source).read_text())["rows"]
    measured = {row["name"]: row for row in rows if str(row["allocator"]).endswith("True")}
    found: list[dict[str, Any]] = []
    print(f"{'case':<40}{'allocated':>10}{'dry run':>10}{'%':>8}{'reserved':>10}{'dry run':>10}{'%':>8}{'CPU s':>7}")
    for case in chosen(patterns):
        try:
            row = predicted(case, measured[case.name])
        except Exception as error:
            row = {"name": case.name, "error": f"{type(error).__name__}: {error}"[:300]}
        found.append(row)
        print(_line(row), flush=True)
        save(Path(out), source, found)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:<40}{row['error']}"
    figures = [f"{row[n]:>10.3f}{row['dry_' + n]:>10.3f}{row[n + '_pct']:>+8.2f}" for n in ("allocated", "reserved")]
    return f"{row['name']:<40}{''.join(figures)}{row['cpu_s']:>7.1f}"


def save(path: Path, source: str, rows: list[dict[str, Any]]) -> None:
    """Save the table as JSON."""
    head = {
        "command": f"python -m benchmarks.dryrun_predict {source} {path.name}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()} CPU",
        "versions": versions(),
        "unit": "GiB",
    }
    path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

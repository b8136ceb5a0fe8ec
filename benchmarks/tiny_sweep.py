"""Trains a tiny model of every shipped language-model recipe for a few steps and writes the table.

    python benchmarks/tiny_sweep.py [--nproc 2] [--part 0/2] [NAME...]

One line per recipe: the layout it ran in, first and last loss, seconds. A recipe whose loss does not fall, or that does
not run, fails the sweep.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.errors import MeshwrightError
from meshwright.recipes.case import model_of
from meshwright.recipes.index import entries, load

RESULTS = Path(__file__).parent / "results" / "tiny_sweep.json"
STEPS = {"pretrain": 6, "sft": 6, "peft": 12}  # adapters start as nothing and take longer


def language_models() -> list[str]:
    """The library recipes that train a causal language model."""
    return [e.name for e in entries(benchmark=False) if model_of(load(e.name)).kind == "causal_lm"]


def run(name: str, nproc: int) -> dict[str, Any]:
    """One recipe: what it ran as and how it went."""
    began = time.monotonic()
    row: dict[str, Any] = {"recipe": name}
    try:
        done = api.train(name, tiny=True, nproc=nproc, quiet=True, overrides=[f"train.steps={STEPS[load(name).goal]}"])
        answer = api.training_to_dict(done)
        layout = answer["layout"]
        axes = [f"{axis}{layout[axis]}" for axis in ("tp", "pp", "vp", "cp", "ep", "etp") if layout[axis] > 1]
        losses = answer["losses"]
        row |= {
            "goal": answer["goal"],
            "layout": " ".join([layout["strategy"], *axes, *(["sp"] if layout["sp"] else [])]),
            "recompute": layout["recompute"],
            "first_loss": round(losses[0], 4),
            "last_loss": round(losses[-1], 4),
            "ok": losses[-1] < losses[0],
        }
    except MeshwrightError as error:
        row |= {"ok": False, "error": str(error)[:600]}
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--part", default="0/1", help="k/n: every n-th recipe from the k-th on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    names = given.names or language_models()[first::step]
    rows = []
    for i, name in enumerate(names, 1):
        row = run(name, given.nproc)
        rows.append(row)
        told = row.get("error") or f"{row['layout']:<28} loss {row['first_loss']} → {row['last_loss']}"
        print(f"{i}/{len(names)} {'ok  ' if row['ok'] else 'FAIL'} {name:<52} {told}  {row['seconds']} s", flush=True)
    write(given.results, given.nproc, rows)
    failed = [row["recipe"] for row in rows if not row["ok"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} recipes train on {given.nproc} processes")
    return 1 if failed else 0


def write(path: Path, nproc: int, rows: list[dict[str, Any]]) -> None:
    """The table as JSON; parts of one sweep are put together."""
    import torch
    import transformers

    known = {r["recipe"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {}
    known |= {row["recipe"]: row for row in rows}
    path.write_text(
        json.dumps(
            {
                "command": f"make sweep  (benchmarks/tiny_sweep.py --nproc {nproc})",
                "date": date.today().isoformat(),
                "machine": f"{platform.machine()} CPU",
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "steps": STEPS,
                "rows": [known[name] for name in sorted(known)],
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())

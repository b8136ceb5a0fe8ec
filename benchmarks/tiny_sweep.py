"""Train a tiny model of every shipped recipe for a few steps and save the table.

    python benchmarks/tiny_sweep.py [--nproc 2] [--part 0/2] [--goal sft] [NAME...]

One line per recipe: its layout, first and last loss, seconds. Fine-tuning starts from a tiny Hugging Face folder and
exports one, which its library must load. A recipe whose loss does not fall (last third of the steps vs. the first),
that does not run, or whose export does not load, fails the sweep.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # ranks are forked from a process that has run torch

import argparse
import json
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.errors import MeshwrightError
from meshwright.recipes.case import model_of
from meshwright.recipes.index import entries, load
from meshwright.recipes.types import Recipe

RESULTS = Path(__file__).parent / "results" / "tiny_sweep.json"
STEPS = {"pretrain": 6, "sft": 6, "peft": 12}  # adapters start at zero and take longer


def run(name: str, nproc: int) -> dict[str, Any]:
    """Train one recipe and return its row."""
    started = time.monotonic()
    recipe = load(name)
    row: dict[str, Any] = {"recipe": name, "goal": recipe.goal, "kind": model_of(recipe).kind}
    try:
        with tempfile.TemporaryDirectory(prefix="sweep-") as out:
            row |= _train(recipe, nproc, out if recipe.goal != "pretrain" else None)
    except MeshwrightError as error:
        row |= {"ok": False, "error": str(error)[:600]}
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def _train(recipe: Recipe, nproc: int, out: str | None) -> dict[str, Any]:
    steps = [f"train.steps={STEPS[recipe.goal]}"]
    done = api.train(recipe, tiny=True, nproc=nproc, quiet=True, out=out, overrides=steps)
    answer = api.to_json(api.train_response(done))
    layout, losses = answer["layout"], answer["losses"]
    axes = [f"{axis}{layout[axis]}" for axis in ("tp", "pp", "vp", "cp", "ep", "etp") if layout[axis] > 1]
    loaded = _loads(Path(answer["exported"])) if out is not None else None
    return {
        "layout": " ".join([layout["strategy"], *axes, *(["sp"] if layout["sp"] else [])]),
        "recompute": layout["recompute"],
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "losses": [round(loss, 4) for loss in losses],
        "exported": loaded,
        "ok": _falls(losses) and loaded != "",
    }


def _falls(losses: list[float]) -> bool:
    """Return whether the loss of the last third of the steps is below the first: single steps are noisy."""
    third = len(losses) // 3
    return sum(losses[-third:]) < sum(losses[:third])


def _loads(folder: Path) -> str:
    """Return the class that an exported folder is loaded as."""
    if "_class_name" in json.loads((folder / "config.json").read_text() if (folder / "config.json").exists() else "{}"):
        import diffusers

        class_name = json.loads((folder / "config.json").read_text())["_class_name"]
        return type(getattr(diffusers, class_name).from_pretrained(folder)).__name__
    from meshwright.engine.post_training.open_checkpoint import load_model

    model = load_model(folder)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return ("adapters of " if inner is not model else "") + type(inner).__name__


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--part", default="0/1", help="k/n: every n-th recipe from the k-th on")
    parser.add_argument("--goal", action="append", help="only recipes of this goal; may be given several times")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    first, step = map(int, args.part.split("/"))
    selected = [e.name for e in entries(benchmark=False) if not args.goal or e.goal in args.goal]
    names = args.names or selected[first::step]
    rows = []
    for i, name in enumerate(names, 1):
        row = run(name, args.nproc)
        rows.append(row)
        summary = row.get("error") or f"{row['layout']:<28} loss {row['first_loss']} → {row['last_loss']}"
        print(
            f"{i}/{len(names)} {'ok  ' if row['ok'] else 'FAIL'} {name:<52} {summary}  {row.get('exported') or ''}"
            f"  {row['seconds']} s",
            flush=True,
        )
        write(args.results, args.nproc, rows)
    failed = [row["recipe"] for row in rows if not row["ok"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} recipes train on {args.nproc} processes")
    return 1 if failed else 0


def write(path: Path, nproc: int, rows: list[dict[str, Any]]) -> None:
    """Save the table as JSON; parts of one sweep are merged."""
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

"""Simulate the memory that torch reserves on one GPU, for the cases that calibration_set.py measured on an H200.

    python -m benchmarks.simulated_reserved [--out FILE] [--only WORD]...      (no GPU; about 20 s a case)

Cases that FILE has are skipped. Each is dry-run twice. `as_measured` is the engine of that day: FSDP on streams of
its own, gradients copied between three buffers, and the allocator without expandable segments; it shows how well the
simulation matches. `now` is the engine as it is, with both allocators. The margin of our engine's estimate
(`expert_holes` in costs/memory_meshwright.toml) is taken from `now`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from meshwright.api.targets import recipe_for
from meshwright.dryrun.allocator import Event, events_of, peak, reserved
from meshwright.dryrun.replay import replay_step
from meshwright.dryrun.trace import trace
from meshwright.engine.model_families import family_of
from meshwright.engine.parallelize import fsdp
from meshwright.recipes import overrides
from meshwright.recipes.types import Recipe

RESULTS = Path(__file__).parent / "results"
MEASURED = RESULTS / "calibration_set.json"
OUT = RESULTS / "simulated_reserved.json"
CAPABILITY = (9, 0)
GIB = 2**30


def measured_rows() -> list[dict[str, Any]]:
    """Return the measured cases that have both peaks."""
    rows = json.loads(MEASURED.read_text())["rows"]
    return [row for row in rows if "reserved" in row.get("memory_gib", {})]


def recipe_of(command: str) -> Recipe:
    """Return the recipe of a `meshwright bench` command on one H200."""
    _, _, target, _, goal, *changes = shlex.split(command)
    if goal in ("lora", "qlora"):
        goal, changes = "peft", [f"peft.method={goal}", *changes]
    found = overrides.apply(recipe_for(target, goal, "1xH200", changes), changes)
    return msgspec.structs.replace(found, benchmark=True)  # unpacked samples


def events(recipe: Recipe) -> list[Event]:
    """Dry-run a recipe on one rank; return its allocations and frees."""
    family = family_of(recipe)
    found = trace(recipe, family, family.config_for(recipe), 1, 0, CAPABILITY)
    return list(events_of(replay_step(found), found))


@contextmanager
def before() -> Iterator[None]:
    """Let FSDP on one rank use its own streams and three gradient buffers, as until 2026-11-16."""
    with patch.object(fsdp, "use_one_stream", lambda _: None), patch.object(fsdp, "reduce_in_place", lambda *_: None):
        yield


def simulated(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's measured and simulated peaks in GiB."""
    recipe = recipe_of(row["command"])
    with before():
        old = events(recipe)
    new = events(recipe)
    memory = row["memory_gib"]
    return {
        "case": row["case"],
        "measured": {"allocated": memory["peak"], "reserved": memory["reserved"]},
        "as_measured": {"allocated": peak(old) / GIB, "reserved": reserved(old, False) / GIB},
        "now": {"allocated": peak(new) / GIB, "plain": reserved(new, False) / GIB, "expandable": reserved(new) / GIB},
    }


def shown(row: Mapping[str, Any]) -> str:
    """Return a case as a line: reserved over allocated."""
    measured, then, now = (row[name] for name in ("measured", "as_measured", "now"))
    return (
        f"{measured['reserved'] / measured['allocated']:.3f} measured, {then['reserved'] / then['allocated']:.3f} "
        f"simulated; now {now['plain'] / now['allocated']:.3f}, expandable {now['expandable'] / now['allocated']:.3f} "
        f"of {now['allocated']:.1f} GiB ({measured['allocated']:.1f} measured)  {row['case']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", action="append", default=[], help="cases with this text; may be repeated")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    known = {row["case"] for row in rows}
    for row in measured_rows():
        if row["case"] in known or (args.only and not any(word in row["case"] for word in args.only)):
            continue
        rows.append(simulated(row))
        print(shown(rows[-1]), flush=True)
        kept = {"date": time.strftime("%Y-%m-%d"), "made_by": "python -m benchmarks.simulated_reserved", "rows": rows}
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Write the memory peaks of the dry runs of shipped recipes as a measurement table: benchmarks/data/dryrun.csv.

    python -m benchmarks.dryrun_rows [--reports docs/data/verification.jsonl]

Stale reports and dry runs without figures are skipped. The rows have no times and are in a separate table: nothing
is fitted to them.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from meshwright import clusters
from meshwright.dryrun.types import PARTS
from meshwright.dryrun.verification import REPORTS, DryRunResult, VerificationReport, is_stale, read
from meshwright.recipes import index
from meshwright.recipes.case import model_of

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "data" / "dryrun.csv"
SOURCE = "dry run"
TINY = 1e8  # parameters; below this, overheads dominate the memory of a step


def row_of(report: VerificationReport, found: DryRunResult) -> dict[str, object]:
    """Return the row of a report: the recipe's layout, and the GiB torch would report as max_memory_allocated."""
    recipe = index.load(report.recipe)
    layout, place, model = recipe.layout, clusters.cluster(recipe.cluster), model_of(recipe)
    return {
        "row_id": report.fingerprint,
        "source": SOURCE,
        "recipe": report.recipe,
        "framework": "meshwright",
        "model": report.model,
        "hf_id_or_dims": "",
        "n_params_b": round(model.params.total / 1e9, 3),
        "mode": report.goal,
        "gpu": place.gpu.name,
        "gpus_per_node": place.gpus_per_node,
        "n_gpus": place.world,
        "seq_len": recipe.data.seq_length,
        "mbs": layout.micro_batch_size,
        "gbs": recipe.train.global_batch_size,
        "precision": recipe.precision.compute,
        **{name: getattr(layout, name) for name in ("tp", "pp", "vp", "cp", "ep", "etp", "sp")},
        "dp_strategy": layout.strategy,
        "recompute": layout.recompute,
        "step_time_s": "",
        "tokens_per_s_per_gpu": "",
        "peak_mem_gib_allocated": round(sum(found.memory_gib[part] for part in PARTS), 3),
        "status": "OK",
        "tier": "",
        "mem_tier": "A",
        "precision_class": "",
        "recompute_class": "",
        "dp_class": "",
        "notes": f"rank {found.worst}, {found.peak_phase}, {found.peak_at}",
        "flag": "tiny_model" if model.params.total < TINY else "",
    }


def rows_of(reports: list[VerificationReport]) -> list[dict[str, object]]:
    """Return a row for every report that is current and has figures of a dry run."""
    executed = [(report, report.checks.dryrun) for report in reports if not is_stale(report)]
    return [
        row_of(report, check.figures) for report, check in executed if check is not None and check.figures is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=REPORTS)
    rows = rows_of(list(read(parser.parse_args().reports).values()))
    if not rows:
        raise SystemExit("no report has figures of a dry run")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{TABLE.relative_to(ROOT)}: {len(rows)} rows")


if __name__ == "__main__":
    main()

"""Write the peaks that dry runs found for shipped recipes as rows of a measurement table: benchmarks/data/dryrun.csv.

    python -m benchmarks.dryrun_rows [--cards docs/cards]

Cards that are older than their recipe, or whose dry run has no figures, give no row. The rows hold no times, and lie in
a table of their own: nothing is fitted to them.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from meshwright import clusters
from meshwright.dryrun.types import PARTS
from meshwright.dryrun.verification import Executed, VerificationReport, is_stale, read_all
from meshwright.recipes import index
from meshwright.recipes.case import model_of

ROOT = Path(__file__).parents[1]
CARDS, TABLE = ROOT / "docs" / "cards", ROOT / "benchmarks" / "data" / "dryrun.csv"
SOURCE = "dry run"
TINY = 1e8  # parameters: below, what a step keeps beside its tensors is all there is


def row_of(card: VerificationReport, found: Executed) -> dict[str, object]:
    """One recipe: its layout for the reader, and the GiB that torch would report as max_memory_allocated."""
    recipe = index.load(card.recipe)
    layout, place, model = recipe.layout, clusters.cluster(recipe.cluster), model_of(recipe)
    return {
        "row_id": card.fingerprint,
        "source": SOURCE,
        "recipe": card.recipe,
        "framework": "meshwright",
        "model": card.model,
        "hf_id_or_dims": "",
        "n_params_b": round(model.params.total / 1e9, 3),
        "mode": card.goal,
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


def rows_of(cards: list[VerificationReport]) -> list[dict[str, object]]:
    """A row for every card that speaks of the recipe as it is shipped and has a dry run's figures."""
    executed = [(card, card.checks.dryrun) for card in cards if not is_stale(card)]
    return [row_of(card, check.figures) for card, check in executed if check is not None and check.figures is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=Path, default=CARDS)
    rows = rows_of(read_all(parser.parse_args().cards))
    if not rows:
        raise SystemExit("no card has a dry run's figures")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{TABLE.relative_to(ROOT)}: {len(rows)} rows")


if __name__ == "__main__":
    main()

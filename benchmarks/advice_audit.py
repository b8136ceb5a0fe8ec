"""Audit `recommend`: every library recipe asked for on its own cluster, and seeded random questions.

For each question: which recipe is returned, how much slower the recommended plan is than the first plan that `plan`
lists under the same contract (its whole space, the same headroom), and the CPU seconds of the recommendation.

python benchmarks/advice_audit.py [--recipes N] [--random N] [--seed S] [--out FILE] [--list]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from meshwright import clusters, models, planner
from meshwright.errors import InputError
from meshwright.planner import Question
from meshwright.recipes import index
from meshwright.recipes.types import GOALS

NEAR = 1.03  # of the best step time that `plan` finds
FAR = 1.25
CPU_LIMIT_S = 0.4
GPU_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
GPU_TYPES = ("H100", "H200", "A100-80", "A100-40", "B200", "GB200", "L40S", "RTX4090")
SEQ_LENGTHS = (None, 2048, 4096, 8192, 32768, 131072)


def twins() -> dict[str, set[str]]:
    """Return, for each library recipe, those of the same model, goal, cluster and sequence length, itself included."""
    groups: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for e in index.entries(False):
        groups[e.model, e.goal, e.gpus, e.gpu, e.seq_length].add(e.name)
    return {name: group for group in groups.values() for name in group}


def question(model: str, gpus: str, goal: str, seq: int | None) -> Question:
    """Return a question as the CLI asks it."""
    return Question(
        model=models.find(model), model_ref=model, cluster=clusters.cluster(gpus), goal=goal, seq_length=seq
    )


def recipe_questions(count: int | None) -> Iterator[tuple[str, Question]]:
    """Yield every library recipe's name with its own model, goal, cluster and sequence length (or an even sample)."""
    names = [e.name for e in index.entries(False)]
    for name in names if count is None else names[:: max(len(names) // max(count, 1), 1)]:
        recipe = index.load(name)
        yield name, question(recipe.model, recipe.cluster, recipe.goal, recipe.data.seq_length)


def random_questions(count: int, seed: int) -> Iterator[tuple[str, Question]]:
    """Yield random models of the catalogue × goals × GPU counts × GPU types × sequence lengths."""
    draw = random.Random(seed)
    for i in range(count):
        model, goal = draw.choice(models.names()), draw.choice(GOALS)
        gpus, seq = f"{draw.choice(GPU_COUNTS)}x{draw.choice(GPU_TYPES)}", draw.choice(SEQ_LENGTHS)
        try:
            yield f"random {i}: {model} {goal} {gpus} seq {seq}", question(model, gpus, goal, seq)
        except InputError as error:
            print(f"skipped: {model} {goal} {gpus}: {error}", file=sys.stderr)


def audit(name: str, asked: Question) -> dict[str, Any]:
    """Return one row: the recipe returned, both step times, and CPU seconds."""
    row: dict[str, Any] = {"name": name}
    started = process_time()
    try:
        plan = planner.recommend(asked)
    except InputError as error:
        return row | {"cpu_s": process_time() - started, "refused": error.reason}
    row |= {"cpu_s": round(process_time() - started, 3), "recipe": plan.base.name, "match": plan.match}
    row |= {"ok": plan.ok, "fits": bool(plan.estimate.fits), "step_s": float(plan.estimate.step_s)}
    row["layout"] = plan.layout_dict()
    ranking = planner.rank_layouts(asked, top=1)
    if ranking.plans and ranking.plans[0].ok:
        best = ranking.plans[0]
        row |= {"best_s": float(best.estimate.step_s), "best_layout": best.layout_dict()}
        row["ratio"] = round(row["step_s"] / row["best_s"], 4) if row["ok"] else None
    return row


def summary(rows: Sequence[dict[str, Any]], same: dict[str, set[str]]) -> dict[str, Any]:
    """Return the counts of some rows."""
    ratios = [r["ratio"] for r in rows if r.get("ratio")]
    cpu = sorted(r["cpu_s"] for r in rows)
    named = [r for r in rows if r["name"] in same]
    return {
        "questions": len(rows),
        "refused": sum("refused" in r for r in rows),
        "other recipe": [r["name"] for r in named if r.get("recipe") not in same[r["name"]]],
        "by a twin": [r["name"] for r in named if r.get("recipe") != r["name"] and r.get("recipe") in same[r["name"]]],
        "compared": len(ratios),
        f"slower than {NEAR}": sum(r > NEAR for r in ratios),
        f"slower than {FAR}": sum(r > FAR for r in ratios),
        "worst ratio": max(ratios, default=None),
        "recommend fails, plan works": [r["name"] for r in rows if r.get("best_s") and not r.get("ok")],
        "recommend works, plan fails": [r["name"] for r in rows if r.get("ok") and not r.get("best_s")],
        "cpu median, p90, max": [round(median(cpu), 3), round(cpu[int(0.9 * (len(cpu) - 1))], 3), round(cpu[-1], 3)],
        f"cpu over {CPU_LIMIT_S}": sum(s > CPU_LIMIT_S for s in cpu),
        "match": dict(Counter(r.get("match", "refused") for r in rows)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts and save the rows; return 1 if a recipe is missed or a plan is slower than NEAR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", type=int, help="audit an even sample of this many recipes")
    parser.add_argument("--random", type=int, default=300, help="random questions")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--list", action="store_true", help="list every plan slower than NEAR")
    options = parser.parse_args(arguments)
    same = twins()
    asked = {
        "recipes": recipe_questions(options.recipes) if options.recipes != 0 else (),
        "random": random_questions(options.random, options.seed),
    }
    found = {group: [audit(*one) for one in some] for group, some in asked.items()}
    counts = {group: summary(rows, same) for group, rows in found.items() if rows}
    print(json.dumps(counts, indent=2))
    if options.out:
        options.out.write_text(json.dumps({"counts": counts, "rows": found}, indent=1, default=str) + "\n")
    late = [r for rows in found.values() for r in rows if (r.get("ratio") or 0) > NEAR]
    if options.list:
        for r in sorted(late, key=lambda r: -r["ratio"]):
            print(f"{r['ratio']:.3f}  {r['name']}\n   {r['layout']}\n   {r['best_layout']}")
    return 1 if late or any(one["other recipe"] for one in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

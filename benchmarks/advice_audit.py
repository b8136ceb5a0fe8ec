"""Audit `recommend`: every library recipe asked for on its own cluster, and seeded random questions.

Random questions come from the usual values; those of `--beyond` have odd GPU counts, other GPU types and engines,
other sequence lengths, and fixed layout values.

For each question: which recipe is returned, how much slower the recommended plan is than the first plan that `plan`
lists under the same contract (its whole space, the same headroom), and the CPU seconds of the recommendation.

python benchmarks/advice_audit.py [--recipes N] [--random N] [--beyond N] [--seed S] [--jobs N] [--out FILE] [--list]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import Pool
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

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
ODD_GPU_COUNTS = (3, 6, 12, 20, 40, 60, 72, 120, 144, 192, 384, 576, 768, 1000)
OTHER_GPU_TYPES = (*GPU_TYPES, "RTX3090", "L4", "GH200", "MI300X", "H800", "H20")
OTHER_ENGINES = ("meshwright", "megatron", "torchtitan", "deepspeed", "automodel")
OTHER_SEQ_LENGTHS = (*SEQ_LENGTHS, 1024, 16384, 65536)
FIXED = ((), (), (), ("layout.tp=2",), ("layout.micro_batch_size=2",), ("layout.recompute=full",), ("layout.pp=2",))


class Asked(NamedTuple):
    """One question of the audit."""

    name: str
    question: Question
    overrides: tuple[str, ...] = ()


def twins() -> dict[str, set[str]]:
    """Return, for each library recipe, those of the same model, goal, cluster and sequence length, itself included."""
    groups: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for e in index.entries(False):
        groups[e.model, e.goal, e.gpus, e.gpu, e.seq_length].add(e.name)
    return {name: group for group in groups.values() for name in group}


def question(model: str, gpus: str, goal: str, seq: int | None, engine: str = "meshwright") -> Question:
    """Return a question as the CLI asks it."""
    on = clusters.cluster(gpus)
    return Question(model=models.find(model), model_ref=model, cluster=on, goal=goal, seq_length=seq, engine=engine)


def recipe_questions(count: int | None) -> Iterator[Asked]:
    """Yield every library recipe's name with its own model, goal, cluster and sequence length (or an even sample)."""
    names = [e.name for e in index.entries(False)]
    for name in names if count is None else names[:: max(len(names) // max(count, 1), 1)]:
        recipe = index.load(name)
        yield Asked(name, question(recipe.model, recipe.cluster, recipe.goal, recipe.data.seq_length))


def random_questions(count: int, seed: int) -> Iterator[Asked]:
    """Yield random models of the catalogue × goals × GPU counts × GPU types × sequence lengths."""
    draw = random.Random(seed)
    for i in range(count):
        model, goal = draw.choice(models.names()), draw.choice(GOALS)
        gpus, seq = f"{draw.choice(GPU_COUNTS)}x{draw.choice(GPU_TYPES)}", draw.choice(SEQ_LENGTHS)
        try:
            yield Asked(f"random {i}: {model} {goal} {gpus} seq {seq}", question(model, gpus, goal, seq))
        except InputError as error:
            print(f"skipped: {model} {goal} {gpus}: {error}", file=sys.stderr)


def questions_beyond(count: int, seed: int) -> Iterator[Asked]:
    """Yield random questions with values that random_questions never draws."""
    draw = random.Random(seed)
    for i in range(count):
        model, goal, engine = draw.choice(models.names()), draw.choice(GOALS), draw.choice(OTHER_ENGINES)
        gpus = f"{draw.choice(draw.choice((GPU_COUNTS, ODD_GPU_COUNTS)))}x{draw.choice(OTHER_GPU_TYPES)}"
        seq, fixed = draw.choice(OTHER_SEQ_LENGTHS), draw.choice(FIXED)
        name = f"beyond {i}: {model} {goal} {gpus} seq {seq} {engine} {' '.join(fixed)}"
        try:
            yield Asked(name.strip(), question(model, gpus, goal, seq, engine), fixed)
        except InputError as error:
            print(f"skipped: {name}: {error}", file=sys.stderr)


def audit(name: str, asked: Question, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return one row: the recipe returned, both step times, and CPU seconds."""
    row: dict[str, Any] = {"name": name, "gpus": asked.cluster.world}
    started = process_time()
    try:
        plan = planner.recommend(asked, overrides)
    except InputError as error:
        return row | {"cpu_s": round(process_time() - started, 3), "refused": error.reason}
    row |= {"cpu_s": round(process_time() - started, 3), "recipe": plan.base.name, "match": plan.match}
    row |= {"ok": plan.ok, "fits": bool(plan.estimate.fits), "step_s": float(plan.estimate.step_s)}
    row["layout"] = plan.layout_dict()
    ranking = planner.rank_layouts(asked, overrides, top=1)
    if ranking.plans and ranking.plans[0].ok:
        best = ranking.plans[0]
        row |= {"best_s": float(best.estimate.step_s), "best_layout": best.layout_dict()}
        row["ratio"] = round(row["step_s"] / row["best_s"], 4) if row["ok"] else None
    return row


def audited(asked: Asked) -> dict[str, Any]:
    """Return the row of one question; errors that are no refusals name the question."""
    try:
        return audit(*asked)
    except Exception as error:
        raise RuntimeError(f"{asked.name}: {error!r}") from error


def audit_all(asked: Sequence[Asked], jobs: int) -> list[dict[str, Any]]:
    """Return one row per question, in order, from this many processes."""
    if jobs == 1:
        return [audited(one) for one in asked]
    with Pool(jobs) as pool:
        return list(pool.imap(audited, asked, chunksize=1))


def cpu_by_gpus(rows: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """Return the median, p90 and greatest CPU seconds, and the number above the limit, per GPU count."""
    groups: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        groups[row["gpus"]].append(row["cpu_s"])
    return {gpus: (*percentiles(cpu), sum(s > CPU_LIMIT_S for s in cpu)) for gpus, cpu in sorted(groups.items())}


def percentiles(cpu: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, p90 and greatest value."""
    ordered = sorted(cpu)
    return round(median(ordered), 3), round(ordered[int(0.9 * (len(ordered) - 1))], 3), round(ordered[-1], 3)


def summary(rows: Sequence[dict[str, Any]], same: dict[str, set[str]]) -> dict[str, Any]:
    """Return the counts of some rows."""
    ratios = [r["ratio"] for r in rows if r.get("ratio")]
    cpu = [r["cpu_s"] for r in rows]
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
        "cpu median, p90, max": percentiles(cpu),
        f"cpu over {CPU_LIMIT_S}": sum(s > CPU_LIMIT_S for s in cpu),
        "match": dict(Counter(r.get("match", "refused") for r in rows)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts and save the rows; return 1 if a recipe is missed or a plan is slower than NEAR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", type=int, help="audit an even sample of this many recipes")
    parser.add_argument("--random", type=int, default=300, help="random questions")
    parser.add_argument("--beyond", type=int, default=0, help="random questions of other GPU counts, engines, lengths")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--list", action="store_true", help="list every plan slower than NEAR, and CPU per GPU count")
    options = parser.parse_args(arguments)
    same = twins()
    asked = {
        "recipes": list(recipe_questions(options.recipes)) if options.recipes != 0 else [],
        "random": list(random_questions(options.random, options.seed)),
        "beyond": list(questions_beyond(options.beyond, options.seed)),
    }
    rows = audit_all([one for some in asked.values() for one in some], options.jobs)
    found = {group: [rows.pop(0) for _ in some] for group, some in asked.items()}
    counts = {group: summary(rows, same) for group, rows in found.items() if rows}
    print(json.dumps(counts, indent=2))
    if options.out:
        options.out.write_text(json.dumps({"counts": counts, "rows": found}, indent=1, default=str) + "\n")
    everything = [row for rows in found.values() for row in rows]
    late = [row for row in everything if (row.get("ratio") or 0) > NEAR]
    if options.list:
        for r in sorted(late, key=lambda r: -r["ratio"]):
            print(f"{r['ratio']:.3f}  {r['name']}\n   {r['layout']}\n   {r['best_layout']}")
        print("CPU seconds per GPU count: median, p90, max, number above the limit")
        for gpus, values in cpu_by_gpus(everything).items():
            print(f"{gpus:5}  {'  '.join(map(str, values))}")
    return 1 if late or any(one["other recipe"] for one in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure the CPU time of the layout search and of one estimate: a table and a JSON file.

make bench
"""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from pathlib import Path
from statistics import median
from time import process_time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from meshwright import api, clusters, costs
from meshwright.planner import case_of
from meshwright.planner.search import score
from meshwright.planner.space import FULL_SPACE
from meshwright.recipes import index
from meshwright.recipes.case import model_of

SEARCHES = (
    ("kimi_k2_pretrain_config", "1024xGB200"),
    ("deepseek_v3_pretrain_config", "1024xH100"),
    ("llama31_405b_pretrain_config", "512xH100"),
    ("llama3_70b_pretrain_config", "64xH100"),
)
RUNS = 3


def search(name: str, gpus: str) -> dict[str, object]:
    """Enumerate, check and estimate every legal layout of a recipe on a cluster."""
    recipe = index.load(name)
    case = case_of(recipe, model_of(recipe), clusters.cluster(gpus))
    times, count = [], 0
    for _ in range(RUNS):
        started = process_time()
        count = sum(len(batch) for batch in score(case, {}, FULL_SPACE))
        times.append(process_time() - started)
    seconds = median(times)
    return {"recipe": name, "gpus": gpus, "layouts": count, "cpu_s": round(seconds, 3), "per_s": round(count / seconds)}


def one_estimate() -> float:
    """Return the milliseconds of one estimate after loading."""
    recipe = index.load("llama3_8b_pretrain_config")
    case = case_of(recipe, model_of(recipe), clusters.cluster("8xH100"))
    costs.estimate(case)
    started = process_time()
    for _ in range(200):
        costs.estimate(case.replace(tp=1))
    return round((process_time() - started) / 200 * 1e3, 2)


def plan_seconds() -> float:
    """Return the seconds of one `plan` with its ranked plans, findings and reasons for dropped layouts."""
    started = process_time()
    api.plan("kimi-k2", gpus="1024xGB200", goal="pretrain")
    return round(process_time() - started, 3)


def main() -> None:
    """Print and save the table."""
    rows = [search(name, gpus) for name, gpus in SEARCHES]
    for row in rows:
        print(
            f"{row['recipe']} on {row['gpus']}: {row['layouts']:,} layouts in {row['cpu_s']} s CPU, {row['per_s']:,}/s"
        )
    estimate, plan = one_estimate(), plan_seconds()
    print(f"one estimate: {estimate} ms; `plan kimi-k2 --gpus 1024xGB200` with its five plans explained: {plan} s CPU")
    result = {
        "date": date.today().isoformat(),
        "command": "make bench",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "searches": rows,
        "estimate_ms": estimate,
        "plan_s": plan,
    }
    (Path(__file__).parent / "results" / "search_speed.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

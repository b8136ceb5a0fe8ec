"""Estimates of many cases, kept in a file: a change of the cost model shows which answers it changes.

Every recipe on its own cluster, and as many seeded variations of engine, layout and precision. Memory and step time of
each are in estimates.json, to six digits. `python -m tests.costs.kept_estimates` writes them anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright import costs
from meshwright.clusters import cluster
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import ENGINES

FILE = Path(__file__).with_name("estimates.json")
SEED = 7
VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8),
    "cp": (1, 2, 4),
    "pp": (1, 2, 4),
    "micro_batch_size": (1, 2, 4),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "activations", "params"),
    "strategy": ("fsdp2", "ddp", "zero1"),
    "attention": ("auto", "eager", "flash"),
    "loss": ("vocab_parallel", "plain", "chunked", "fused_linear"),
    "matmul": ("same", "fp8_row", "mxfp8"),
    "master": ("fp32", "bf16"),
    "moments": ("fp32", "bf16"),
    "reduce": ("fp32", "bf16"),
    "optimizer_name": ("adamw", "adamw8bit", "muon", "sgd", "lion"),
    "seq_length": (2048, 8192, 32768),
    "compile": (False, True),
    "cuda_graphs": ("none", "local", "full_iteration"),
    "dispatcher": ("alltoall", "allgather", "deepep"),
    "cp_comm": ("ring", "a2a", "allgather"),
}


def cases() -> Iterator[tuple[str, Case]]:
    """Yield every recipe on its cluster, then one variation of each."""
    choose = random.Random(SEED)
    for benchmark in (False, True):
        for entry in index.entries(benchmark):
            recipe = index.load(entry.name)
            base = Case(recipe, model_of(recipe), cluster(recipe.cluster), "megatron" if benchmark else "meshwright")
            yield entry.name, base
            engine = choose.choice(ENGINES)
            changed = {name: choose.choice(VALUES[name]) for name in choose.sample(sorted(VALUES), 5)}
            other = Case(recipe, base.model, base.cluster, engine).replace(**changed)
            yield f"{entry.name} on {engine} with {' '.join(f'{k}={v}' for k, v in changed.items())}", other


def estimates() -> dict[str, str]:
    """Return memory and step time of every case, or the error that there is no estimate."""
    found = {}
    for name, case in cases():
        try:
            one = costs.estimate(case)
            found[name] = f"{float(one.memory.total):.6g} GiB {float(one.step_s):.6g} s"
        except (ArithmeticError, ValueError, TypeError) as error:
            found[name] = type(error).__name__
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(estimates(), indent=0) + "\n")

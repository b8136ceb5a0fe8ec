"""Estimates of many cases, kept in a file: a change of the cost model shows which answers it changes.

Every recipe on its own cluster, and as many seeded variations of engine, layout and precision. Memory and step time of
each are in estimates.json, in all their parts. `python -m tests.costs.kept_estimates` writes them anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import kept

from meshwright import costs
from meshwright.clusters import cluster
from meshwright.costs.time import pass_seconds
from meshwright.errors import InputError
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import ENGINES

FILE = Path(__file__).with_name("estimates.json")
SEED = 7
VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8),
    "cp": (1, 2, 4),
    "pp": (1, 2, 4),
    "vp": (1, 2, 3),
    "ep": (1, 2, 4, 8),
    "etp": (1, 2),
    "sp": (False, True),
    "dp_replicate": (1, 2),
    "micro_batch_size": (1, 2, 4),
    "recompute": ("none", "selective", "full"),
    "recompute_layers": (0, 1, 3),
    "recompute_modules": ((), ("mlp",), ("core_attn", "layernorm"), ("moe", "moe_act"), ("mla_up_proj", "ops")),
    "pp_schedule": ("1f1b", "gpipe", "interleaved_1f1b", "zbv", "looped_bfs", "dualpipe_v"),
    "embedding_as_layer": (False, True),
    "head_as_layer": (False, True),
    "offload": ("none", "optimizer", "activations", "params"),
    "reshard_after_forward": (False, True),
    "defer_grad_sync": (False, True),
    "strategy": ("fsdp2", "ddp", "zero1", "megatron_fsdp"),
    "attention": ("auto", "eager", "flash", "sdpa"),
    "loss": ("vocab_parallel", "plain", "chunked", "fused_linear"),
    "matmul": ("same", "fp8_row", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"),
    "master": ("fp32", "bf16"),
    "moments": ("fp32", "bf16"),
    "grads": ("fp32", "bf16"),
    "reduce": ("fp32", "bf16"),
    "compute": ("bf16", "fp16", "fp32"),
    "fp8_gather": (False, True),
    "first_last_bf16": (0, 1),
    "optimizer_name": ("adamw", "adamw8bit", "muon", "sgd", "lion"),
    "seq_length": (2048, 8192, 32768),
    "compile": (False, True),
    "cuda_graphs": ("none", "local", "full_iteration"),
    "dispatcher": ("alltoall", "allgather", "deepep", "hybridep"),
    "capacity_factor": (0.0, 1.25),
    "grouped_gemm": (False, True),
    "shared_expert_overlap": (False, True),
    "ep_overlap": (False, True),
    "overlap_grad_reduce": (False, True),
    "overlap_param_gather": (False, True),
    "tp_comm_overlap": (False, True),
    "cp_comm": ("ring", "a2a", "allgather", "a2a+ring"),
    "mtp_loss": (0.0, 0.1),
    "rank": (8, 64),
    "targets": (("linear_qkv",), ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")),
    "method": ("lora", "qlora", "dora"),
    "images": (0, 2),
    "packing": (False, True),
}
CLUSTERS = ("8xH100", "16x8xH100", "4xA100-40", "3x4xA100", "2xL40S", "1xRTX4090", "64xB200", "32xH200", "9x8xGB200")
CHANGES = 9  # fields of a variation
BASES = 4  # of so many recipes one is estimated unchanged


def cases() -> Iterator[tuple[str, Case]]:
    """Yield some recipes on their clusters, and one variation of each recipe."""
    choose = random.Random(SEED)
    entries = [(entry, benchmark) for benchmark in (False, True) for entry in index.entries(benchmark)]
    for number, (entry, benchmark) in enumerate(entries):
        recipe = index.load(entry.name)
        base = Case(recipe, model_of(recipe), cluster(recipe.cluster), "megatron" if benchmark else "meshwright")
        if number % BASES == 0:
            yield entry.name, base
        engine, names = choose.choice(ENGINES), choose.sample(sorted(VALUES), CHANGES)
        on = base.cluster if choose.random() < 0.5 else cluster(choose.choice(CLUSTERS))
        changed = {name: choose.choice(VALUES[name]) for name in names}
        text = " ".join(f"{name}={value}" for name, value in changed.items())
        yield f"{entry.name} on {on} by {engine} with {text}", Case(recipe, base.model, on, engine).replace(**changed)


def estimate(case: Case) -> str:
    """Return every number of an estimate, or the error that there is none."""
    try:
        one = costs.estimate(case)
        numbers = costs.to_dict(one)
        by_stage = [seconds for stage in pass_seconds(case) for seconds in stage]
    except (ArithmeticError, ValueError, TypeError, InputError) as error:
        return type(error).__name__
    memory = [float(getattr(one.memory, name)) for name in ("host", "cache", "reserved", "least_state")]
    return " ".join(map(kept.number, (*_numbers(numbers), *memory, *by_stage[:2], *by_stage[-2:])))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _numbers(one)
    elif not isinstance(value, str):
        yield float(value)


def answers() -> Iterator[tuple[str, str]]:
    """Yield the estimate of every case."""
    for name, case in cases():
        yield name, estimate(case)


if __name__ == "__main__":
    kept.write(FILE, answers)

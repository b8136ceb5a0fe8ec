"""Parts of the planner, kept in a file: what each gives for small inputs at, below and above its limits.

`python -m tests.planner.kept_parts` writes them anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace
from tests import kept

import meshwright
from meshwright import costs, display, planner
from meshwright.clusters import cluster
from meshwright.models import find
from meshwright.planner import (
    baseline,
    divisors,
    explain,
    goodput,
    levers,
    match,
    missing_fixes,
    published,
    ranking,
    repair,
    scaling,
    search,
    sizing,
    space,
    storage,
)
from meshwright.planner.batch_rate import LAWS, scaled_lr
from meshwright.planner.budget import MANY_STEPS, Epochs, batch_notes, steps_notes
from meshwright.planner.gpu_counts import gpu_counts, node_of
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.overrides import apply
from meshwright.recipes.types import ENGINES
from meshwright.rules import RULES

FILE = Path(__file__).with_name("parts.json")
DENSE, EXPERTS, ADAPTERS = "llama3_8b_pretrain_config", "qwen3_30b_a3b_pretrain_config", "llama3_8b_peft_config"


@cache
def case_on(name: str, gpus: str, engine: str = "meshwright", *overrides: str) -> Case:
    recipe = apply(index.load(name), list(overrides))
    return Case(recipe, model_of(recipe), cluster(gpus), engine, memory_of=costs.memory)  # type: ignore[arg-type]


@cache
def plan_of(model: str, gpus: str, goal: str = "sft") -> Any:
    return meshwright.recommend(model, gpus, goal)


def numbers() -> Iterator[tuple[str, Any]]:
    """Yield counts, batches and rates."""
    worlds, batches = (1, 2, 6, 7, 8, 12, 16, 64, 96), (1, 5, 8, 13, 48, 60, 64, 100, 512)
    for world in worlds:
        yield (
            f"batches of {world} GPUs",
            [[divisors.divided_batch(batch, world), *scaling.divisible_batches(batch, world)] for batch in batches],
        )
        yield f"counts near {world}", [list(divisors.nearby_counts(world, node))[:24] for node in (1, 4, 8)]
    yield "last counts near 200", [list(divisors.nearby_counts(200, node))[-8:] for node in (4, 8)]
    yield "counts to size", [gpu_counts(node, most) for node, most in ((1, 40), (4, 64), (8, 8), (8, 700))]
    yield (
        "scaled",
        [
            [scaling.scaled_batch(batch, 3, 7), scaling.batch_for_tokens(batch, 4096, 1536)]
            + [scaled_lr(3e-4, batch, 100, law) for law in LAWS]
            for batch in batches
        ],
    )
    runs = product((1, 1000, 10**6, 10**8), (0.01, 9.0))
    yield "goodput", [to_builtins(goodput.goodput(gpus, gb)) for gpus, gb in runs]
    yield "doublings", [match._doublings(a, b) for a, b in ((8, 8), (8, 64), (64, 8))]
    yield "words", [display.plural(n, "GPU") for n in (0, 1, 2)]


def notes() -> Iterator[tuple[str, Any]]:
    """Yield what budgets mean for batches and steps, and what checkpoints take."""
    changes = ("train.epochs=1", "train.epochs=2.5", "train.steps=1000", "train.global_batch_size=8")
    for overrides in ((), *((text,) for text in changes)):
        case = case_on(DENSE, "8xH100", "meshwright", *overrides)
        step = int(case.global_batch_size * case.seq_length)
        steps = (0.5, 1.0, 1.5, 500, 990, 995, 1000, 1011, 2000, 2001, MANY_STEPS, MANY_STEPS + 1, 5e6)
        found = [(steps_notes(case, n * step), batch_notes(case, n * step)) for n in steps]
        yield f"notes {overrides}", found
        spent = (planner.budget(case, case.cached(costs.estimate), n, planner.Price(2.0, "EUR")) for n in (None, 1e9))
        yield f"budget {overrides}", [None if one is None else to_builtins(one) for one in spent]
    epochs = Epochs(1001, "a file")
    yield "budget of epochs", to_builtins(planner.budget(case, case.cached(costs.estimate), None, None, epochs))
    for name in (DENSE, ADAPTERS, "qwen3_30b_a3b_peft_config"):
        for more in ((), ("checkpoint.save_every=0",), ("checkpoint.milestone_every=100", "checkpoint.keep_best=true"),
                     ("checkpoint.keep_best=true", "train.eval_every=0", "checkpoint.export=none", "train.steps=3"),
                     ("checkpoint.keep_best=true", "train.eval_every=5", "checkpoint.keep=100000")):  # fmt: skip
            case = case_on(name, "8xH100", "meshwright", *more)
            yield f"storage of {name} {more}", to_builtins(storage.storage_of(case))


def spaces() -> Iterator[tuple[str, Any]]:
    """Yield the number and the sums of the layouts of every space, with every kind of pinned value."""
    questions = (
        (DENSE, "8xH100", "meshwright"), (DENSE, "7x4xA100", "meshwright"), (DENSE, "2x6xH100", "megatron"),
        (EXPERTS, "16xH100", "meshwright"), (EXPERTS, "8xH100", "kempnerforge"), (EXPERTS, "2x8xH100", "megatron"),
    )  # fmt: skip
    pins: tuple[dict[str, Any], ...] = (
        {}, {"tp": 2, "vp": 1}, {"pp": 2, "vp": 2}, {"pp": 4, "pp_schedule": "zbv"}, {"pp": 2, "pp_schedule": "1f1b"},
        {"pp": 2, "pp_schedule": "interleaved_1f1b"}, {"micro_batch_size": 2, "recompute": "full", "cp": 2},
        {"dp_shard": 4}, {"dp_shard": -1, "etp": 2}, {"dp_replicate": 2, "ep": 2}, {"strategy": "ddp"},
        {"offload": "params", "embedding_as_layer": True}, {"recompute_layers": 1, "sp": True}, {"sp": False, "tp": 2},
    )  # fmt: skip
    for name, gpus, engine in questions:
        case = case_on(name, gpus, engine)
        for title in ("DEFAULT", "FULL", "LEVER"):
            yield f"{title} {name} {gpus} {engine}", _sums(space.candidates(case, getattr(space, f"{title}_SPACE")))
    for place, pinned in enumerate(pins):
        name = EXPERTS if place % 3 == 1 else DENSE
        scored = list(search.score(case_on(name, "16xH100"), pinned, space.DEFAULT_SPACE))
        yield f"pinned {pinned}", _sums((one.case for one in scored), [float(one.step_s.sum()) for one in scored])


def _sums(batches: Iterable[Case], more: Iterable[float] = ()) -> list[Any]:
    found: list[Any] = []
    for batch in batches:
        columns = [np.broadcast_to(getattr(batch, name), batch.tp.shape) for name in
                   ("tp", "pp", "vp", "cp", "ep", "etp", "micro_batch_size", "dp_replicate", "sp")]  # fmt: skip
        weighted = sum((3 + place) * column.astype(np.int64) * columns[0] for place, column in enumerate(columns))
        names = [str(batch.strategy), str(batch.offload), int((batch.pp_schedule == "1f1b").sum())]
        found.append([len(batch.tp), *(int(c.sum()) for c in columns), int(weighted.sum()), *names,
                      int((batch.recompute == "full").sum())])  # fmt: skip
    return [*found, *more]


def choices() -> Iterator[tuple[str, Any]]:
    """Yield how far layouts are from a recipe, which neighbors a value has, and the messages about them."""
    case = case_on(DENSE, "16xH100")
    usual = {name: getattr(case, name) for name in search.SEARCHED_NAMES}
    for changed in ({}, {"tp": 8}, {"tp": 1, "pp": 4}, {"vp": 3, "cp": 2}, {"strategy": "ddp", "offload": "params"},
                    {"recompute": "full", "micro_batch_size": 4, "dp_replicate": 2}):  # fmt: skip
        layout = {**usual, **changed}
        yield (
            f"distance {changed}",
            [
                search.distance(layout, case),
                search.changed_values(layout, case),
                sizing.describe_layout(layout, changed),
            ],
        )
    for name, gpus in ((DENSE, "16xH100"), (EXPERTS, "16xH100")):
        one = case_on(name, gpus)
        yield f"neighbors {name}", {degree: explain.neighbors(one, degree) for degree in explain.DEGREES}
        for field, value in (("tp", 1), ("tp", 2), ("vp", 1), ("vp", 2), ("pp", 3), ("pp", 4), ("recompute", "full")):
            other = explain.with_value(one, field, value)
            names = ("tp", "pp", "vp", "sp", "pp_schedule", "stage_layers", "dp_shard", "recompute_layers")
            yield f"{name} with {field}={value}", {key: getattr(other, key) for key in names}
            yield f"why {name} {field}={value}", explain.compare_value(one, field, value)
    yes = (True, False)
    for facts in product(yes, yes, yes, (-0.1, 0.0, 0.02, 0.5), ("", "a paper")):
        yield f"published {facts}", published._why(*facts).split()
    for engine, strategy in product(ENGINES, ("fsdp2", "ddp", "zero1", "megatron_fsdp")):
        recipe = apply(index.load(DENSE), [f"layout.strategy={strategy}"])
        yield (
            f"{strategy} on {engine}",
            [
                baseline.with_engine_strategy(recipe, engine).layout.strategy,
                baseline.moved_to(recipe, engine).layout.strategy,
            ],
        )
    searched = ("layout.tp", "layout.cp_comm", "kernels.loss", "kernels.compile", "train.seed")
    yield "searched", [baseline._is_searched(key, key.partition(".")[2]) for key in searched]


def findings() -> Iterator[tuple[str, Any]]:
    """Yield contradictions of overrides, and words for findings without a fix."""
    for wrong in ((), ("a",), ("a", "b"), ("a", "c"), ("a", "b", "c")):

        def errors(some: Sequence[str], wrong: tuple[str, ...] = wrong) -> list[str]:
            return ["no"] if wrong and set(wrong) <= set(some) else []

        found = repair.contradiction(["a", "b", "c"], errors)
        yield f"contradiction {wrong}", None if found is None else to_builtins(found)
    yield "contradiction without", repair.contradiction(["a", "b"], lambda some: ["always"])
    yield "contradiction of one", repair.contradiction(["a"], lambda some: ["no"] * len(some))
    for id in ("memory.fits", "topology.world", "precision.fp8-hardware", "peft.targets", "learning_rate.too-high"):
        if id in RULES:
            rule = RULES[id]
            finding = SimpleNamespace(rule=id, severity=rule.severity, fix=(), no_fix="")
            for engine in ("meshwright", "torchtitan"):
                case = case_on(DENSE, "1xA100-40", engine)
                yield f"no fix of {id} on {engine}", missing_fixes._no_fix(finding, case, ())  # type: ignore[arg-type]
    for name, gpus, more in ((DENSE, "1xA100-40", ()), (DENSE, "1xH100", ()), (DENSE, "7xH100", ("layout.tp=3",))):
        fix = missing_fixes.layout_fix(case_on(name, gpus, "meshwright", *more), frozenset())
        yield f"layout for {name} on {gpus}", fix
    for engine in ENGINES:
        wrong = ("precision.matmul=fp8_tensor", "layout.pp=2", "layout.strategy=ddp")
        case = case_on(DENSE, "8xA100", "meshwright", *wrong)
        yield f"broken on {engine}", [id for id in sorted(RULES) if missing_fixes._breaks(RULES[id], case, engine)]


def plans() -> Iterator[tuple[str, Any]]:
    """Yield summaries, sizes of few GPUs, and options of recipes that do not fit."""
    plan = plan_of("qwen3-1.7b", "2xRTX4090")
    yield "plan", [text.split() for _, text in plan.summary()]
    yield "adapters", [text.split() for _, text in plan_of("qwen3-1.7b", "2xRTX4090", "peft").summary()]
    yield "described", [node_of(replace(plan.question, cluster=cluster(on), cluster_ref=ref, assumed=()))
                        for on, ref in product(("2xH100", "3x4xH100", "16xH100"), ("", "mine"))]  # fmt: skip
    for price in (None, planner.Price(2.0, "EUR")):
        for tokens in (None, 1e9):
            found = planner.size(plan.question, (), tokens, price, most=6)
            yield f"size {price} {tokens}", {**_plain(found), "summary": [text.split() for _, text in found.summary()]}
    other = planner.size(replace(plan.question, cluster=cluster("2xL40S")), (), 1e9, planner.Price(1.0), most=3)
    compared = planner.compare([found, other])
    best = [(one.smallest, one.most_efficient, one.cheapest) for one in compared.compared]
    yield "compared", [None if size is None else size.gpus for sizes in best for size in sizes]
    none = planner.compare([planner.size(plan_of("llama31-405b", "64xH100").question, (), None, None, most=1)])
    yield "nothing fits", {**_plain(none), "summary": [text.split() for _, text in none.summary()]}
    recipe = index.load(DENSE)
    for target in (None, "mine"):
        words = () if target is None else (target,)
        options = planner.options_for_recipe(recipe, find("llama3_8b"), cluster("1xA100-40"), "meshwright", words)
        yield f"options {target}", [to_builtins(one) for one in options]
    for gpus in ("1xH100", "8xH100"):
        auto = planner.with_fastest_micro_batch(case_on("llama3_8b_sft_config", gpus))
        yield f"micro batch on {gpus}", auto.layout.micro_batch_size
    needed = [levers.host_needed(case_on(DENSE, gpus, "meshwright", *more)) for gpus, more in
              (("1xA100-40", ()), ("1xH100", ()), ("1xH100", ("optimizer.name=adamw8bit",)))]  # fmt: skip
    yield "host memory", [None if one is None else list(one) for one in needed]
    listed = planner.rank_layouts(plan.question, (), 2)
    yield "ranking", [text.split() for _, text in listed.summary()]
    yield "described case", ranking.describe_case(case_on(EXPERTS, "16xH100", "meshwright", "layout.pp=2")).split()


def _plain(value: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = to_builtins(value)
    return found


def answers() -> Iterator[tuple[str, Any]]:
    """Yield every part."""
    for part in (numbers, notes, spaces, choices, findings, plans):
        for name, value in part():
            yield name, " ".join(kept.tokens(value))


if __name__ == "__main__":
    kept.write(FILE, answers)

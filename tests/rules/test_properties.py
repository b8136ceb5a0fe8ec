"""Properties of the rules: columns match scalars, legal layouts multiply out, fixes are valid and work."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings

from meshwright.models import ModelSpec
from meshwright.recipes.case import Case
from meshwright.recipes.types import ENGINES, GOALS, Engine
from meshwright.rules import RULES, applicable, check, legal, message

from .helpers import DENSE, case, cluster, parse
from .layouts import ANYTHING, CONTRACTS, PLACES, ROW, ROWS, columns, every_layout

Place = tuple[ModelSpec, int, Engine]
slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def base(place: Place) -> Case:
    spec, world, engine = place
    return case(spec, cluster(world), engine)


@given(PLACES, ROWS)
@settings(slow, max_examples=20)
def test_columns_match_scalars(place: Place, rows: list[dict[str, Any]]) -> None:
    start = base(place)
    vector, single = start.replace(**columns(rows)), [start.replace(**row) for row in rows]
    for rule in applicable(start):
        together = np.broadcast_to(np.asarray(rule.broken(vector), dtype=bool), len(rows))
        assert together.tolist() == [bool(rule.broken(one)) for one in single], rule.id
    assert np.broadcast_to(legal(vector), len(rows)).tolist() == [bool(legal(one)) for one in single]


EVEN = ("megatron", "meshwright", "deepspeed")  # the others allow uneven stages


@given(PLACES, CONTRACTS)
@settings(slow, max_examples=25)
def test_legal_layouts_multiply_out(place: Place, contract: dict[str, int]) -> None:
    start = base(place)
    strategy = "zero1" if start.engine in ("megatron", "deepspeed") else "fsdp2"
    grid = start.replace(strategy=strategy, **contract, **every_layout())
    ok = np.broadcast_to(legal(grid), grid.tp.shape)
    c = start.replace(strategy=strategy, **contract, **{name: column[ok] for name, column in every_layout().items()})
    assert np.all(multiplies_out(c))


def multiplies_out(c: Case) -> Any:
    """Return where all meshes, batches and stages divide evenly."""
    mesh = c.world == c.dp * c.tp * c.pp * c.cp * (c.ep if c.engine == "kempnerforge" else 1)
    experts = (c.ep == 1) | (c.world == c.pp * c.ep * c.etp * c.expert_dp) | (c.engine == "kempnerforge")
    batch = c.global_batch_size == c.accumulation * c.micro_batch_size * c.dp
    stages = (c.stages <= c.layers) & ((c.layers % c.stages == 0) | (c.engine not in EVEN))
    heads = (c.heads % c.tp == 0) & (c.experts % c.ep == 0)
    sequence = (c.cp == 1) | (c.seq_length % (2 * c.cp) == 0) | (c.engine == "automodel")  # it pads
    return mesh & experts & batch & stages & heads & sequence & (c.dp == c.shard * c.dp_replicate)


def test_some_layouts_are_legal_on_every_engine() -> None:
    for engine in ENGINES:
        c = case(DENSE, cluster(64), engine, strategy="zero1" if engine in ("megatron", "deepspeed") else "fsdp2")
        assert np.sum(legal(c.replace(**every_layout()))) >= 3, engine


@given(PLACES, ANYTHING)
@settings(slow, max_examples=20)
def test_no_rule_crashes_on_valid_recipe_values(place: Place, values: dict[str, Any]) -> None:
    spec, world, engine = place
    for goal in GOALS:
        c = case(spec, cluster(world), engine, goal, **values)
        for rule in applicable(c):
            assert bool(rule.broken(c)) in (True, False)
            message(rule, c)


@given(PLACES, ANYTHING)
@settings(slow, max_examples=10)
def test_any_recipe_can_be_checked(place: Place, values: dict[str, Any]) -> None:
    spec, world, engine = place
    c = case(spec, cluster(world), engine, **values)
    for finding in check(c):
        assert all(parse(override) for override in finding.fix)


def errors_of(c: Case) -> set[str]:
    return {r.id for r in applicable(c, ("error",)) if bool(r.broken(c))}


@given(PLACES, ROW)
@settings(slow, max_examples=20)
def test_fixes_are_valid_and_resolve_their_finding(place: Place, row: dict[str, Any]) -> None:
    c = base(place).replace(**row)
    before = errors_of(c)
    for finding in check(c):
        if finding.fix:
            repaired = c.replace(**dict(parse(override) for override in finding.fix))
            assert not bool(RULES[finding.rule].broken(repaired)), finding
            assert errors_of(repaired) <= before, finding


@given(PLACES, ROW)
@settings(slow, max_examples=15)
def test_fixing_errors_one_by_one_terminates(place: Place, row: dict[str, Any]) -> None:
    c = base(place).replace(**row)
    for _ in range(len(errors_of(c))):
        fixes = [f.fix for f in check(c) if f.severity == "error" and f.fix]
        if fixes:
            c = c.replace(**dict(parse(override) for override in fixes[0]))
    assert not [f for f in check(c) if f.severity == "error" and f.fix]


@given(PLACES, ROW)
@settings(slow, max_examples=20)
def test_every_message_can_be_formatted_for_any_case(place: Place, row: dict[str, Any]) -> None:
    c = base(place).replace(**row)
    for rule in applicable(c):
        assert "{" not in message(rule, c)

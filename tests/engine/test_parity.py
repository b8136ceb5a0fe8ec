"""Every layout trains like one process: losses of five steps, all gradients and all weights agree.

A few of the combinations run every time, for two steps, and cover every family and technique; `make parity` runs all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.layouts import TRIED
from tests.engine.parity import TOLERANCE, differences, recipe_of

from meshwright import clusters, models, rules
from meshwright.recipes.case import Case

QUICK_STEPS = 2
SPLITS_BACKWARD = (2, 13)  # first torch whose zero-bubble schedules support layers with custom autograd functions


def quick() -> list[Any]:
    return [(name, family) for name, tried in TRIED.items() for family in tried.quick]


def everything() -> Iterator[Any]:
    for name, tried in TRIED.items():
        for family in tried.runs:
            why = tried.fails.get(family)
            marks = [pytest.mark.xfail(reason=why, strict=True)] if why else []
            yield pytest.param(name, family, id=f"{name}-{family}", marks=marks)


def too_large(found: dict[str, float]) -> dict[str, float]:
    return {what: value for what, value in found.items() if not value <= TOLERANCE}


@pytest.mark.parametrize(("name", "family"), quick())
def test_every_technique_trains_like_one_process(name: str, family: str) -> None:
    if name.startswith("dualpipe") and torch.__version__ < SPLITS_BACKWARD:
        pytest.skip("not supported by torch 2.11; the engine reports the schedule and the fix")
    tried = TRIED[name]
    assert not too_large(differences(family, tried.world, recipe_of(tried), QUICK_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), list(everything()))
def test_a_layout_trains_like_one_process(name: str, family: str, record_property: Any) -> None:
    tried = TRIED[name]
    found = differences(family, tried.world, recipe_of(tried))
    record_property("parity", json.dumps({"layout": name, "family": family, "differences": found}))
    assert not too_large(found)


def broken_rules(name: str, family: str) -> set[str]:
    tried = TRIED[name]
    spec = models.spec_from_config(FAMILIES[family], family)
    case = Case(recipe_of(tried), spec, clusters.cluster(f"{tried.world}xH100"), "meshwright")
    return set(rules.illegal_by_rule(case))


@pytest.mark.parametrize("name", TRIED)
def test_the_rules_refuse_what_is_not_tested_and_nothing_else(name: str, record_property: Any) -> None:
    tried = TRIED[name]
    refused = {family: rule for rule, families in tried.refused.items() for family in families}
    for family, rule in refused.items():
        assert rule in broken_rules(name, family), family
    for family in tried.runs:
        assert not broken_rules(name, family), family
    record_property("refused", json.dumps({"layout": name, "families": refused}))


def test_every_family_and_technique_is_in_the_quick_set() -> None:
    tried = [one for one in TRIED.values() if one.runs]
    assert {family for one in tried for family in one.quick} == set(FAMILIES)
    assert {one.technique for one in tried} == {
        name for one in tried if one.quick for name in (one.technique, *one.also)
    }

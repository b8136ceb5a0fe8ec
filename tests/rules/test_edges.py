"""The verdict of every rule at, below and above each term of its condition is the one that was reviewed."""

from __future__ import annotations

import json

import pytest
from tests.each import each

from meshwright.rules import RULES, message

from . import edges
from .cases import broken_case

PARTS = 3  # one runs every time, all of them behind `slow`
KEPT = json.loads(edges.FILE.read_text())
UNCHANGED_BY_FIELDS = {"engine.model-not-trained", "memory.host"}
"""Rules whose verdict no field that they read changes alone: their own tests have both verdicts."""


def test_every_rule_has_its_edges() -> None:
    assert sorted(KEPT) == sorted(RULES)


@each("id", sorted(RULES))
def test_messages(id: str) -> None:
    assert message(RULES[id], broken_case(id)) == KEPT[id][0]


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_edges(part: int) -> None:
    each("id", sorted(RULES)[part::PARTS])(_edges)()


def _edges(id: str) -> None:
    now, kept = edges.verdicts(RULES[id]), KEPT[id][1]
    changed = {text: f"{was} before" for (text, is_), was in zip(now.items(), kept, strict=False) if is_ != was}
    assert not changed
    assert len(now) == len(kept)
    assert {"0", "1"} <= set(kept) or id in UNCHANGED_BY_FIELDS

"""The verdict of every rule at, below and above each term of its condition is the one that was reviewed."""

from __future__ import annotations

import json

import pytest
from tests.each import each

from meshwright.rules import RULES, message

from . import edges
from .cases import broken_case

KEPT = json.loads(edges.FILE.read_text())
UNCHANGED_BY_FIELDS = {"engine.model-not-trained", "memory.host"}
"""Rules whose verdict no field that they read changes alone: their own tests have both verdicts."""


def test_every_rule_has_its_edges() -> None:
    assert sorted(KEPT) == sorted(RULES)


@pytest.mark.filterwarnings("ignore:divide by zero")
@each("id", sorted(RULES))
def test_edges(id: str) -> None:
    now = edges.verdicts(RULES[id])
    text, kept = KEPT[id]
    assert message(RULES[id], broken_case(id)) == text
    changed = {text: f"{was} before" for (text, is_), was in zip(now.items(), kept, strict=False) if is_ != was}
    assert not changed
    assert len(now) == len(kept)
    assert {"0", "1"} <= set(kept) or id in UNCHANGED_BY_FIELDS

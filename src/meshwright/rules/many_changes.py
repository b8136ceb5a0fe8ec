"""Check rules for many changes of one case at once: an estimate of many layouts costs little more than one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.recipes.case import VECTORIZED_NAMES, Case
from meshwright.rules.rule import Rule

Change = dict[str, Any]  # values by flat name


def breaks_any(rules: Sequence[Rule], case: Case, changes: Sequence[Change]) -> list[bool]:
    """Return, for every change, whether the changed case breaks one of the rules, which must accept columns."""
    found = [False] * len(changes)
    for places, batch in in_columns(case, changes):
        broken = np.zeros(len(places), dtype=bool)
        for rule in rules:
            broken |= np.broadcast_to(np.asarray(rule.broken(batch), dtype=bool), broken.shape)
        for place, value in zip(places, broken.tolist(), strict=True):
            found[place] = value
    return found


def in_columns(case: Case, changes: Sequence[Change]) -> Iterator[tuple[list[int], Case]]:
    """Yield the changed cases as few cases with columns, each with the places of its rows in `changes`."""
    groups: dict[str, list[int]] = {}
    for place, change in enumerate(changes):
        alike = {name: value for name, value in change.items() if name not in VECTORIZED_NAMES}
        groups.setdefault(repr(sorted(alike.items())), []).append(place)
    for places in groups.values():
        yield places, _as_columns(case, [changes[place] for place in places])


def _as_columns(case: Case, changes: Sequence[Change]) -> Case:
    """Return the case with one row per change; fields that cannot be columns have one value in all of them."""
    names = {name for change in changes for name in change}
    values = {name: [change.get(name, getattr(case, name)) for change in changes] for name in names}
    return case.replace(**{n: np.array(one) if n in VECTORIZED_NAMES else one[0] for n, one in values.items()})

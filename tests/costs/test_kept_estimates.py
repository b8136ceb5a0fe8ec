"""The estimates of all recipes and of their variations are the kept ones."""

from __future__ import annotations

import json

from . import kept_estimates

SAME = 1e-4  # relative; other platforms round differently


def same(kept: str, now: str) -> bool:
    """Return whether two texts differ by rounding only."""
    pairs = list(zip(kept.split(), now.split(), strict=False))
    return len(kept.split()) == len(now.split()) and all(a == b or close(a, b) for a, b in pairs)


def close(a: str, b: str) -> bool:
    try:
        return abs(float(a) - float(b)) <= SAME * abs(float(a))
    except ValueError:
        return False


def test_estimates_are_the_kept_ones() -> None:
    kept, now = json.loads(kept_estimates.FILE.read_text()), kept_estimates.estimates()
    assert now.keys() == kept.keys()
    changed = {name: f"{kept[name]} before, {value} now" for name, value in now.items() if not same(kept[name], value)}
    assert not changed, "a change of the cost model: python -m tests.costs.kept_estimates writes the new values"

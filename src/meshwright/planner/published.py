"""The published layout of a recipe on its own cluster, beside the layout that the search finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright import costs, rules
from meshwright.costs.uncertainty import error_bands
from meshwright.planner.baseline import Baseline
from meshwright.planner.faster_step import FAST_FIELDS, fast_step_s
from meshwright.planner.plan import PublishedLayout
from meshwright.planner.search import SAME_SPEED, SEARCHED_NAMES, Candidate, as_overrides, has_headroom
from meshwright.recipes import index
from meshwright.recipes.case import Case

DEGREES = ("strategy", "tp", "pp", "vp", "cp", "ep", "micro_batch_size", "recompute")
NOT_RETURNED = ("sp", "dp_shard", *FAST_FIELDS)
"""Derived fields, and those listed apart."""


def keeps_recipe_layout(baseline: Baseline, found: Candidate) -> bool:
    """Return whether the recipe's layout stays: it is about as fast as the one found, or was measured here."""
    case = baseline.case
    if not bool(rules.legal(case)):
        return False
    price = costs.estimate(case)
    if not bool(price.fits) or float(price.step_s) > _margin(baseline) * found.step_s:
        return False
    total = float(price.memory.total)
    measured = bool(baseline.on_reference_cluster and _source(baseline))
    if not measured and float(price.step_s) > found.step_s and total >= found.total_gib:  # slower and larger
        return False
    # The published layout was made for this cluster; elsewhere, headroom comes first.
    if not (baseline.on_reference_cluster or has_headroom(total, case) or not found.has_headroom):
        return False
    chosen = case.replace(**{**found.layout, **baseline.pinned})
    return fast_step_s(baseline, case) <= _margin(baseline) * fast_step_s(baseline, chosen)


def _margin(baseline: Baseline) -> float:
    """Return how much slower the recipe's layout may be: more if it was measured on this very cluster.

    A measured layout is known to run at its speed; the gain over it must exceed the error of a predicted ratio.
    """
    measured = baseline.on_reference_cluster and _source(baseline)
    return 1 + error_bands().layout_gain_pct / 100 if measured else SAME_SPEED


def _source(baseline: Baseline) -> str:
    """Return where the recipe's layout was measured; empty if it was not."""
    name = baseline.base.name
    return index.published(name).measured if index.is_known(name) else ""


def published_layout(
    baseline: Baseline, chosen: Mapping[str, Any], planned: Case, step_s: float
) -> PublishedLayout | None:
    """Return the recipe's layout with its cost, if it was published for this cluster; `chosen` is what is planned."""
    if not baseline.on_reference_cluster:
        return None
    case = _as_published(baseline)
    kernels = {name: value for name in FAST_FIELDS if (value := getattr(case, name)) != getattr(planned, name)}
    different = [name for name in SEARCHED_NAMES if chosen.get(name, getattr(case, name)) != getattr(case, name)]
    kept = not different
    runs, source = bool(rules.legal(case)), _source(baseline)
    price, name = costs.estimate(case), baseline.base.name
    fits, seconds = runs and bool(price.fits), float(price.step_s)
    return PublishedLayout(
        recipe=name if index.is_known(name) and baseline.question.recipe_words in ((), (name,)) else "",
        kept=kept,
        measured=source,
        layout={name: getattr(case, name) for name in SEARCHED_NAMES},
        overrides=(*(() if kept else _overrides(case, different)), *as_overrides(kernels)) if runs else (),
        fits=fits,
        step_s=seconds,
        total_gib=float(price.memory.total),
        why=_why(kept, runs, fits, seconds / step_s - 1, source),
    )


def _as_published(baseline: Baseline) -> Case:
    """Return the recipe's case with its own kernels."""
    if not baseline.fast or "kernels.compile" in baseline.reasons:
        return baseline.case
    return baseline.case.replace(compile=baseline.base.kernels.compile)


def _overrides(case: Case, different: Sequence[str]) -> tuple[str, ...]:
    """Return what plans with the published layout: its degrees, and what else differs."""
    names = [name for name in SEARCHED_NAMES if name in DEGREES or (name in different and name not in NOT_RETURNED)]
    return as_overrides({name: getattr(case, name) for name in names})


def _why(kept: bool, runs: bool, fits: bool, slower: float, source: str) -> str:
    """Say why the published layout is kept or not."""
    gain = error_bands().layout_gain_pct
    if kept:
        measured = f"measured ({source}), and the search gains less than {gain:g} %, the error of such a comparison"
        return measured if source else "the search finds nothing faster"
    if not runs:
        return "breaks a rule of this engine"
    if not fits:
        return "does not fit in memory"
    if slower < 0:
        return "leaves too little memory free"
    note = f"more than the {gain:g} % that a predicted difference may be wrong by" if slower > gain / 100 else ""
    known = f"measured ({source}); " if source else "not measured; "
    return f"{known}estimated {slower:.0%} slower" + (f", {note}" if note else "")

"""Compares the layout of a run with the best one for its model and GPUs, not only with its own estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright import costs
from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding
from meshwright.doctor.run_stats import RunStats, span
from meshwright.doctor.thresholds import share
from meshwright.errors import InputError
from meshwright.planner.baseline import FAST_ENGINES
from meshwright.planner.search import Candidate, as_overrides, best
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import field_value

DEGREES = ("tp", "pp", "cp", "ep")
COMPILE = "kernels.compile"


def better_layout(stats: RunStats) -> Iterator[Finding]:
    """Another layout of the same training is much faster on these GPUs, by the estimates of both."""
    case, estimate, taken = stats.case, stats.estimate, stats.step_s
    if case is None or estimate is None or taken is None or stats.slower is None or not stats.enough:
        return
    if not states_layout(stats) or stats.has_unlike_samples or stats.run.header.assumed_gpus:
        return
    own, scale = float(estimate.step_s), (stats.estimated_step_s or 0.0) / float(estimate.step_s)
    found, change = _best(stats, case)[0], best_layout_change(stats)
    if found is None or change is None:
        return
    best_s = found.step_s if stats.sample_tokens is None else _cost(stats.timed(case), change.values)[0]
    if best_s > own * (1 - share("better_layout")):
        return
    if taken * (1 - share("better_layout")) < best_s * scale:  # little to gain on what was measured
        return
    remedy = remedies.evaluate_change(stats, change)
    if remedy is None or not remedy.fits or (remedy.step_ratio or 1.0) > 1 - share("better_layout"):
        return
    ours, theirs = _both(case, change.values)
    yield Finding(
        id="speed.better-layout",
        severity="warning",
        message=f"the layout ({ours}) is {own / best_s:.2f} times as slow as the best one for {case.model.name} "
        f"on {case.cluster} ({theirs}), by the estimates of both; the run takes {taken:.3g} s per step, the best "
        f"layout is estimated at {best_s * scale:.3g} s",
        steps=span(stats.steady),
        lines=stats.ends,
        evidence=(
            Evidence("step time of this layout", round(own, 4), "s", round(best_s, 4), "of the best, estimated"),
        ),
        remedies=(remedy,),
    )


def best_layout_change(stats: RunStats) -> remedies.Change | None:
    """Return what changes the run's layout into the best one of the search; None if the run's is unknown or best."""
    case = stats.case
    if case is None or not states_layout(stats):
        return None
    found, compiled = _best(stats, case)
    if found is None or not found.fits or found.step_s >= float(costs.step_time(case).step_s):
        return None
    changes = _effective(case, {**_changes(case, found), **compiled})
    return remedies.Change(changes, "the best layout for this model on these GPUs") if changes else None


def states_layout(stats: RunStats) -> bool:
    """Return whether the layout is that of the run, not one that is assumed for it."""
    header = stats.run.header
    known = header.states_layout or header.states_settings or header.recipe is not None or bool(header.file)
    return known or (stats.stated is not None and any(f"layout.{name}" in stats.stated for name in DEGREES))


def _best(stats: RunStats, case: Case) -> tuple[Candidate | None, dict[str, Any]]:
    """Return the best layout, and what it compiles if the run does not: plans compile where the engine can."""
    found = case.cached(_searched)
    stated = stats.stated is None or COMPILE in stats.stated
    if not stated or case.compile or case.engine not in FAST_ENGINES or not remedies.can_start(case, {COMPILE: True}):
        return found, {}
    faster = case.cached(_searched_compiled)
    if found is None or faster is None or not faster.fits or faster.step_s >= found.step_s:
        return found, {}
    return faster, {COMPILE: True}


def _searched(case: Case) -> Candidate | None:
    try:
        return best(case, {}, quick=True)
    except (InputError, ValueError, ZeroDivisionError):  # no layout is legal
        return None


def _searched_compiled(case: Case) -> Candidate | None:
    return _searched(case.replace(compile=True))


def _changes(case: Case, found: Candidate) -> dict[str, Any]:
    """Return the fields of the best layout that differ from the run's."""
    values = override.requested(case.recipe, as_overrides(found.layout))
    return {key: value for key, value in values.items() if field_value(case.recipe, key) != value}


def _effective(case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes without those that change neither memory nor speed, as sharding over 128 of 128 GPUs."""
    for key in tuple(changes):
        fewer = {name: value for name, value in changes.items() if name != key}
        if remedies.can_start(case, fewer) and _cost(case, fewer) == _cost(case, changes):
            changes = fewer
    return changes


def _cost(case: Case, changes: Mapping[str, Any]) -> tuple[float, float]:
    changed = case.rebuild(override.change(case.recipe, changes)[0])
    return float(costs.step_time(changed).step_s), float(costs.memory(changed).total)


def _both(case: Case, changes: Mapping[str, Any]) -> tuple[str, str]:
    """Return the run's layout and the best one: all degrees if one differs, and every other field that does."""
    degrees = [f"layout.{name}" for name in DEGREES]
    shown = [*(degrees if {*degrees} & {*changes} else ()), *(key for key in changes if key not in degrees)]
    ran = {key: field_value(case.recipe, key) for key in shown}
    texts = (", ".join(_shown(key, one[key]) for key in shown) for one in (ran, {**ran, **changes}))
    ours, theirs = texts
    return ours, theirs


def _shown(key: str, value: Any) -> str:
    return format_override(key, value).removeprefix("layout.")

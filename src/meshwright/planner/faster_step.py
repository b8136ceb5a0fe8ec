"""Suggest settings that make the step of a plan faster on the same degrees, without changing the trained weights.

Tried one after the other, each on the result of those before: compiled blocks, another loss, weights that stay gathered
between forward and backward, and less recompute where memory is left. They are suggested, not applied: a published
recipe ran with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from meshwright import costs, rules
from meshwright.planner.baseline import Baseline
from meshwright.planner.plan import Suggestion
from meshwright.planner.search import as_overrides, has_headroom
from meshwright.recipes.case import Case
from meshwright.recipes.types import keys_by_flat_name
from meshwright.rules.model_families import is_qwen3_next

TITLE = "a faster step"
MIN_GAIN = 0.03  # of the step time, of all changes together
EACH_GAIN = 0.005  # of the step time, of one change
MODULES = (("layernorm", "moe_act"), ("mlp",), ("moe",))
"""Modules to recompute between every second operation and all of a layer."""
Values = dict[str, Any]  # by flat name


def faster_step(baseline: Baseline, case: Case, estimate: costs.Estimate) -> Iterable[Suggestion]:
    """Yield the changes that together make a plan's step faster, if the gain is worth a try."""
    if case.benchmark or case.is_diffusion or not bool(estimate.fits):
        return
    keys = keys_by_flat_name()
    fixed = {name for name, key in keys.items() if key in baseline.reasons or name in baseline.pinned}
    changed: Values = {}
    before = float(estimate.step_s)
    current, step_s = case, before
    for values in _steps(case):
        if fixed & values.keys():
            continue
        trial, faster = _tried(current, values, step_s)
        if trial is not None:
            current, step_s, changed = trial, faster, {**changed, **values}
    changed = {name: value for name, value in changed.items() if value != getattr(case, name)}
    if not changed or step_s > (1 - MIN_GAIN) * before:
        return
    total = float(costs.memory(current).total)
    why = f"estimated {1 - step_s / before:.0%} less step time at {total:.0f} GiB; the trained weights stay the same"
    yield Suggestion(TITLE, as_overrides(changed), why, kind="layout")


def _steps(case: Case) -> Iterator[Values]:
    """Yield the changes to try, those that need no memory first."""
    if not case.compile and not is_qwen3_next(case):  # torch cannot trace its gates
        yield {"compile": True}
    if case.vocab:
        yield from ({"loss": loss} for loss in ("fused_linear", "vocab_parallel") if loss != case.loss)
    if case.recompute == "full":
        yield from _less_recompute(case)
    if case.reshard_after_forward and case.strategy == "fsdp2" and case.shard > 1:
        yield {"reshard_after_forward": False}


def _less_recompute(case: Case) -> Iterator[Values]:
    """Yield fewer recomputed layers, then selective recompute, most of it first."""
    if case.vp == 1 and not case.recompute_layers:
        most = int(case.layers // case.pp)
        fewer = np.arange(1, most)
        if len(fewer):
            enough = has_headroom(costs.memory(case.replace(recompute_layers=fewer)).total, case)
            if enough.any():
                yield {"recompute_layers": int(fewer[int(np.argmax(enough))])}
    for modules in (*reversed(MODULES), ()):
        if case.is_moe or not {"moe", "moe_act"} & set(modules):
            yield {"recompute": "selective", "recompute_modules": modules, "recompute_layers": 0}


def _tried(case: Case, values: Values, step_s: float) -> tuple[Case | None, float]:
    """Return the changed case and its step time if it is legal, faster and leaves headroom."""
    trial = case.replace(**values)
    memory = costs.memory(trial)
    if not has_headroom(float(memory.total), case):
        return None, step_s
    faster = float(costs.step_time(trial).step_s)
    if faster > (1 - EACH_GAIN) * step_s or not bool(rules.legal(trial)) or _new_warnings(trial, case):
        return None, step_s
    return trial, faster


def _new_warnings(trial: Case, case: Case) -> bool:
    checked = rules.applicable(trial, ("warning",))
    return any(bool(r.broken(trial)) and not bool(r.broken(case)) for r in checked)

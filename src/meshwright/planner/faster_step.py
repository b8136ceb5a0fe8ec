"""Settings that make the step of a plan faster on the same degrees, without changing the trained weights.

Tried one after the other, each on the result of those before: compiled blocks, another loss, weights that stay gathered
between forward and backward, and less recompute where memory is left. Where the planner chooses the kernels
(`Baseline.fast`) blocks are compiled before the search, and loss and gathering are applied to its result (a loss that
frees memory and is not slower also where no headroom remains); less recompute is suggested. A recipe that the user
names keeps its own settings, and all of them are suggested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from meshwright import costs, rules
from meshwright.planner.baseline import Baseline
from meshwright.planner.plan import Suggestion
from meshwright.planner.search import as_overrides, has_headroom
from meshwright.planner.space import listed_module_sets
from meshwright.recipes.capabilities import can_export, can_express
from meshwright.recipes.case import Case
from meshwright.recipes.types import keys_by_flat_name
from meshwright.rules.model_families import is_qwen3_next
from meshwright.rules.search_values import divisors

TITLE = "a faster step"
MIN_GAIN = 0.03  # of the step time, of all changes together
EACH_GAIN = 0.005  # of the step time, of one change
GATHERED_GAIN = 0.02  # of the step time, of weights that stay gathered: they take memory from the allocator's reserve
Values = dict[str, Any]  # by flat name


FAST_FIELDS = ("compile", "loss", "reshard_after_forward")
"""Fields that the planner sets where it chooses the kernels; the degrees of a layout stay."""


def fast_values(baseline: Baseline, case: Case) -> Values:
    """Return the loss and the gathering of weights that make a plan's step faster, as far as memory permits."""
    if not baseline.fast or not bool(rules.legal(case)):
        return {}
    step_s = float(costs.step_time(case).step_s)
    current, step_s, kernels = _improved(baseline, case, _kernels(case), step_s)
    current, step_s, batched = _improved(baseline, current, _batched(current), step_s, MIN_GAIN)
    return kernels | batched | _improved(baseline, current, _gathered(current), step_s, GATHERED_GAIN)[2]


def fast_step_s(baseline: Baseline, case: Case) -> float:
    """Return the step time with the kernels that a plan of this case gets."""
    return float(costs.step_time(case.replace(**fast_values(baseline, case))).step_s)


def faster_step(baseline: Baseline, case: Case, estimate: costs.Estimate) -> Iterable[Suggestion]:
    """Yield the changes that together make a plan's step faster, if the gain is worth a try."""
    if case.benchmark or case.is_diffusion or not bool(estimate.fits):
        return
    before = float(estimate.step_s)
    current, step_s, changed = _improved(baseline, case, _steps(case), before)
    if not changed or step_s > (1 - MIN_GAIN) * before:
        return
    total = float(costs.memory(current).total)
    gain = f"estimated {1 - step_s / before:.0%} less step time in this layout, at {total:.0f} GiB"
    why = f"{gain}; the trained weights stay the same"
    yield Suggestion(TITLE, as_overrides(changed), why, kind="layout")


def _improved(
    baseline: Baseline, case: Case, steps: Iterable[Values], step_s: float, gain: float = EACH_GAIN
) -> tuple[Case, float, Values]:
    """Return the case with the changes that each make it faster, its step time and these changes."""
    keys = keys_by_flat_name()
    fixed = {name for name, key in keys.items() if key in baseline.reasons or name in baseline.pinned}
    current, changed = case, Values()
    for values in steps:
        if any(value != getattr(case, name) for name, value in values.items() if name in fixed):
            continue
        trial, faster = _tried(current, values, step_s, gain)
        if trial is not None:
            current, step_s, changed = trial, faster, {**changed, **values}
    return current, step_s, {name: value for name, value in changed.items() if value != getattr(case, name)}


def _steps(case: Case) -> Iterator[Values]:
    """Yield the changes to try, those that need no memory first."""
    yield from _kernels(case)
    if case.recompute == "full":
        yield from _less_recompute(case)
    yield from _gathered(case)


def _kernels(case: Case) -> Iterator[Values]:
    yield from _compiled(case)  # where a rule kept the recipe's own layout from it
    yield from _losses(case)


def _compiled(case: Case) -> Iterator[Values]:
    if not case.compile and not case.is_diffusion and not is_qwen3_next(case):  # torch cannot trace its gates
        yield {"compile": True}


def _losses(case: Case) -> Iterator[Values]:
    if case.vocab:
        others = [loss for loss in ("fused_linear", "vocab_parallel", "chunked") if loss != case.loss]
        yield from ({"loss": loss} for loss in others if can_export("loss", case.engine, loss))


def _gathered(case: Case) -> Iterator[Values]:
    if case.reshard_after_forward and case.strategy == "fsdp2" and case.shard > 1:
        yield {"reshard_after_forward": False}


def _batched(case: Case) -> Iterator[Values]:
    """Yield micro batches whose memory comes from recomputing some modules: the fastest with headroom for each kind.

    The search tries selective recompute of attention only. Many small experts keep much memory, and the host must
    launch their kernels for every micro batch. Not with a pipeline, whose schedule was chosen for its micro batches.
    """
    ranks = max(1, int(case.cluster.world // (case.tp * case.cp)))
    sizes = divisors(max(1, int(case.global_batch_size) // ranks))
    for modules in listed_module_sets(case) if case.is_moe and case.pp == 1 else ():
        values = {"recompute": "selective", "recompute_modules": modules, "recompute_layers": 0}
        tried = case.replace(micro_batch_size=np.array(sizes), **values)
        step_s = np.where(has_headroom(costs.memory(tried).total, tried), costs.step_time(tried).step_s, np.inf)
        if np.isfinite(step_s).any():
            yield {"micro_batch_size": sizes[int(np.argmin(step_s))], **values}


def _less_recompute(case: Case) -> Iterator[Values]:
    """Yield fewer recomputed layers, then selective recompute, most of it first."""
    if case.vp == 1 and not case.recompute_layers and can_express("recompute_layers", case.engine, 1):
        most = int(case.layers // case.pp)
        fewer = np.arange(1, most)
        if len(fewer):
            enough = has_headroom(costs.memory(case.replace(recompute_layers=fewer)).total, case)
            if enough.any():
                yield {"recompute_layers": int(fewer[int(np.argmax(enough))])}
    for modules in (*reversed(listed_module_sets(case)), ()):
        yield {"recompute": "selective", "recompute_modules": modules, "recompute_layers": 0}


def _tried(case: Case, values: Values, step_s: float, gain: float) -> tuple[Case | None, float]:
    """Return the changed case and its step time if it is legal and better.

    That is faster with headroom left, or, as another loss may be, not slower in less memory.
    """
    trial = case.replace(**values)
    total = float(costs.memory(trial).total)
    frees = "loss" in values and total < float(costs.memory(case).total)
    if not frees and not has_headroom(total, case):
        return None, step_s
    faster = float(costs.step_time(trial).step_s)
    better = has_headroom(total, case) and faster <= (1 - gain) * step_s
    if not (better or (frees and faster <= step_s)) or not bool(rules.legal(trial)) or _new_warnings(trial, case):
        return None, step_s
    return trial, faster


def _new_warnings(trial: Case, case: Case) -> bool:
    checked = rules.applicable(trial, ("warning",))
    return any(bool(r.broken(trial)) and not bool(r.broken(case)) for r in checked)

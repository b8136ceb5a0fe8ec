"""Sides of a comparison by rank, the reasons for it, and which to use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright import frameworks
from meshwright.api.compared_sides import Side
from meshwright.api.engine_configs import CONFIGS
from meshwright.api.run_comparison import differences
from meshwright.costs.uncertainty import error_bands
from meshwright.display import Readable, Row, plural, titled
from meshwright.recipes.types import ENGINES

ONLY_SHARDING = ("accelerate", "deepspeed")  # their configs leave the training program to the user
NEVER_RUN = "was never run on several GPUs (only on one, and with several ranks over gloo): this is an estimate"
SHOWN = 4  # fields named in a reason
MOST_ALIKE = 25.0  # per cent of speed beyond which the faster engine is ranked first, however uncertain both are


class Comparison(Readable, msgspec.Struct, frozen=True):
    """Sides in the order of the request, and ranked."""

    of: str  # engines or targets
    sides: tuple[Side, ...]
    ranked: tuple[Side, ...]
    own: str = ""  # engine that another framework's file is for

    @property
    def answer(self) -> str:
        """Which engine or target to use, and why, in one sentence or two."""
        return answer_of(self)

    def summary(self) -> Sequence[Row]:
        """Return the sides by rank, each with the reasons for it, what differs between targets, and the answer."""
        best = self.ranked[0]
        lines = [f"{rank}. {one.name}: {'; '.join(reasons_for(one, best))}" for rank, one in enumerate(self.ranked, 1)]
        plans = [one.plan for one in self.sides if one.plan is not None] if self.of == "targets" else []
        differ = differences([one.recipe for one in plans]) if plans else []
        shown = [f"{one.field}: {' | '.join(map(str, one.values))}" for one in differ]
        return [*titled(self.of.capitalize(), lines), *titled("Differ", shown), ("Result", self.answer)]


def ranked(sides: Sequence[Side], own: str = "") -> tuple[Side, ...]:
    """Return the sides, best first: those that run, then speed beyond the uncertainty, then what is lost.

    Of engines that are about as fast, the one that the file is for needs no conversion.
    """
    fastest = max((one for one in sides if one.ok), key=lambda one: one.rate, default=sides[0])

    def order(side: Side) -> tuple[Any, ...]:
        if not side.ok:
            return (2, not side.runs, side.plan is None, bool(side.export_error), -side.rate)
        near = _about_as_fast(side, fastest)
        return (0, side.name != own, len(side.lost_contract), -side.rate) if near else (1, -side.rate)

    return tuple(sorted(sides, key=order))


def _about_as_fast(side: Side, other: Side) -> bool:
    """Return whether two speeds are ranked as equal: they differ little, and by less than their uncertainty."""
    low, high = sorted((side.rate, other.rate))
    return _within_uncertainty(side, other) and high <= low * (1 + MOST_ALIKE / 100)


def _within_uncertainty(side: Side, other: Side) -> bool:
    """Return whether two speeds differ by less than the uncertainty of their ratio.

    Errors of one engine's estimates are largely the same for both layouts; those of two engines are independent.
    """
    if side.plan is None or other.plan is None:
        return False
    if side.plan.question.engine == other.plan.question.engine:
        margin = float(error_bands().layout_gain_pct)
    else:
        margin = math.hypot(*(float(one.estimate.band.step_pct) for one in (side.plan, other.plan)))
    low, high = sorted((side.rate, other.rate))
    return high <= low * (1 + margin / 100)


def reasons_for(side: Side, best: Side) -> list[str]:
    """Return why a side is ranked where it is, in sentences."""
    if side.plan is None:
        return [f"cannot run this job: {side.error}"]
    if side.export_error:
        return [f"its config cannot express this job: {side.export_error}"]
    if side.refused:
        return [f"its framework refuses this job: {one.message}" for one in side.refused[:2]]
    errors = [one.message for one in side.plan.findings if one.severity == "error"]
    if errors:
        return [f"cannot run this job: {one}" for one in errors[:2]]
    if not side.plan.estimate.fits:
        memory = side.plan.estimate.memory
        return [f"does not fit: {float(memory.total):.1f} of {float(memory.capacity):.1f} GiB per GPU"]
    found = [_speed_reason(side, best)]
    if best.plan is not None and side.plan.estimate.band.step_pct > best.plan.estimate.band.step_pct:
        found.append(f"its estimate is less certain: ±{float(side.plan.estimate.band.step_pct):.0f} %")
    if _never_run(side):
        found.append(NEVER_RUN)
    if side.lost_contract:
        found.append(f"its config loses {_some(side.lost_contract)}, which the result depends on")
    ignored = [one.field for one in side.cannot]
    if ignored:
        found.append(f"does not execute {_some(ignored)}")
    if side.name in CONFIGS:
        needed = frameworks.weights_to_prepare(side.plan.recipe, side.plan.case.model, side.name)
        found += [needed] if needed else []
    if CONFIGS.get(side.name) in ONLY_SHARDING:
        found.append("its config covers sharding and precision: the training program is yours")
    return found


def _never_run(side: Side) -> bool:
    """Return whether a side of a comparison of engines is ours on several GPUs, which it never had."""
    return side.plan is not None and side.name == ENGINES[0] and int(side.plan.case.world) > 1


def _differ(sides: Sequence[Side]) -> bool:
    """Return whether targets train different models; a framework's file may name the same model differently."""
    return len({one.model for one in sides}) > 1 and len({one.shape for one in sides}) > 1


def _speed_reason(side: Side, best: Side) -> str:
    longer = best.rate / side.rate - 1
    if side is best:
        return "runs and fits, and none is faster beyond the uncertainty"
    if side.plan is not None and best.plan is not None and _differ([side, best]):
        return f"trains {side.model}, another model than {best.name}: not comparable"
    near = _within_uncertainty(side, best)
    if round(abs(longer) * 100) == 0:
        return f"is as fast as {best.name}"
    text = f"takes {abs(longer) * 100:.0f} % {'longer' if longer > 0 else 'less time'} than {best.name}"
    return f"{text}, within the uncertainty" if near else text


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _differ_in_gpus(found: Comparison) -> bool:
    return len({int(one.plan.case.world) for one in found.sides if one.plan is not None}) > 1


def _rate(side: Side, found: Comparison) -> str:
    """Return the speed of a GPU; of all GPUs where the sides have different numbers of them."""
    speed = 0.0 if side.plan is None else float(side.plan.estimate.tokens_per_s_per_gpu)
    if side.plan is None or not _differ_in_gpus(found):
        return f"{speed:,.0f} tokens/s/GPU"
    return f"{side.rate:,.0f} tokens/s on {plural(int(side.plan.case.world), 'GPU')}, {speed:,.0f} each"


def _decides(found: Comparison, best: Side, near: Sequence[Side]) -> str:
    """Return what prefers the first of several sides that are about as fast; empty if nothing does."""
    if best.name == found.own:
        return "the file is for it, so nothing has to be converted"
    loses_less = all(len(best.lost_contract) < len(one.lost_contract) for one in near)
    return f"{best.name}'s config loses less of what the result depends on" if near and loses_less else ""


def _other_criteria(found: Comparison, sides: Sequence[Side]) -> list[str]:
    """Return what a choice between equally fast sides depends on."""
    if found.of == "targets":
        plans = [one.plan.recipe for one in sides if one.plan is not None]
        fields = [one.field for one in differences(plans)]
        return [f"the fields that differ ({_some(fields)})" if fields else "nothing, no field differs"]
    lost = [f"{one.name}'s config loses {_some(one.lost_contract)}" for one in sides if one.lost_contract]
    unproven = [f"{one.name} {NEVER_RUN}" for one in sides if _never_run(one)]
    return [*lost, *unproven, "the engine that you already run needs no new setup"]


def answer_of(found: Comparison) -> str:
    """Return which engine or target to use, and why, in one sentence or two."""
    best, *others = found.ranked
    if not best.ok or best.plan is None:
        return f"None of the {found.of} can run this: {reasons_for(best, best)[0]} ({best.name})."
    able = [one for one in found.ranked if one.ok]
    if _differ(able):
        named = ", ".join(f"{one.name} trains {one.model}" for one in able)
        return f"None is chosen, as they train different models: {named}; compare targets of one model."
    near = [one for one in others if one.ok and _about_as_fast(one, best)]
    slower = [one for one in others if one.ok and one not in near]
    decides = _decides(found, best, near)
    text = f"Use {best.name}: {_rate(best, found)}"
    if slower and not near:
        text += f", {best.rate / slower[0].rate - 1:.0%} faster than {slower[0].name}"
        text += f" ({_rate(slower[0], found)})" if _differ_in_gpus(found) else ""
        text += " by the estimates, within their uncertainty" if _within_uncertainty(best, slower[0]) else ""
    text += f", and its config loses {_some(best.lost_contract)}." if best.lost_contract else "."
    if near and decides:
        text += f" About as fast, within the uncertainty: {', '.join(one.name for one in near)}; {decides}."
    elif near:
        text = (
            f"Equal within the uncertainty: {', '.join(f'{one.name} ({_rate(one, found)})' for one in (best, *near))}. "
        )
        text += f"What else decides: {'; '.join(_other_criteria(found, (best, *near)))}."
    if _never_run(best) and (decides or not near):
        text += f" {best.name} {NEVER_RUN}."
    no = [one.name for one in others if not one.ok]
    return text + (f" Cannot run it: {', '.join(no)}." if no else "")

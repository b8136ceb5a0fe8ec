"""Examining a run: every diagnosis in turn, and the figures beside their estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import NamedTuple

from meshwright.doctor import faults, liveness, loss, memory, speed, throughput
from meshwright.doctor.finding import Checkup, Figure, Finding
from meshwright.doctor.run import ENGINE, Run
from meshwright.doctor.run_stats import View, deviation, middle
from meshwright.doctor.thresholds import limit
from meshwright.recipes.case import Case
from meshwright.rules import SEVERITIES


class Diagnosis(NamedTuple):
    """One thing that is looked for, and what a log must tell for that."""

    id: str
    find: Callable[[View], Iterator[Finding]]
    lacks: Callable[[View], str] = lambda view: ""  # what is missing to look for it; empty where nothing is


def _needs_steps(view: View) -> str:
    return "" if view.enough else f"at least {limit('enough_steps'):.0f} lines of steps after the first"


def _needs_trend(view: View) -> str:
    return "" if view.enough_for_trends else f"at least {limit('enough_for_trends'):.0f} lines of steps"


def _needs_estimate(view: View) -> str:
    if not view.run.told.on_gpu:
        return "a run on GPUs: the estimate is of those"
    if view.estimate is None:
        return "the recipe and the GPUs: --recipe NAME --gpus 8xH100"
    return _needs_steps(view) if view.tokens_per_s is not None else "step times or tokens per second in the log"


def _needs_part(name: str, hint: str) -> Callable[[View], str]:
    def missing(view: View) -> str:
        return _needs_steps(view) if view.part_s(name) is not None else hint

    return missing


def _needs_network(view: View) -> str:
    if view.baseline is not None:
        return _needs_steps(view)
    hint = "times of collectives (Megatron: --timing-log-level 1), or a run on fewer nodes: --baseline DIR"
    return _needs_part("collectives", hint)(view)


def _needs_pipeline(view: View) -> str:
    if view.case is not None and view.case.pp == 1:
        return "a pipeline: this run has none"
    return "" if view.estimate is not None else _needs_estimate(view)


def _needs_ranks(view: View) -> str:
    told = any(step.ranks_s for step in view.steady)
    return "" if told else "times of the fastest and slowest rank (Megatron: --timing-log-level 2)"


def _needs_memory(view: View) -> str:
    told = sum(step.memory_gib is not None for step in view.steady)
    return "" if told >= limit("enough_for_trends") else "the memory of every step"


def _needs_loss(view: View) -> str:
    told = sum(step.loss is not None for step in view.run.steps)
    return "" if told >= limit("enough_for_trends") else f"the loss of {limit('enough_for_trends'):.0f} lines of steps"


def _needs_learning(view: View) -> str:
    return "data that can be learnt: this run makes it up" if view.data_is_made_up else _needs_loss(view)


def _needs_scale(view: View) -> str:
    told = [step.loss_scale for step in view.run.steps if step.loss_scale is not None]
    return "" if told and max(told) > 1 else "a loss scale: fp16 alone has one"


DIAGNOSES = (
    Diagnosis("memory.out-of-memory", memory.out_of_memory),
    Diagnosis("run.failed", liveness.failed),
    Diagnosis("loss.not-a-number", loss.not_a_number),
    Diagnosis("loss.diverging", loss.diverging, _needs_loss),
    Diagnosis("loss.scale-collapsed", loss.loss_scale, _needs_scale),
    Diagnosis("loss.spikes", loss.spikes, _needs_loss),
    Diagnosis("loss.flat", loss.flat, _needs_learning),
    Diagnosis("loss.growing-gradients", loss.growing_gradients, _needs_loss),
    Diagnosis("speed.slow-data", speed.slow_data, _needs_part("data", "how long steps wait for data")),
    Diagnosis("speed.slow-network", speed.slow_network, _needs_network),
    Diagnosis("speed.low-mfu", speed.low_mfu, _needs_estimate),
    Diagnosis("speed.bubbles", speed.bubbles, _needs_pipeline),
    Diagnosis("speed.uneven-steps", throughput.uneven_steps, _needs_trend),
    Diagnosis("speed.slowing-down", throughput.slowing_down, _needs_trend),
    Diagnosis("speed.stragglers", throughput.stragglers, _needs_ranks),
    Diagnosis("memory.growing", memory.growing_memory, _needs_memory),
    Diagnosis("memory.only-just-fits", memory.allocator_retries),
    Diagnosis("run.checkpoint-stalls", liveness.checkpoint_stalls),
    Diagnosis("run.restarts", liveness.restarts),
)


def meanings() -> dict[str, str]:
    """What every finding means, by its id."""
    found = {one.id: (one.find.__doc__ or "").partition("\n")[0] for one in DIAGNOSES}
    ends = {f"run.failed-{one.name.replace('_', '-')}": one.meaning for one in faults.SIGNS if not one.told_elsewhere}
    return {**found, "speed.periodic-steps": found["speed.uneven-steps"], **ends}


def examine(run: Run, case: Case | None = None, baseline: View | None = None, notes: tuple[str, ...] = ()) -> Checkup:
    """Everything that is wrong with a run, what is worst first, and its figures beside the estimate's."""
    view = View(run, case, baseline)
    findings = [finding for one in DIAGNOSES for finding in view.finds(one.find)]
    findings.sort(key=lambda one: SEVERITIES.index(one.severity))
    missing = {one.id: lacks for one in DIAGNOSES if (lacks := one.lacks(view))}
    told, estimate = run.told, view.estimate
    return Checkup(
        kind=run.kind,
        path=run.path,
        file=run.file,
        recipe=(case.recipe.name if case is not None else told.recipe_name) or None,
        model=(case.model.name if case is not None else told.model) or None,
        gpus=(str(case.cluster) if case is not None else told.gpus) or None,
        engine=(case.engine if case is not None else ENGINE.get(run.kind)),
        steps=len(run.steps),
        last_step=run.last_step,
        total_steps=told.total_steps,
        starts=max(1, len(run.attempts)),
        figures=tuple(figures(view)),
        mfu_convention=estimate.mfu_convention if estimate is not None else told.mfu_convention,
        findings=tuple(findings),
        looked_for=tuple(one.id for one in DIAGNOSES if one.id not in missing),
        not_examined={key: value for key, value in missing.items() if not any(f.id == key for f in findings)},
        notes=(*run.notes, *notes, *_impossible(view)),
    )


def _impossible(view: View) -> Iterator[str]:
    if view.estimate is not None and (view.mfu or 0.0) > 1:
        yield f"an MFU of {view.mfu:.0%} cannot be: another model, batch or GPU ran than the estimate is of"


def figures(view: View) -> Iterator[Figure]:
    """The figures of a run that people ask for, with the estimate's where there is one."""
    estimate = view.estimate
    if view.step_s is not None:
        yield Figure("step time", "s", view.step_s, view.estimated_step_s)
    if view.tokens_per_s is not None:
        yield Figure(
            "tokens/s/GPU" if view.run.told.on_gpu else "tokens/s/rank",
            "",
            view.tokens_per_s,
            float(estimate.tokens_per_s_per_gpu) if estimate is not None else None,
        )
    if view.mfu is not None:
        yield Figure("MFU", "", view.mfu, float(estimate.mfu) if estimate is not None else None)
    if view.peak_gib is not None:
        yield Figure("peak memory", "GiB", view.peak_gib, view.estimated_peak_gib)
    for name in ("data", "forward_backward", "optimizer", "collectives", "other"):
        share = view.part_share(name)
        if share is not None:
            yield Figure(f"{speed.NAMES.get(name, name)}, share of a step", "", share)
    paces = [step.pace for step in view.steady if step.pace]
    if view.enough and view.pace:
        yield Figure("spread of step times", "", deviation([one / view.pace for one in paces]))
    first = next((step.loss for step in view.run.steps if step.loss is not None and isfinite(step.loss)), None)
    last = middle(step.loss for step in view.run.steps[-5:])
    if first is not None and last is not None:
        yield Figure("first loss", "", first)
        yield Figure("last loss", "", last)

"""Questions about a training: which recipe, which layout, how many GPUs, how much memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright import clusters, costs, file_access, planner
from meshwright.api.resolve import is_recipe, model_and_goal, model_named, recipe_from, refuse_unknown
from meshwright.errors import InputError
from meshwright.parsing import one_of, sequence_length, token_budget
from meshwright.planner import Plan, Question, Ranking, Sizing
from meshwright.recipes import types

MOST_PLANS = 100


def recommend(
    model: str,
    gpus: str | int,
    goal: str,
    *,
    seq: int | str | None = None,
    engine: str = "meshwright",
    benchmark: bool = False,
    calibration: str | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """The plan for a model on a cluster: which recipe, which layout, does it fit, how fast, what will bite."""
    return planner.recommend(
        question_of(model, goal, seq, engine, benchmark, gpus=gpus, calibration=calibration), overrides
    )


def plan(
    target: str,
    gpus: str | int,
    goal: str | None = None,
    *,
    seq: int | str | None = None,
    engine: str = "meshwright",
    top: int = 5,
    calibration: str | None = None,
    overrides: Sequence[str] = (),
    everything: bool = False,
) -> Ranking:
    """The fastest plans of the whole legal space for a model or recipe, and why others were dropped.

    `everything` also lists all layouts that fit, with their memory and step time.
    """
    if not 1 <= top <= MOST_PLANS:
        raise InputError(f"ask for 1 to {MOST_PLANS} plans", field="top", value=top)
    question = question_of(*model_and_goal(target, goal), seq, engine, gpus=gpus, calibration=calibration)
    return planner.rank_layouts(question, overrides, top, everything)


def size(
    model: str,
    goal: str,
    gpu: str,
    *,
    seq: int | str | None = None,
    engine: str = "meshwright",
    tokens: float | str | None = None,
    price: float | None = None,
    calibration: str | None = None,
    overrides: Sequence[str] = (),
) -> Sizing:
    """GPU counts that fit a training, with speed, goodput, and days and cost for a token budget."""
    if not clusters.is_known(gpu) and gpu[:1].isdigit():
        kind = gpu.split("x")[-1]
        raise InputError(
            "give the GPU type alone; the count is what is asked", field="gpu", value=gpu, fix=(f"--gpu {kind}",)
        )
    question = question_of(model, goal, seq, engine, gpus=f"1x{clusters.gpu(gpu).name}", calibration=calibration)
    if price is not None and not (tokens is not None and 0 <= price < 1e6):
        reason = "a price is a number of at least 0" if tokens is not None else "a price needs a token budget"
        raise InputError(reason, field="price", value=price, fix=("--tokens 1T --price 2.5",))
    return planner.size(question, overrides, token_budget(tokens), price)


def estimate(
    target: str,
    *,
    gpus: str | int | None = None,
    goal: str | None = None,
    seq: int | str | None = None,
    engine: str = "meshwright",
    calibration: str | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """The estimate of exactly this layout: the recipe's own with overrides, nothing searched."""
    if is_recipe(target):
        asked = recipe_from(target)
        model, found_goal = model_and_goal(target, goal)
        question = question_of(model, found_goal, seq, engine, gpus=gpus or asked.cluster, calibration=calibration)
        return planner.plan_fixed(question, asked, overrides)
    refuse_unknown(target)
    if gpus is None:
        raise InputError("a model's estimate needs the GPUs", field="gpus", fix=("--gpus 8xH100",))
    question = question_of(target, goal or "pretrain", seq, engine, gpus=gpus, calibration=calibration)
    return planner.plan_fixed(question, None, overrides)


def question_of(
    model: str,
    goal: str,
    seq: int | str | None = None,
    engine: str = "meshwright",
    benchmark: bool = False,
    *,
    gpus: str | int,
    calibration: str | None = None,
) -> Question:
    """A question in words as the values the planner works with."""
    spec, reference = model_named(model)
    return Question(
        model=spec,
        model_ref=reference,
        cluster=clusters.cluster(str(gpus)),
        cluster_ref=str(file_access.resolved(str(gpus))) if str(gpus).endswith(".toml") else "",
        goal=one_of("goal", goal, types.GOALS),
        seq_length=sequence_length(seq),
        engine=one_of("engine", engine, types.ENGINES),
        benchmark=benchmark,
        calibration=None if calibration is None else _calibration(calibration),
    )


def _calibration(path: str) -> Any:
    from meshwright.costs import calibrate

    return calibrate.load(path)


def timeline(plan: Plan) -> costs.Timeline:
    """A step of a plan's pipeline over time: which micro batch every rank works on and when."""
    if not plan.exists:
        raise InputError("cannot be built: see the findings", field="layout", value=plan.recipe.layout.pp_schedule)
    return costs.timeline(plan.case)


def find_goal(text: str) -> str:
    """One of the three goals."""
    return str(one_of("goal", text, types.GOALS))

"""The list of models: all of them, or those that fit the GPUs one has, with the recommended plan of each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, planner
from meshwright.api import requests
from meshwright.api.catalogues import MODEL_COLUMNS, ModelPart, architecture, goals_of, model_part, models_named
from meshwright.api.inputs import validated
from meshwright.api.planning import recommend
from meshwright.api.questions import named_job, question_for
from meshwright.api.responses import Part, Response, copied
from meshwright.api.verb_function import verb
from meshwright.display import Entry, Listing
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.planner import Plan
from meshwright.stages import stage


class ModelOnGpus(Entry, msgspec.Struct, frozen=True):
    """A model with its plan on the GPUs asked for, or why there is none."""

    model: ModelSpec
    plan: Plan | None
    reason: str
    command: str  # that shows the plan
    fits_without_offload: bool = False  # if the plan offloads, which may only be faster


PLANNED_COLUMNS: Mapping[str, Callable[[ModelOnGpus], object]] = {
    "model": lambda one: one.model.name,
    "total B": lambda one: f"{one.model.params.total / 1e9:.3f}",
    "fits": lambda one: one.plan is not None and one.plan.ok,
    "GiB per GPU": lambda one: "" if one.plan is None else f"{float(one.plan.estimate.memory.total):.1f}",
    "host GiB": lambda one: "" if one.plan is None or not _host_gib(one.plan) else f"{_host_gib(one.plan):.0f}",
    "reason": lambda one: one.reason,
}


@verb(requests.Models, name="list_models")
def model_catalogue(request: requests.Models) -> list[ModelSpec] | list[ModelOnGpus]:
    """Return models whose name contains the query, or the model of a config.json; with GPUs and a goal, their plans."""
    if request.gpus is not None:
        return _on_gpus(request)
    for name in ("goal", "seq"):
        if getattr(request, name) is not None:
            fix = ("--gpus 1xRTX4090",)
            raise InputError(
                "needs GPUs: models are listed by what fits", field=name, value=getattr(request, name), fix=fix
            )
    return Listing(models_named(request.query), MODEL_COLUMNS)


def _on_gpus(request: requests.Models) -> list[ModelOnGpus]:
    """Return the plan of every model of the query for the goal, the largest on top of those that fit.

    Models that fit only in host memory, which is much slower, follow those that fit on the GPUs.
    """
    if request.goal is None:
        raise InputError("needed to see what fits", field="goal", fix=("--goal lora", "--goal sft", "--goal pretrain"))
    gpus = str(request.gpus)
    clusters.cluster(gpus)  # refused once, not for every model
    named = models_named(request.query)
    found = []
    for place, model in enumerate(named):
        stage(f"models: {model.name} ({place} of {len(named)} planned)")
        found.append(_planned(model, gpus, request.goal, request.seq))
    ordered = sorted(found, key=lambda one: (_fit_of(one), -one.model.params.total))
    return Listing(ordered, PLANNED_COLUMNS)


def _fit_of(one: ModelOnGpus) -> int:
    """Return the rank of how a model fits: on the GPUs, only with host memory, or not at all."""
    if one.plan is None or not one.plan.ok:
        return 2
    return 0 if one.fits_without_offload or one.plan.recipe.layout.offload == "none" else 1


def _host_gib(plan: Plan) -> float:
    """Return the host memory per GPU that a plan's offload needs."""
    return float(plan.estimate.memory.host)


def _planned(model: ModelSpec, gpus: str, goal: str, seq: str | int | None) -> ModelOnGpus:
    words = ["meshwright", "recommend", model.name, "--gpus", gpus, "--goal", goal]
    command = shlex.join([*words, *(() if seq is None else ("--seq", str(seq)))])
    try:
        asked = validated(requests.Recommend(model.name, gpus=gpus, goal=goal, seq=seq))
        if named_job(asked, model.name, None) is not None:  # a recipe of the same name
            return ModelOnGpus(model, recommend(model.name, gpus, goal, seq=seq), "", command)
        question = question_for(asked, model.name, str(asked.goal), gpus)
        plan = planner.plan_without_advice(question, asked.overrides)
    except InputError as error:
        return ModelOnGpus(model, None, error.reason, command)
    errors = [finding.message for finding in plan.findings if finding.severity == "error"]
    without = (
        plan.ok and plan.recipe.layout.offload != "none" and planner.fits_without_offload(question, asked.overrides)
    )
    return ModelOnGpus(model, plan, errors[0] if errors else "", command, without)


class ModelPlanPart(Part, frozen=True, kw_only=True):
    """What a model takes on the GPUs asked for; without figures if no recipe trains it for the goal."""

    fits: bool
    total_gib: float | None
    step_s: float | None
    tokens_per_s: float | None
    seq_length: int | None
    recipe: str | None
    offload: str | None  # what is moved to host memory, as layout.offload; null without a plan
    host_gib: float | None  # host memory per GPU that it needs
    reason: str | None
    command: str


class ListedModel(ModelPart, frozen=True, kw_only=True):
    """A model of a list; `plan` if GPUs were named."""

    architecture: str
    recipes: Sequence[str]  # goals with a shipped recipe; others start from the recipe of the closest model
    plan: ModelPlanPart | UnsetType = UNSET


class ModelsResponse(Response, frozen=True, kw_only=True):
    """Models."""

    models: Sequence[ListedModel]


def models_response(
    found: Sequence[ModelSpec] | Sequence[ModelOnGpus], request: requests.Models | None = None
) -> ModelsResponse:
    """Return the response of models."""
    return ModelsResponse(models=[_listed(one) for one in found])


def _listed(one: ModelSpec | ModelOnGpus) -> ListedModel:
    model, plan = (one, UNSET) if isinstance(one, ModelSpec) else (one.model, _model_plan(one))
    more = {"architecture": architecture(model), "recipes": goals_of(model.name), "plan": plan}
    return copied(ListedModel, model_part(model), **more)


def _model_plan(one: ModelOnGpus) -> ModelPlanPart:
    plan = one.plan
    return ModelPlanPart(
        fits=plan is not None and plan.ok,
        total_gib=None if plan is None else float(plan.estimate.memory.total),
        step_s=None if plan is None else float(plan.estimate.step_s),
        tokens_per_s=None if plan is None else float(plan.estimate.tokens_per_s_per_gpu) * plan.case.cluster.world,
        seq_length=None if plan is None else plan.recipe.data.seq_length,
        recipe=None if plan is None else plan.base.name,
        offload=None if plan is None else plan.recipe.layout.offload,
        host_gib=None if plan is None else _host_gib(plan),
        reason=one.reason or None,
        command=one.command,
    )

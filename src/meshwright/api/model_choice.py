"""Which models fit the GPUs one has: the recommended plan of each."""

from __future__ import annotations

import shlex

from meshwright import clusters
from meshwright.api import requests
from meshwright.api.catalogues import ModelOnGpus, models_named
from meshwright.api.planning import recommend
from meshwright.errors import InputError
from meshwright.models import ModelSpec


def on_gpus(request: requests.Models) -> list[ModelOnGpus]:
    """Return the plan of every model of the query for the goal: those that fit first, the largest of them on top."""
    if request.goal is None:
        raise InputError("needed to see what fits", field="goal", fix=("--goal lora", "--goal sft", "--goal pretrain"))
    gpus = str(request.gpus)
    clusters.cluster(gpus)  # refused once, not for every model
    found = [_planned(model, gpus, request.goal, request.seq) for model in models_named(request.query)]
    return sorted(found, key=lambda one: (one.plan is None or not one.plan.ok, -one.model.params.total))


def _planned(model: ModelSpec, gpus: str, goal: str, seq: str | int | None) -> ModelOnGpus:
    words = ["meshwright", "recommend", model.name, "--gpus", gpus, "--goal", goal]
    command = shlex.join([*words, *(() if seq is None else ("--seq", str(seq)))])
    try:
        plan = recommend(model.name, gpus, goal, seq=seq)
    except InputError as error:
        return ModelOnGpus(model, None, error.reason, command)
    errors = [finding.message for finding in plan.findings if finding.severity == "error"]
    return ModelOnGpus(model, plan, errors[0] if errors else "", command)

"""Requests about a model, a recipe or a file as the questions that the planner answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright import clusters, frameworks, models
from meshwright.api import requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.dataset_length import with_data_beside
from meshwright.api.inputs import command_words, fields_of
from meshwright.api.recipe_cluster import cluster_for
from meshwright.api.resolve import assumed_in, is_recipe, referenced_model, require_known, typed_model
from meshwright.api.targets import Job, job_for, stated_goal, stated_gpus
from meshwright.errors import InputError
from meshwright.parsing import sequence_length
from meshwright.planner import Question
from meshwright.recipes.types import ENGINES, Recipe

Asked = requests.Recommend | requests.Plan | requests.Estimate
"""Requests about a model, a recipe or a file."""


def named_job(request: Asked, target: str | Recipe, model: str | None) -> Job | None:
    """Return the recipe or file that a request names; None for a model."""
    if isinstance(target, str) and not is_recipe(target):
        for field, value in (("framework", request.framework), ("model", model)):
            if value is not None:
                reason = "applies to recipes and files, and the target is neither"
                meant = (f"--engine {value}",) if field == "framework" and value != ENGINES[0] else ()
                raise InputError(reason, field=field, value=value, fix=(*meant, f"remove --{field}"))
        return None
    overrides = [*request.overrides, *_seq_override(request)]
    options = {"framework": request.framework, "model": model}
    try:
        job = job_for(target, request.goal, request.gpus, overrides, request.engine, **options)
    except frameworks.OtherTrainerError as error:
        raise _with_options(error, request, overrides) from None
    is_typed = any(one.partition("=")[0].strip() == "data.dataset" for one in overrides)
    if job.imported is None or job.content is None or is_typed:
        return job
    return msgspec.structs.replace(job, recipe=with_data_beside(job.recipe, job.content.folder))


OF_COMMAND = ("model", "gpus", "goal", "framework", "train_model", "name", "notes")
"""Fields of a request that the command for another trainer's file states itself."""


def _with_options(
    error: frameworks.OtherTrainerError, request: Asked, overrides: Sequence[str]
) -> frameworks.OtherTrainerError:
    """Return the error with a command that has the user's options too, which replace the file's settings."""
    names = [field.name for field in fields_of(requests.Recommend) if field.name not in OF_COMMAND]
    values = {name: getattr(request, name) for name in names if getattr(request, name, None) is not None}
    fields = {key for one in overrides if (key := recipe_key(one))}
    for field in fields_of(requests.Recommend):
        if field.input.override and values.get(field.name):  # an override too
            fields.add(field.input.override)
            values["overrides"] = [one for one in values["overrides"] if recipe_key(one) != field.input.override]
    return error.with_options(command_words(requests.Recommend, values), fields)


def _seq_override(request: Asked) -> tuple[str, ...]:
    length = sequence_length(request.seq)
    return () if length is None else (f"data.seq_length={length}",)


def job_question(request: Asked, job: Job) -> Question:
    """Return the question about a recipe or file: on its own cluster and engine unless others are requested."""
    gpus = cluster_for(job.recipe, request.gpus or None, job.content)
    question = question_for(request, job.recipe.model, job.recipe.goal, gpus, job=job)
    typed = question.assumed if request.gpus is not None else ()  # the recipe's own cluster was not typed
    return msgspec.structs.replace(question, assumed=(*typed, *job.assumed(question.engine)))


def model_question(request: requests.Estimate) -> Question:
    """Return the question about a model: a user's own has a default goal and default GPUs."""
    target, gpus = str(request.target), request.gpus
    require_known(target)
    model = typed_model(target)
    if gpus is None and not models.is_path(model.strip()):
        raise InputError("required to estimate a model without a recipe", field="gpus", fix=("--gpus 8xH100",))
    goal = request.goal or stated_goal(model)
    return question_for(request, model, goal, gpus or stated_gpus(model, goal))


def question_for(
    request: requests.Recommend | requests.Plan | requests.Size | requests.Estimate,
    model: str,
    goal: str,
    gpus: str | int,
    benchmark: bool = False,
    job: Job | None = None,
) -> Question:
    """Return a request as the values that the planner works with."""
    spec, reference = referenced_model(model) if job is None else (job.model, job.recipe.model)
    question = Question(
        model=spec,
        model_ref=reference,
        cluster=clusters.cluster(str(gpus)),
        cluster_ref=clusters.cluster_reference(str(gpus)),
        goal=goal,  # type: ignore[arg-type]  # one of its choices, as validated
        seq_length=sequence_length(request.seq),
        engine=request.engine or (ENGINES[0] if job is None else job.engine),  # type: ignore[arg-type]  # as validated
        recipe_words=() if job is None or not isinstance(_target(request), str) else job.words,
        options=_repeated_options(request),
        stated=() if job is None else job.stated,
        file_error="" if job is None else job.file_correction,
        recipe_engine=ENGINES[0] if job is None else job.engine,  # type: ignore[arg-type]  # as validated
        benchmark=benchmark,
        mtbf_hours=request.mtbf_hours,
        assumed=assumed_in(gpus),
    )
    return msgspec.structs.replace(question, calibration=_calibration_for(request, question, job))


REPEATED = ("calibration", "like", "tokens", "price", "currency", "mtbf_hours", "days")
"""Options of the user that change the figures of an answer and are no part of its training."""


def _target(request: Asked | requests.Size) -> str | Recipe:
    return request.model if isinstance(request, requests.Recommend | requests.Size) else request.target


def _repeated_options(request: Asked | requests.Size) -> tuple[str, ...]:
    """Return the user's options that every printed command repeats."""
    given = {name: value for name in REPEATED if (value := getattr(request, name)) is not None}
    return tuple(command_words(type(request), given))


def _calibration_for(
    request: requests.Recommend | requests.Plan | requests.Size | requests.Estimate, question: Question, job: Job | None
) -> Any:
    """Return the calibration of the user's profile or of the run that the estimate should follow; None without one."""
    if request.like is None:
        return load_calibration(request.calibration)
    if request.calibration is not None:
        fix = ("remove --calibration", "remove --like")
        raise InputError("--calibration sets the speed too", field="like", value=request.like, fix=fix)
    from meshwright.api.like import calibration_like

    return calibration_like(request.like, question, job)


def load_calibration(path: str | None) -> Any:
    """Return the shipped calibration with the user's profile; None without one."""
    if path is None:
        return None
    from meshwright.costs import calibrate

    return calibrate.load(path)

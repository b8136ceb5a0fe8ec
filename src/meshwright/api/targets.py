"""What a command works on: a recipe by name or file, or the recommended recipe for a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright import clusters, file_access, models, planner
from meshwright.api.resolve import is_recipe, recipe_from, referenced_model, require_known, typed_model
from meshwright.errors import InputError
from meshwright.notes import note
from meshwright.parsing import sequence_length
from meshwright.planner import Plan, Question
from meshwright.recipes import index
from meshwright.recipes.types import ENGINES, Recipe

GOAL_FIX = ("--goal pretrain", "--goal sft", "--goal peft")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def recipe_for(
    target: str | Recipe,
    goal: str | None,
    gpus: str | int | None = None,
    overrides: Sequence[str] = (),
    engine: str = ENGINES[0],
) -> Recipe:
    """Return the recipe of a name or file; for a model, the recommended one on these GPUs."""
    if isinstance(target, Recipe):
        return target
    if is_model(target, goal):
        return plan_for(target, goal, gpus, overrides, engine).recipe
    found = recipe_from(target)
    if goal is not None and goal != found.goal:
        reason = f"{target} is a recipe for {found.goal}"
        raise InputError(reason, field="goal", value=goal, fix=(f"--goal {found.goal}",))
    return found


def is_model(target: str, goal: str | None = None, content_decides: bool = False) -> bool:
    """Return whether a target is a model: a path, or with a goal a catalogue name; raise for one without a goal.

    With content_decides, a file is a model only if it is a model's config: it may be another framework's.
    """
    if is_recipe(target):
        return False
    path = target.strip()
    if content_decides and not file_access.is_dir(os.path.expanduser(path)) and goal is None:
        return models.is_config(path)
    if models.is_path(target.strip()) or goal is not None:
        require_known(target)
        return True
    try:
        name = models.catalogue_name(target)
    except InputError:
        return False
    raise InputError(f"{name} is a model: add a goal, or name a recipe", field="recipe", value=target, fix=GOAL_FIX)


def plan_for(
    target: str, goal: str | None, gpus: str | int | None, overrides: Sequence[str], engine: str = ENGINES[0]
) -> Plan:
    """Return the recommended plan of a model, with a note that says what was assumed."""
    reference = typed_model(target)
    spec, model = referenced_model(reference)
    chosen, why = (goal, "") if goal is not None else default_goal(reference)
    cluster, assumed = (str(gpus), "") if gpus is not None else default_gpus(spec, chosen)
    question = Question(
        model=spec,
        model_ref=model,
        cluster=clusters.cluster(cluster),
        cluster_ref=str(file_access.resolved(cluster)) if cluster.endswith(".toml") else "",
        goal=chosen,  # type: ignore[arg-type]  # one of its choices, as validated
        seq_length=sequence_length(None),
        engine=engine,  # type: ignore[arg-type]  # as above
    )
    found = planner.recommend(question, overrides)
    recipe = own_recipe(found)
    note(f"{target}: goal {chosen}{why}, on {question.cluster}{assumed}, other settings from {found.base.name}")
    return msgspec.structs.replace(found, recipe=recipe)


def own_recipe(plan: Plan) -> Recipe:
    """Return the recipe of a plan, named after a user's model."""
    model = Path(plan.question.model_ref)
    stem = model.parent.name if model.name == "config.json" else model.stem
    return msgspec.structs.replace(plan.recipe, name=f"{stem or 'model'}_{plan.question.goal}")


def default_goal(reference: str) -> tuple[str, str]:
    """Return the goal for a model without one, and why: a folder with weights is fine-tuned."""
    if not models.is_path(reference.strip()):
        return "pretrain", " (the default)"
    path = Path(os.path.expanduser(reference.strip()))
    folder = path if path.is_dir() else path.parent
    if path.name == "config.json" or path.is_dir():
        weights = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
        if weights:
            return "sft", " (the default with weights; --goal pretrain or peft)"
    return "pretrain", " (the default without weights; --goal sft or peft)"


def default_gpus(spec: models.ModelSpec, goal: Any) -> tuple[str, str]:
    """Return the cluster for a model without one, and why: this machine's GPUs, or those of the closest recipe."""
    try:
        return str(clusters.cluster("auto")), " (this machine; --gpus CLUSTER for another)"
    except InputError:
        near = index.closest(spec, goal).name
        return index.load(near).cluster, f" (as {near}; --gpus CLUSTER for another)"


def stated_goal(reference: str) -> str:
    """Return the goal for a model without one; for a user's model, a note says it."""
    goal, why = default_goal(reference)
    if models.is_path(reference.strip()):
        note(f"{reference}: goal {goal}{why}")
    return goal


def stated_gpus(reference: str, goal: str) -> str:
    """Return the cluster for a model without one, with a note that says it."""
    gpus, why = default_gpus(models.find(reference), goal)
    note(f"{reference}: on {gpus}{why}")
    return gpus


def ranks_cluster(world: int, local: int) -> str:
    """Return the ranks of a run as a cluster of this machine's GPUs, or of the default type."""
    gpu = clusters.DEFAULT_GPU
    with suppress(InputError):  # no GPU here: the ranks run on CPUs
        gpu = clusters.cluster("auto").gpu.name
    return f"{world // local}x{local}x{gpu}"

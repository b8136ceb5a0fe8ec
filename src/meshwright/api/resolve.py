"""What people name: recipes, files and models; and writing what they asked to keep."""

from __future__ import annotations

from pathlib import Path

from meshwright import file_access, models
from meshwright.errors import InputError, OutputError, closest, unknown
from meshwright.models import ModelSpec
from meshwright.recipes import files, index
from meshwright.recipes.types import Recipe


def model_named(text: str) -> tuple[ModelSpec, str]:
    """The model and how a recipe refers to it."""
    spec = models.find(text)
    return spec, spec.name if spec.name in models.names() else str(file_access.resolved(text))


def model_and_goal(target: str, goal: str | None) -> tuple[str, str]:
    """The model and goal that a recipe name stands for, or the model itself and the goal asked for."""
    if is_recipe(target):
        found = recipe_from(target)
        if goal is not None and goal != found.goal:
            raise InputError(
                f"{target} is a recipe for {found.goal}", field="goal", value=goal, fix=(f"--goal {found.goal}",)
            )
        return found.model, found.goal
    if goal is None:
        raise InputError("a model needs a goal", field="goal", fix=("--goal pretrain", "--goal sft", "--goal peft"))
    return target, goal


def refuse_unknown(target: str) -> None:
    """A name that is neither a model nor a recipe is told with what it may have been of both."""
    try:
        models.find(target)
    except InputError:
        near = closest(target, index.names(), 2)
        if near and "_" in target:
            raise unknown("model or recipe", target, [*near, *closest(target, models.names(), 1)]) from None
        raise


def is_recipe(name: str) -> bool:
    return files.is_file(name) or index.is_known(name)


def recipe_from(name: str) -> Recipe:
    return files.from_file(name) if files.is_file(name) else index.load(name)


def write_text(path: str, text: str, field: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", field=field, value=path) from error

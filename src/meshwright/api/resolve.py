"""Resolve the names of recipes, models and files, and write files."""

from __future__ import annotations

from pathlib import Path

from meshwright import file_access, models
from meshwright.errors import InputError, OutputError, closest, unknown
from meshwright.models import ModelSpec
from meshwright.recipes import files, index
from meshwright.recipes.types import Recipe


def model_named(text: str) -> tuple[ModelSpec, str]:
    """Return a model and how a recipe refers to it."""
    spec = models.find(text)
    return spec, spec.name if spec.name in models.names() else str(file_access.resolved(text))


def model_and_goal(target: str, goal: str | None) -> tuple[str, str]:
    """Return model and goal of a recipe, or the model itself and the requested goal."""
    if is_recipe(target):
        found = recipe_from(target)
        if goal is not None and goal != found.goal:
            reason = f"{target} is a recipe for {found.goal}"
            raise InputError(reason, field="goal", value=goal, fix=(f"--goal {found.goal}",))
        return found.model, found.goal
    if goal is None:
        fix = ("--goal pretrain", "--goal sft", "--goal peft")
        raise InputError("required for a model without a recipe", field="goal", fix=fix)
    return target, goal


def require_known(target: str) -> None:
    """Raise InputError with did-you-mean if a name is neither a model nor a recipe."""
    try:
        models.find(target)
    except InputError:
        near = closest(target, index.names(), 2)
        if near and "_" in target:
            raise unknown("model or recipe", target, [*near, *closest(target, models.names(), 1)]) from None
        raise


def is_recipe(name: str) -> bool:
    """Return whether a name is a recipe file or a shipped recipe."""
    return files.is_file(name) or index.is_known(name)


def recipe_from(name: str) -> Recipe:
    """Return a recipe from a file or by name."""
    return files.from_file(name) if files.is_file(name) else index.load(name)


def write_text(path: str, text: str, field: str) -> None:
    """Write a file; raise OutputError if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", field=field, value=path) from error

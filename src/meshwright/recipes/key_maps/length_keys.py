"""The length of a training: the keys in steps and in epochs of frameworks that have both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.recipes.key_maps.key import CompositeKey, MappedFields, RawValues
from meshwright.recipes.key_maps.shared_composite_keys import as_count, is_null
from meshwright.recipes.types import Recipe

FIELDS = ("train.steps", "train.epochs")


def composite(steps_key: str, epochs_key: str, write: Callable[[Recipe], Mapping[str, Any]]) -> CompositeKey:
    """Return the composite key of two lengths, of which the one in steps counts if both are set."""

    def read(raw: RawValues, recipe: Recipe) -> MappedFields:
        steps, epochs = raw.get(steps_key, "null"), raw.get(epochs_key, "null")
        if not is_null(steps):
            return MappedFields({"train.steps": str(as_count(steps_key, steps, least=1))})
        return MappedFields({} if is_null(epochs) else {"train.epochs": epochs})

    return CompositeKey((steps_key, epochs_key), FIELDS, read, write)


def automodel(recipe: Recipe) -> Mapping[str, Any]:
    """Return AutoModel's length; it counts whole epochs, and derives the decay from them."""
    epochs = recipe.train.epochs
    if not epochs:
        return {"step_scheduler.max_steps": recipe.train.steps}
    if not epochs.is_integer():
        _refuse(recipe, "AutoModel counts whole epochs")
    if recipe.schedule.name == "wsd":
        _refuse(recipe, "AutoModel's WSD needs the number of steps")
    return {"step_scheduler.num_epochs": int(epochs)}


def bridge(recipe: Recipe) -> Mapping[str, Any]:
    """Return Megatron-Bridge's length; its recipes set one in steps, which epochs must unset."""
    epochs = recipe.train.epochs
    if not epochs:
        return {"train.train_iters": recipe.train.steps}
    if recipe.goal == "pretrain":
        _refuse(recipe, "Megatron-Bridge counts epochs of fine-tuning data only")
    return {"train.train_iters": None, "train.num_epochs": int(epochs) if epochs.is_integer() else epochs}


def _refuse(recipe: Recipe, why: str) -> None:
    raise InputError(why, field="train.epochs", value=recipe.train.epochs, fix=("train.steps=N",))

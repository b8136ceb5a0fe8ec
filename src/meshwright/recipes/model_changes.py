"""What a recipe changes in its model: sizes, and numbers of the computation that are no part of the shape."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from meshwright.errors import InputError, MeshwrightError
from meshwright.models import ModelSpec, find
from meshwright.models.catalogue import config_file
from meshwright.models.numerics import UNKNOWN, Numerics, numerics_of, unknown_values
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import RANDOM_WEIGHTS, Recipe, field_value

NUMBERS = ("rope_theta", "norm_eps")
"""Fields of the architecture that change what the model computes, not its shape."""


def changes(recipe: Recipe) -> dict[str, Any]:
    """Return the architecture fields that a recipe sets."""
    return {key: value for key, value in msgspec.structs.asdict(recipe.architecture).items() if value is not None}


def sizes(recipe: Recipe) -> dict[str, Any]:
    """Return the sizes that a recipe sets."""
    return {key: value for key, value in changes(recipe).items() if key not in NUMBERS}


def require_numbers(recipe: Recipe, model: ModelSpec) -> None:
    """Raise InputError for a number that the model does not have."""
    base = recipe.architecture.rope_theta
    if base is not None and (model.learned_positions or model.kind == "diffusion"):
        key = "architecture.rope_theta"
        raise InputError(f"{model.name} has no rotary positions to change", key, base, [f"{key}=null"])


def published_numerics(model: str) -> Numerics:
    """Return the published values of a model; unknown ones are None."""
    try:
        return numerics_of(model)
    except MeshwrightError:  # a model of a file that is not here
        return Numerics()


def numerics_for(recipe: Recipe) -> Numerics:
    """Return the values that a recipe trains with: those of its model, and the recipe's own."""
    own: dict[str, Any] = {key: value for key, value in changes(recipe).items() if key in NUMBERS}
    if recipe.train.init_std:
        own["init_std"] = recipe.train.init_std
    return msgspec.structs.replace(published_numerics(recipe.model), **own)


def starts_from_random_weights(recipe: Recipe) -> bool:
    """Return whether our engine trains a recipe of a catalogue model from random weights."""
    weights = recipe.checkpoint.pretrained
    return weights == RANDOM_WEIGHTS or (recipe.goal == "pretrain" and not weights)


def unknown_numerics(recipe: Recipe, model: ModelSpec) -> str:
    """Return which published numbers of a catalogue model are unknown, for a training from random weights; else empty.

    Our engine builds such a model with the defaults of transformers' class, as those of a config.json without them.
    """
    missing = () if config_file(recipe.model) is not None else unknown_values(numerics_for(recipe), model)
    if not missing or not starts_from_random_weights(recipe):
        return ""
    fields = " and ".join(f"architecture.{name}=VALUE" for name in missing if name in NUMBERS)
    fixes = " or ".join(filter(None, (fields, f"--model FOLDER with the config.json of {model.name}")))
    what = " and ".join(UNKNOWN[name] for name in missing)
    unknown = f"{what} of {model.name} {'is' if len(missing) == 1 else 'are'} not in the catalogue"
    return f"{unknown}: from random weights, transformers' defaults apply ({fixes} sets others)"


def beyond_positions(recipe: Recipe, model: ModelSpec) -> str:
    """Return that samples are longer than the positions of a model, and what a context extension usually changes."""
    length, longest, base = recipe.data.seq_length, model.max_seq_length, recipe.architecture.rope_theta
    if not longest or length <= longest:
        return ""
    advice = f", with the RoPE base {base:,.10g} that is set" if base else ", usually with another RoPE base or scaling"
    positions = f"data.seq_length={length} is more than the {longest:,} positions of {model.name}"
    return f"{positions}: it has to learn the others{advice}"


def shape_overrides(recipe: Recipe) -> tuple[str, ...]:
    """Return the overrides that make the named model the recipe's, for a command that names the model."""
    return tuple(format_override(f"architecture.{key}", value) for key, value in changes(recipe).items())


CONTRACT = ("data.seq_length", "train.global_batch_size")
ADAPTERS = ("peft.method", "peft.rank", "peft.alpha")


def request_overrides(recipe: Recipe) -> tuple[str, ...]:
    """Return the overrides that request the recipe's training of the named model: its size, adapters and batch."""
    keys = (*CONTRACT, *(ADAPTERS if recipe.goal == "peft" else ()))
    return (*shape_overrides(recipe), *(format_override(key, field_value(recipe, key)) for key in keys))


def argument(recipe: Recipe) -> str:
    """Return the model as a command names it: the hub id of the weights that the recipe starts from, else its name."""
    weights = recipe.checkpoint.pretrained
    is_id = weights.count("/") == 1 and not weights.startswith((".", "/", "~", "$"))
    with suppress(MeshwrightError):
        if is_id and find(weights).name == recipe.model:
            return weights
    return recipe.model


def label(recipe: Recipe, name: str) -> str:
    """Return how to call the recipe's model of this name: one in other sizes is not the catalogue's."""
    return f"own shape like {name}" if sizes(recipe) else name

"""Finds the initial weights of a training: a Hugging Face folder, or random initialization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.models import find as find_model
from meshwright.models import is_path
from meshwright.notes import note
from meshwright.recipes.types import RANDOM_WEIGHTS, Recipe

FIELD = "checkpoint.pretrained"
# Config fields that must agree between recipe and folder; vocabularies may have been extended.
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def weights_folder(recipe: Recipe, notes: bool = False) -> Path | None:
    """Return the folder with the recipe's initial weights; None for random weights.

    With `notes`, for a run that is about to train, a note says why a user's own model starts from random weights.
    Fine-tuning starts from `checkpoint.pretrained`, from the model's folder if the recipe's model is a folder, or from
    the downloaded model of its Hugging Face id. Pretraining starts from a folder only if one is named.
    """
    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.find import transformer_folder

    named = recipe.checkpoint.pretrained
    if named == RANDOM_WEIGHTS:
        return None
    if not named and is_path(recipe.model):
        return _in_model_folder(recipe, note if notes else lambda text: None)
    if recipe.goal == "pretrain" and not named:
        return None
    if named:
        inner = transformer_folder(Path(named).expanduser())
        return hf_io.find_folder(str(inner) if inner.is_dir() else named)
    return _downloaded(recipe)


def _in_model_folder(recipe: Recipe, note: Callable[[str], None]) -> Path | None:
    """Return the folder of a user's model if training starts from its weights; a note says if it does not."""
    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.find import has_weights

    folder = model_folder(recipe)
    if not has_weights(folder):
        note(f"{folder} has no weights: training starts from random weights ({FIELD}=FOLDER for others)")
        return None
    if recipe.goal == "pretrain":
        note(f"pretraining starts from random weights; {FIELD}={folder} starts from those of the model's folder")
        return None
    return hf_io.find_folder(str(folder))


def model_folder(recipe: Recipe) -> Path:
    """Return the folder of a model that is given by a path."""
    model = Path(recipe.model).expanduser()
    return model if model.is_dir() else model.parent


def _downloaded(recipe: Recipe) -> Path:
    from meshwright.engine import hf_io

    model_id = find_model(recipe.model).hf_id
    download = (f"hf download {model_id}",) if model_id else ()
    fix = (*download, f"{FIELD}=FOLDER with config.json and safetensors files", f"{FIELD}={RANDOM_WEIGHTS}", "--tiny")
    if not model_id:
        raise InputError(f"fine-tuning {recipe.model} needs its pretrained weights", field=FIELD, value="", fix=fix)
    try:
        return hf_io.find_folder(model_id)
    except InputError as error:
        raise InputError(
            f"fine-tuning {recipe.model} needs its pretrained weights: {error.reason}", field=FIELD, value="", fix=fix
        ) from None


def config_in(folder: Path, recipe: Recipe, config_for: Any) -> Any:
    """Return the config of a folder's model; raise InputError if its shape differs from the recipe's model."""
    from meshwright.engine.hf_io.quantized import require_readable

    require_readable(folder)
    theirs = config_for(msgspec.structs.replace(recipe, model=str(folder)))
    ours = config_for(recipe)
    differing = {
        name: (before, after)
        for name in SHAPE
        if (before := _value(ours, name)) != (after := _value(theirs, name)) and None not in (before, after)
    }
    if differing:
        listed = ", ".join(f"{name} {after}, not {before}" for name, (before, after) in differing.items())
        raise InputError(
            f"the folder contains another model than {recipe.model}: {listed}",
            field=FIELD,
            value=str(folder),
            fix=(f"{folder} in place of {recipe.model}" if is_path(recipe.model) else f"--model {folder}",),
        )
    return theirs


def _value(config: Any, name: str) -> Any:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, name, None)


def is_named(recipe: Recipe, pinned: Mapping[str, Any]) -> bool:
    """Whether the user chose the weights: by checkpoint.pretrained, or with a folder of weights as the model."""
    from meshwright.engine.hf_io.find import has_weights

    return FIELD in pinned or (is_path(recipe.model) and has_weights(model_folder(recipe)))

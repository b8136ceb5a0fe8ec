"""Where the weights of a training come from: a Hugging Face folder, or chance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.models import find as find_model
from meshwright.recipes.types import Recipe

FIELD = "checkpoint.pretrained"
RANDOM = "random"  # what checkpoint.pretrained says to fine-tune weights that nobody trained
# What makes two configs describe models of different shapes; vocabularies may have been extended.
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def weights_folder(recipe: Recipe) -> Path | None:
    """The folder a recipe starts from; None where it starts from random weights.

    Fine-tuning starts from what `checkpoint.pretrained` names, from the model's own folder where the model is one, or
    from the downloaded model of its id. Pretraining starts from a folder only when one is named.
    """
    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.find import transformer_folder

    named = recipe.checkpoint.pretrained
    if named == RANDOM or (recipe.goal == "pretrain" and not named):
        return None
    if named:
        inner = transformer_folder(Path(named).expanduser())
        return hf_io.find(str(inner) if inner.is_dir() else named)
    own = Path(recipe.model).expanduser()
    if own.exists():
        return hf_io.find(str(own if own.is_dir() else own.parent))
    return _downloaded(recipe)


def _downloaded(recipe: Recipe) -> Path:
    from meshwright.engine import hf_io

    model_id = find_model(recipe.model).hf_id
    get_it = (f"hf download {model_id}",) if model_id else ()
    fix = (*get_it, f"{FIELD}=FOLDER with config.json and safetensors files", f"{FIELD}={RANDOM}", "--tiny")
    if not model_id:
        raise InputError(f"fine-tuning {recipe.model} starts from its weights", field=FIELD, value="", fix=fix)
    try:
        return hf_io.find(model_id)
    except InputError as error:
        raise InputError(
            f"fine-tuning {recipe.model} starts from its weights: {error.reason}", field=FIELD, value="", fix=fix
        ) from None


def config_in(folder: Path, recipe: Recipe, config_for: Any) -> Any:
    """The config of a folder's model, which must be of the shape that the recipe's model has."""
    theirs = config_for(msgspec.structs.replace(recipe, model=str(folder)))
    ours = config_for(recipe)
    differing = {
        name: (before, after)
        for name in SHAPE
        if (before := _value(ours, name)) != (after := _value(theirs, name)) and None not in (before, after)
    }
    if differing:
        told = ", ".join(f"{name} {after}, not {before}" for name, (before, after) in differing.items())
        raise InputError(
            f"the folder holds another model than {recipe.model}: {told}",
            field=FIELD,
            value=str(folder),
            fix=(f"--model {folder}",),
        )
    return theirs


def _value(config: Any, name: str) -> Any:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, name, None)


def is_named(recipe: Recipe, pinned: Mapping[str, Any]) -> bool:
    """Whether a user named the weights: by themselves, or as the folder of the model."""
    return FIELD in pinned or Path(recipe.model).expanduser().exists()

"""Match a config's model to the catalog, by name or by sizes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright import file_access, hub
from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.job_folders import job_folders
from meshwright.frameworks.mapping import same_value
from meshwright.frameworks.script_folders import is_file
from meshwright.models import (
    ModelSpec,
    catalogue_name,
    find,
    find_by_shape,
    is_config,
    is_path,
    names,
    reference,
    spec_from_config,
)
from meshwright.recipes.model_changes import NUMBERS, published_numerics
from meshwright.recipes.types import Recipe

TOKENIZER = "tokenizer.json"
QUANTIZED = re.compile(r"-(unsloth-)?bnb-4bit$")  # hub ids of a model's weights in 4 bits


def find_model(text: str) -> ModelSpec | None:
    """Return the catalog model with this name, or the model of a Hugging Face id; None if it is unknown or a path."""
    if not text or text.startswith((".", "/", "~")) or text.endswith((".json", ".yaml", ".toml")):
        return None
    for name in dict.fromkeys((text, QUANTIZED.sub("", text))):
        with suppress(InputError):
            return find(catalogue_name(name) or name)  # the shape: another hub id is its weights
    return None


def other_weights(text: str) -> str:
    """Return the hub id of a model whose weights are not those of the catalogue model of its shape; else empty.

    Weights in 4 bits are those of the id without the suffix: training quantizes them itself.
    """
    plain, model = QUANTIZED.sub("", text.strip()), find_model(text)
    named = None if model is None else reference(plain)
    return plain if model is not None and named not in (None, model.name) else ""


def tokenizer_vocabulary(text: str) -> int | None:
    """Return the number of tokens of a tokenizer: a model's by its name or hub id, or a folder's; None if unknown."""
    owner = find_model(text)
    if owner is not None:
        return owner.vocab
    if not text or file_access.closed():
        return None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        folder = hub.cached_snapshot(text, TOKENIZER) or folder if hub.is_model_id(text) else folder
    return _tokens_in(folder / TOKENIZER) or _vocabulary_of_config(folder)


def _tokens_in(path: Path) -> int | None:
    """Return the number of tokens of a tokenizer.json, with those that were added."""
    try:
        found = msgspec.json.decode(path.read_bytes())
        listed = found["model"]["vocab"]  # ids by token; of Unigram, pairs of a token and its score
        names = listed.keys() if isinstance(listed, dict) else [one[0] for one in listed]
        return len({*names, *(one["content"] for one in found.get("added_tokens", ()))}) or None
    except (OSError, msgspec.DecodeError, KeyError, TypeError, IndexError):
        return None


def _vocabulary_of_config(folder: Path) -> int | None:
    found = find_local_model(str(folder))[0] if folder.is_dir() else None
    return None if found is None else found.vocab or None


def find_local_model(text: str, content: Content | None = None) -> tuple[ModelSpec | None, str]:
    """Return the model of a folder or config.json on this machine, and why it cannot be read; empty if it is none.

    `content` is the file that names it, whose jobs may start in other folders than the current one.
    """
    path = local_model_path(text, content)
    if not path:
        return None, ""
    try:
        return find(path), ""
    except InputError as error:
        return None, error.reason


def local_model_path(text: str, content: Content | None = None) -> str:
    """Return the path from here of a model's folder or config.json that a file names; empty if there is none."""
    if not text or file_access.closed():
        return ""
    if content is None or Path(text).expanduser().is_absolute():
        return text if is_path(text) and _has_config(text) else ""
    if not is_path(text) and find_model(text) is not None:
        return ""  # a name of the catalogue
    paths = (text if folder == Path() else str(folder / text) for folder in job_folders(content, text))
    return next((path for path in paths if is_path(path) and _has_config(path)), "")


OWN_MODEL = "--model FOLDER, where its config.json is"


def model_option(content: Content) -> str:
    """Return the option that names the model of a file: the config.json beside it, or in words if there is none."""
    beside = None if content.folder is None or file_access.closed() else str(content.folder / "config.json")
    if beside is None or not is_config(beside):
        return OWN_MODEL
    return shlex.join(["--model", beside if os.sep in beside else f"./{beside}"])


def _has_config(text: str) -> bool:
    path = Path(text).expanduser()
    return is_file(path / "config.json") or (path.suffix == ".json" and is_file(path))


def model_path(recipe: Recipe, model: ModelSpec) -> str:
    """Return the folder of a model that a recipe names by path, or its config if that has another name; else empty."""
    if not is_path(recipe.model):
        return ""
    if file_access.closed():
        return f"./{model.name}"
    path = Path(recipe.model).expanduser().resolve()
    return str(path.parent if path.name == "config.json" else path)


def from_sizes(model_type: str, name: str = "config", **sizes: Any) -> ModelSpec:
    """Return the catalog model with these sizes (Hugging Face config keys), or a new one."""
    spec = spec_from_config({"model_type": model_type, **{k: v for k, v in sizes.items() if v is not None}}, name)
    return next(
        (candidate for candidate in find_by_shape(spec.hidden, spec.num_layers) if same_shape(candidate, spec)), spec
    )


def same_shape(one: ModelSpec, other: ModelSpec) -> bool:
    """Return whether two models have the same architecture."""
    return _shape(one) == _shape(other)


def _shape(spec: ModelSpec) -> bytes:
    parts = (spec.kind, spec.hidden, spec.groups, spec.vocab, spec.tied, spec.learned_positions, spec.mtp_layers)
    return msgspec.json.encode(parts)


UNSET_IN_CONFIG = {"rope_theta": 10000.0, "norm_eps": 1e-6}
"""Numbers of a config.json that does not set them, as transformers' classes have them."""


def own_numbers(recipe: Recipe) -> Iterator[tuple[str, float, float | None]]:
    """Yield the recipe's own numbers of the model with those of the published one, where they differ."""
    published = published_numerics(recipe.model)
    for name in NUMBERS:
        value, theirs = getattr(recipe.architecture, name), getattr(published, name)
        theirs = UNSET_IN_CONFIG[name] if theirs is None and recipe.model not in names() else theirs
        if value is not None and not same_value(value, theirs):
            yield f"architecture.{name}", value, theirs

"""The classes that a config.json names in architectures: the model type they belong to, and those nobody has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.notes import note

from .readers import gpt2
from .readers.architectures import SAME_AS, TRAITS
from .readers.wrappers import WRAPPERS
from .spec import ModelSpec

LANGUAGE_MODELS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
WELL_KNOWN = (  # types that are no decoders, known where transformers is not installed
    *("albert", "bart", "bert", "clip", "deberta", "deberta-v2", "distilbert", "electra", "mbart", "modernbert"),
    *("mpnet", "mt5", "pegasus", "roberta", "siglip", "t5", "t5gemma", "umt5", "vit", "wav2vec2", "whisper"),
    "xlm-roberta",
)
_ENCODER_DECODER = re.compile(r"^ {4,8}is_encoder_decoder(?:: [\w |]+)? ?= ?True\b", re.MULTILINE)
_OTHER_HEAD = re.compile(r"For(?:\w*Classification|QuestionAnswering)$")  # which no table of transformers lists
_HEAD = re.compile(r"(?:For[A-Z]|LMHead).*")


@lru_cache(maxsize=4)
def _auto_source(name: str) -> str:
    """Return the source of a module of transformers' auto classes, read without importing it; empty if it has none."""
    package = find_spec("transformers")
    where = Path(package.origin or "").parent / "models" / "auto" / f"{name}.py" if package else Path()
    try:
        return where.read_text("utf-8")
    except OSError:
        return ""


@lru_cache(maxsize=4)
def buildable(tables: tuple[str, ...] = LANGUAGE_MODELS) -> frozenset[str]:
    """Return the model types and classes in these tables of transformers."""
    return frozenset(name for table in tables for name in re.findall(r'"([^"]+)"', _rows(table)))


def _rows(table: str) -> str:
    return _auto_source("modeling_auto").partition(f"{table} = OrderedDict(")[2].partition("\n)\n")[0]


def encodes_by_default(model_type: str) -> bool:
    """Return whether transformers' config class of a type says is_encoder_decoder, read without importing it."""
    package, name = find_spec("transformers"), model_type.replace("-", "_")
    if package is None or not name.isidentifier():
        return False
    where = Path(package.origin or "").parent / "models" / name / f"configuration_{name}.py"
    try:
        return _ENCODER_DECODER.search(where.read_text("utf-8")) is not None
    except OSError:
        return False


@lru_cache(maxsize=1)
def types_of_transformers() -> frozenset[str]:
    """Return every model type of transformers, also of models that are no language models."""
    found = "".join(map(_auto_source, ("auto_mappings", "configuration_auto", "modeling_auto")))
    return frozenset((*re.findall(r'\("([^"]+)",', found), *WELL_KNOWN))


@lru_cache(maxsize=1)
def _types_by_class() -> dict[str, tuple[str, ...]]:
    """Return the model types of each class of a language model."""
    ours = [(traits.hf_class, name) for name, traits in TRAITS.items()]
    ours += [(wrapper.hf_class, name) for name, wrapper in WRAPPERS.items()]
    theirs = [
        (c, name) for table in LANGUAGE_MODELS for name, c in re.findall(r'\("([^"]+)", "([^"]+)"\)', _rows(table))
    ]
    found: dict[str, dict[str, None]] = {}
    for class_name, model_type in (*theirs, *ours):
        found.setdefault(class_name, {})[model_type] = None
    return {class_name: tuple(types) for class_name, types in found.items()}


def _is_known(model_type: object) -> bool:
    if not isinstance(model_type, str):
        return False
    named = (*TRAITS, *SAME_AS, *WRAPPERS, *gpt2.MODEL_TYPES, "nemotron_h")
    return model_type in named or model_type in types_of_transformers()


def classes_of(config: Mapping[str, Any]) -> list[str]:
    """Return the class names in the architectures of a config."""
    listed = config.get("architectures")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def with_known_type(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a config with the model type of its class, if its own is missing or nobody's; a note says so.

    Every command then reads, builds and writes the same model.
    """
    model_type = config.get("model_type")
    if "_class_name" in config or not isinstance(model_type, str | None) or _is_known(model_type):
        return config
    found = next(((name, types) for name in classes_of(config) if (types := _types_by_class().get(name))), None)
    if found is None:
        return config
    class_name, types = found
    own = _type_of_class(class_name, types, flat="text_config" not in config)
    was = "it has no model_type" if model_type is None else f"no installed code knows model_type {model_type!r}"
    remote = ", and the code that auto_map names is never run" if config.get("auto_map") else ""
    note(
        f'{where}: {was}; its class {class_name} is the one of "model_type": "{own}", which is read, built and written '
        f"in its place{remote}"
    )
    return {**config, "model_type": own}


def _type_of_class(class_name: str, types: tuple[str, ...], flat: bool) -> str:
    """Return the type whose config a class takes: several types can share one class."""
    if flat and (text := [name for name in types if name.endswith("_text")]):
        return text[0]
    stem = _plain(_HEAD.sub("", class_name))
    return next((name for name in types if _plain(name) == stem), types[0])


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).lower()


def unknown_class(config: Mapping[str, Any]) -> str | None:
    """Return the class that a config names if neither transformers nor our tables have it: a user's own class.

    Transformers ignores that name and builds the class of the model type instead.
    """
    source = _auto_source("modeling_auto")
    names = classes_of(config)
    if not source or not names or not _is_known(config.get("model_type")):
        return None
    known = {name.lower() for name in (*re.findall(r'"([^"]+)"', source), *_types_by_class())}
    known |= {_HEAD.sub("", name).lower() for name in _types_by_class()}  # of classes with another head
    return None if any(_OTHER_HEAD.sub("", name).lower() in known for name in names) else names[0]


def class_of_type(config: Mapping[str, Any]) -> str:
    """Return the class that a config's model type is built with; empty if unknown."""
    model_type = config.get("model_type")
    return next((name for name, types in _types_by_class().items() if model_type in types), "")


def class_head(name: str) -> str:
    """Return the head in the name of a class: ForCausalLM; empty if it has none."""
    found = _HEAD.search(name)
    return found[0] if found else ""


def is_of_another_type(spec: ModelSpec, name: str) -> bool:
    """Return whether a class of transformers is one of other model types than a model's; False if it is not known."""
    stem = _HEAD.sub("", name)
    types = {one for other, types in _types_by_class().items() if _HEAD.sub("", other) == stem for one in types}
    wrapper = WRAPPERS.get(spec.model_type)
    own = {spec.model_type, SAME_AS.get(spec.model_type, ""), *(() if wrapper is None else wrapper.text)}
    is_own = stem == _HEAD.sub("", spec.hf_class) or types & own
    return bool(types and spec.model_type) and not is_own


def note_unknown_class(config: Mapping[str, Any], where: str) -> None:
    """Note that a config names a class of the user's own, and what is built instead."""
    own = unknown_class(config)
    if own is not None:
        note(
            f"{where}: its class {own} is not one of transformers: {config['model_type']} is read and built as "
            f"{class_of_type(config) or 'its own class'}; in Python, train(..., model_class={own}) builds yours"
        )


def require_known_class(config: Mapping[str, Any], folder: str, field: str) -> None:
    """Raise if the weights of a folder are of a user's own class: another class would compute other values."""
    own = unknown_class(config)
    if own is None:
        return
    stock = class_of_type(config)
    same = (f'"architectures": ["{stock}"] in its config.json, if {stock} computes the same',) if stock else ()
    raise InputError(
        f"its weights are of the class {own}, which transformers does not have; {stock or config['model_type']}, the "
        f"class of model_type {config['model_type']}, may compute something else with them",
        field=field,
        value=folder,
        fix=(f"in Python, {own}.from_pretrained({folder!r}), or train(..., model_class={own})", *same),
    )

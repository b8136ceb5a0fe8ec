"""Initial weights of an exported run for frameworks that load only checkpoints of their own format."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from meshwright import file_access, models
from meshwright.errors import InputError
from meshwright.frameworks.environment import REFERENCE
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.model_match import find_model
from meshwright.models import ModelSpec
from meshwright.recipes.model_changes import sizes
from meshwright.recipes.types import Recipe

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
OWN_FORMAT = "megatron"
"""The engine whose checkpoints other engines cannot load; those load folders in Hugging Face format."""
DESCRIBES_SIZES = "megatron-lm"
"""The framework whose files describe a model by its sizes: several published models may have them."""
TO_HUGGING_FACE = "Megatron-Bridge's examples/conversion/convert_checkpoints.py export"
ENVIRONMENT = re.compile(r"(\$(?:\{[A-Z][A-Z0-9_]*\}|[A-Z][A-Z0-9_]*))")
PATH_WORD = re.compile(r"[\w./@:=,+\-${}\"]*/[\w./@:=,+\-${}\"]*")
"""A word with a path, which has no command of the shell."""


def needs_converted(recipe: Recipe) -> bool:
    """Return whether a run needs weights that a framework with its own format cannot load as the recipe names them."""
    if not recipe.checkpoint.pretrained:
        return recipe.goal != "pretrain"
    return is_hugging_face(recipe.checkpoint.pretrained)


def is_hugging_face(weights: str) -> bool:
    """Return whether weights are named by a Hugging Face id, or are a folder in that format; ./a/b is always a path."""
    if is_hub_id(weights):
        return True
    path = Path(weights).expanduser()
    return not file_access.closed() and (path / "config.json").is_file() and any(path.glob("*.safetensors*"))


def is_hub_id(weights: str) -> bool:
    """Return whether weights are named by a Hugging Face id; over HTTP no file of this machine is looked at."""
    path = Path(weights).expanduser()
    is_local = not file_access.closed() and (path.exists() or path.parent.exists())
    return bool(HUB_ID.fullmatch(weights)) and not is_local


FROM_FOLDERS = ("torchtitan",)
"""Engines that load Hugging Face weights from a folder, and do not download them."""


def in_folder(recipe: Recipe, engine: str) -> Recipe:
    """Return the recipe with the folder that an engine needs in place of a hub id: one to fill in."""
    weights = recipe.checkpoint.pretrained
    if engine not in FROM_FOLDERS or not is_hub_id(weights):
        return recipe
    folder = f"/path/to/{PurePosixPath(weights).name}"
    return msgspec.structs.replace(recipe, checkpoint=msgspec.structs.replace(recipe.checkpoint, pretrained=folder))


def weights_to_prepare(recipe: Recipe, model: ModelSpec, engine: str) -> str:
    """Return what has to be done before a run can load its weights on an engine, with the command; empty if nothing."""
    weights = recipe.checkpoint.pretrained
    source = weights or model.hf_id or model.name
    if engine == OWN_FORMAT and needs_converted(recipe):
        convert = f"python examples/conversion/convert_checkpoints.py import --hf-model {source} --megatron-path FOLDER"
        return f"{source} has to be converted to Megatron's format first: {convert} (Megatron-Bridge)"
    if engine in FROM_FOLDERS and is_hub_id(weights):
        download = f"python scripts/download_hf_assets.py --repo_id {weights} --assets safetensors"
        return f"{weights} has to be downloaded first: {download}"
    return ""


def loadable_weights(recipe: Recipe, source: Framework, target: Framework, given: bool) -> tuple[Recipe, str]:
    """Return the recipe with weights that the target can load, and a note if those of the source's file are others.

    A checkpoint in Megatron format is replaced by the published weights of the model, if the user (`given`) or the file
    names it; raise InputError if it has none. Sizes do not show whose weights a checkpoint has: then a folder to fill
    in is written.
    """
    weights = recipe.checkpoint.pretrained
    if source.engine != OWN_FORMAT or target.engine == OWN_FORMAT or not weights or is_hugging_face(weights):
        return recipe, ""
    reason = f"is a Megatron checkpoint ({source.title} loads no other), and {target.title} loads a Hugging Face folder"
    published = models.find(recipe.model) if find_model(recipe.model) is not None else None
    if published is None or not published.hf_id or sizes(recipe):
        folder = f"checkpoint.pretrained=FOLDER, converted with {TO_HUGGING_FACE}"
        raise InputError(reason, "checkpoint.pretrained", weights, [folder, "checkpoint.pretrained="])
    if given or source.name != DESCRIBES_SIZES:
        name = published.hf_id
        note = (
            f"{name}, the published weights, are written instead; if yours differ, convert them with "
            f"{TO_HUGGING_FACE} and name the folder with checkpoint.pretrained=FOLDER"
        )
    else:
        name = f"/path/to/{PurePosixPath(weights).name or 'weights'}-hf"
        note = (
            f"convert it with {TO_HUGGING_FACE} and put its folder in place of {name}, or name a model whose published "
            "weights it has with --model ORG/NAME"
        )
    checkpoint = msgspec.structs.replace(recipe.checkpoint, pretrained=name)
    changed = msgspec.structs.replace(recipe, checkpoint=checkpoint)
    return changed, f"checkpoint.pretrained={weights} {reason}: {note}"


def shell_word(word: str, variables: Mapping[str, str], expanded: Collection[str] = ()) -> str:
    """Quote a word for a shell; it expands references such as ${NAME} to these variables, and stops if one is unset.

    Words in `expanded` are written as the user's script has them, as one word.
    """
    if word in expanded:
        return _in_double_quotes(word)
    if not any(f"${{{name}}}" in word for name in variables):
        return _with_environment(word)
    parts = REFERENCE.split(word)  # text, name, text, name, ..., text
    quoted = [shlex.quote(text) if text else "" for text in parts[0::2]]
    names = [f'"${{{name}:?{variables.get(name, "not set")}}}"' for name in parts[1::2]]
    return "".join(text + name for text, name in zip(quoted, [*names, ""], strict=True))


def _with_environment(word: str) -> str:
    """Quote a word; variables of the cluster's environment in a path expand where the job runs: /scratch/$USER/run."""
    parts = ENVIRONMENT.split(word) if PATH_WORD.fullmatch(word) else []  # text, reference, text, ..., text
    if len(parts) < 2:
        return shlex.quote(word)
    quoted = (f'"{part}"' if place % 2 else shlex.quote(part) for place, part in enumerate(parts) if part)
    return "".join(quoted)


def _in_double_quotes(word: str) -> str:
    """Return a word in double quotes; a quote inside a command substitution has its own context."""
    found, depth, ticks = "", 0, False
    for number, letter in enumerate(word):
        ticks = ticks != (letter == "`")
        depth += word.startswith("$(", number)
        found += f"\\{letter}" if letter in '"\\' and not depth and not ticks else letter
        depth -= depth > 0 and letter == ")"
    return f'"{found}"'

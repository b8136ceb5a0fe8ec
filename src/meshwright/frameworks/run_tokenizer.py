"""The tokenizer of an exported run, and of a framework's file: one place decides what can be one.

Frameworks load a tokenizer from a folder or by a hub id. The config.json of a model is none, and a name that only
Meshwright knows (bytes) is none elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from meshwright import file_access
from meshwright.frameworks.initial_weights import is_hugging_face
from meshwright.frameworks.model_match import find_model, model_path
from meshwright.frameworks.trainer_args import PROGRAM
from meshwright.frameworks.types import ExportedConfig
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding, Severity

if TYPE_CHECKING:
    from meshwright.frameworks.framework import Framework
    from meshwright.frameworks.to_recipe import ImportedRecipe

RULE, FIELD = "data.no-tokenizer", "data.tokenizer"
FIX = f"{FIELD}=FOLDER"
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
"""Files of which a Hugging Face folder with a tokenizer has one."""
OF_A_MODEL = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Files of a model's folder that are named instead of the folder."""
BYTES = "bytes"  # Meshwright's own tokenizer
OWN_FILES = {"megatron_lm": "tokenizer_type", "megatron_bridge": "tokenizer.tokenizer_type"}
"""Key maps whose frameworks also have tokenizers that read a file of their own, with the key of the type."""
FROM_FOLDERS = ("HuggingFaceTokenizer", "SFTTokenizer")  # types that read a folder or a hub id
FOLDER_KEYS = ("model.hf_assets_path", "hf_assets_path")  # torchtitan's, which are read with the model
DOWNLOADED = ("torchtitan",)  # frameworks whose files name a folder to put the tokenizer in
IN_A_PROGRAM = ("megatron-bridge", "kempnerforge", "deepspeed", "accelerate")
"""Frameworks whose exports name a tokenizer only if a program is written."""


def tokenizer_of(recipe: Recipe, model: ModelSpec) -> str:
    """Return the tokenizer of a run: as named, that of its weights, or that published with the model; empty if unknown.

    A model in the user's own sizes is written as a catalogue model with another vocabulary, whose tokenizer is not his.
    """
    weights, vocabulary = recipe.checkpoint.pretrained, recipe.architecture.vocab
    if recipe.data.tokenizer or (weights and is_hugging_face(weights)):
        return recipe.data.tokenizer or weights
    published = find_model(recipe.model)
    is_other = vocabulary is not None and (published is None or published.vocab != vocabulary)
    return "" if is_other else model_folder(recipe, model) or ("" if model_path(recipe, model) else model.hf_id) or ""


def model_folder(recipe: Recipe, model: ModelSpec) -> str:
    """Return the folder of a model that a recipe names by path; empty if it names a config file."""
    path = model_path(recipe, model)
    return "" if path.endswith(".json") else path


def without_files(recipe: Recipe, key_map: str) -> Recipe:
    """Return the recipe without a tokenizer that the framework cannot load: a file, or Meshwright's own."""
    if not why_not(recipe.data.tokenizer, key_map):
        return recipe
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, tokenizer=""))


def why_not(name: str, key_map: str) -> str:
    """Return why a framework cannot load the tokenizer that a user names; empty if it may."""
    if name == BYTES:
        return "is Meshwright's own tokenizer, which other frameworks do not have"
    if _is_config(name) or (name.endswith(".json") and key_map not in OWN_FILES):
        return "is a file, and a tokenizer is loaded from a folder or by a hub id"
    return ""


def _is_config(name: str) -> bool:
    """Return whether a name is a file of a Hugging Face folder: one of its usual names, or a model's config here."""
    path = Path(name).expanduser()
    if PurePosixPath(name).name in OF_A_MODEL:
        return file_access.closed() or not path.is_dir()
    if file_access.closed() or not name.endswith(".json") or not path.is_file():
        return False
    try:
        return "model_type" in msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, TypeError):
        return False


def _fix(name: str) -> str:
    """Return the folder to name in place of a file: the file's own if it is the tokenizer's."""
    path = PurePosixPath(name)
    return str(path.parent) if path.name in FILES and str(path.parent) != "." else "FOLDER"


def tokenizer_findings(
    framework: Framework, recipe: Recipe, model: ModelSpec, written: ExportedConfig
) -> Iterator[Finding]:
    """Yield that an exported job would look for its tokenizer where there is none."""
    named, weights = recipe.data.tokenizer, recipe.checkpoint.pretrained
    if reason := why_not(named, framework.key_map):
        yield Finding(RULE, "error", FIELD, f"{named} {reason}", (f"{FIELD}={_fix(named)}",))
        return
    of_program = framework.name in IN_A_PROGRAM and PROGRAM not in written.files
    if of_program or not (recipe.data.dataset != "mock" or recipe.data.blend or named):
        return  # random tokens need none
    path = model_path(recipe, model)
    beside_weights = weights if framework.key_map not in OWN_FILES and not named else ""
    found = beside_weights or tokenizer_of(recipe, model)
    if path and not found:
        severity: Severity = "warning" if framework.name in DOWNLOADED else "error"
        message = f"{path} is the config of a model, and {framework.title} needs its tokenizer to start"
        yield Finding(RULE, severity, FIELD, message, (FIX,))
    elif found and _has_none(found):
        message = f"{found} has no tokenizer ({FILES[0]} or {FILES[1]}), and the job would read it there"
        yield Finding(RULE, "warning", FIELD, message, (FIX,))


def lacks_tokenizer(recipe: Recipe, model: ModelSpec) -> bool:
    """Return whether a model that a recipe names by path is known to have no tokenizer beside its config."""
    folder = model_folder(recipe, model)
    return bool(model_path(recipe, model)) and (not folder or _has_none(folder))


def _has_none(name: str) -> bool:
    """Return whether a folder of this machine has no tokenizer."""
    path = Path(name).expanduser()
    return not file_access.closed() and path.is_dir() and not any((path / one).is_file() for one in FILES)


def file_findings(imported: ImportedRecipe) -> Iterator[Finding]:
    """Yield that a framework's file names a JSON file as the tokenizer that it loads from a folder or by a hub id."""
    settings, key_map = imported.parsed.settings, imported.framework.key_map
    if key_map in OWN_FILES:
        kind = settings.get(OWN_FILES[key_map])
        if kind is None or kind.value not in FROM_FOLDERS:
            return
    for row in config_keys(key_map).values():
        setting = settings.get(row.key) if row.field == FIELD or row.key in FOLDER_KEYS else None
        name = "" if setting is None or setting.unresolved else str(setting.value)
        if setting is None or not name.endswith(".json") or (not file_access.closed() and Path(name).is_dir()):
            continue
        write = imported.framework.format_setting
        message = f"{write(row.key, name)}: a tokenizer is loaded from a folder or by a hub id, and {name} is a file"
        yield Finding(RULE, "error", row.key, message, (write(row.key, _fix(name)),), setting.file, setting.line)

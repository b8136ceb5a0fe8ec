"""Resolve the names of recipes, models and files, and write files."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright import clusters, file_access, frameworks, models
from meshwright.errors import InputError, OutputError, closest, unknown
from meshwright.models import ModelSpec
from meshwright.notes import note
from meshwright.recipes import index
from meshwright.recipes.run_folder import is_run_folder
from meshwright.recipes.types import Recipe

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def model_named(text: str, trained: bool = True) -> tuple[ModelSpec, str]:
    """Return a model that a user typed, and how a recipe refers to it."""
    return referenced_model(typed_model(text), trained)


def referenced_model(text: str, trained: bool = True) -> tuple[ModelSpec, str]:
    """Return the model of a recipe, and how a recipe refers to it: a shipped name, a hub id of its shape, or a path.

    A model that is to be trained must be a language model or a denoiser.
    """
    if trained:
        models.require_language_model(text)
    return models.find(text), models.reference(text) or str(file_access.resolved(text.strip()))


def typed_model(text: str) -> str:
    """Return the model that a user typed: a folder with that name and a config.json comes before a shipped model."""
    name = text.strip()
    if models.is_path(name) or not file_access.is_dir(name):
        _note_dropped_words(name)
        return text
    if (Path(name) / "config.json").is_file():
        note(f"model {name} is the folder {Path(name).resolve()}, not the catalogue model of that name")
        return f".{os.sep}{name}"
    note(f"model {name} is the catalogue model; the folder {name} here has no config.json")
    return text


def _note_dropped_words(name: str) -> None:
    """Say whose weights a name such as llama3.2-3b-instruct means: the catalogue's, which has only the shape."""
    if models.is_path(name) or not is_named(name):
        return
    words, found = models.dropped_words(name), models.find(name)
    if quantized := models.quantized_words(name):
        weights = f"plans start from {found.hf_id}" if found.hf_id else "plans have its shape"
        note(f"{name} has quantized weights ({', '.join(quantized)}) of {found.name}: {weights}; for 4-bit, goal qlora")
    elif words:
        weights = f"its weights are {found.hf_id}" if found.hf_id else "it has no weights"
        known = "".join(f", {one}" for one in models.releases(found.name))
        other = f"known others of its shape: {known[2:]}" if known else "ORG/NAME of the hub means those of that id"
        note(f"{name} is the catalogue model {found.name}: {weights}; {other}")


def is_named(name: str) -> bool:
    """Return whether a text is the name of one catalogue model."""
    try:
        return models.catalogue_name(name) is not None
    except InputError:
        return False


def model_and_goal(target: str, goal: str | None) -> tuple[str, str]:
    """Return a model and the requested goal; empty for the user's own model without one."""
    reference = typed_model(target)
    if goal is None and not models.is_path(reference.strip()):
        fix = ("--goal pretrain", "--goal sft", "--goal peft")
        raise InputError("required for a model without a recipe", field="goal", fix=fix)
    return reference, goal or ""


def require_known(target: str) -> None:
    """Raise InputError with did-you-mean if a name is neither a model nor a recipe."""
    try:
        model_named(target)
    except InputError:
        if models.is_path(target):
            raise
        near = closest(target, index.names(), 2)
        if near and "_" in target:
            raise unknown("model or recipe", target, [*near, *closest(target, models.names(), 1)]) from None
        raise


def assumed_in(gpus: str | int | None) -> tuple[clusters.Assumption, ...]:
    """Return what a cluster argument leaves open; nothing for this machine."""
    if gpus is None or str(gpus).strip().lower() == "auto":
        return ()
    return clusters.assumptions(str(gpus))


def is_recipe(name: str) -> bool:
    """Return whether a name is a recipe or another framework's file, or a shipped recipe."""
    return is_file(name) or index.is_known(name)


def is_file(name: str) -> bool:
    """Return whether a name is a recipe file, a run of ours, or another framework's config or script.

    A model's config.json is none of them.
    """
    path = Path(name)
    if is_run_folder(name):
        return True
    if file_access.is_dir(path) or not frameworks.is_file(name):
        return False
    if path.name == CONFIG:
        return _has_framework(name)
    named = path.suffix.lower() in frameworks.SUFFIXES
    return (named or (models.is_path(name) and not index.is_known(name))) and not models.is_config(name)


def _has_framework(path: str) -> bool:
    """Return whether a config.json is another framework's, such as DeepSpeed's, and not a model's."""
    try:
        return not models.is_config(path) and frameworks.framework_of(frameworks.open_file(path)) is not None
    except InputError:
        return False


def recipe_from(name: str, cluster: str | None = None) -> Recipe:
    """Return a recipe of ours from a file or by name; `cluster` is that of a file which names none."""
    if not is_file(name):
        try:
            return index.load(name)
        except InputError as error:  # a file with a slip in its name: train.sbtach
            near_file = Path(name).suffix and file_access.neighbours(Path(name))
            if error.fix or not (near_file or models.is_path(name)):
                raise
            raise file_access.missing_path(name, "file") from None
    from meshwright.recipes.files import from_file

    found = from_file(name, cluster)
    if not models.is_path(found.model) and file_access.is_dir(found.model):
        note(f"model {found.model} of {name} is the catalogue model; write ./{found.model} for the folder of that name")
    return found


def weights_named(target: str) -> str:
    """Return the folder or hub id of the weights of a model, recipe or recipe file; raise InputError without any.

    Empty for another framework's file that starts from weights itself: it keeps its own.
    """
    fix = ("checkpoint.pretrained=FOLDER with config.json and safetensors files", "--goal pretrain")
    if is_file(target) and not frameworks.is_native(frameworks.open_file(target)):
        if frameworks.starts_from_weights(frameworks.open_file(target)):
            return ""
        raise InputError("needs the weights to start from", field="checkpoint.pretrained", value="", fix=fix)
    recipe = recipe_from(target, cluster="") if is_recipe(target) else None
    if recipe is not None and recipe.checkpoint.pretrained:
        return recipe.checkpoint.pretrained
    spec, reference = referenced_model(typed_model(target) if recipe is None else recipe.model)
    if not models.is_path(reference):
        if spec.hf_id:
            return spec.hf_id
        raise InputError(f"{spec.name} has no published weights", field="checkpoint.pretrained", value="", fix=fix)
    folder = Path(reference) if Path(reference).is_dir() else Path(reference).parent
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise InputError(f"{folder} has no weights to start from", field="checkpoint.pretrained", value="", fix=fix)
    return str(folder)


def write_text(path: str, text: str, field: str) -> None:
    """Write a file; raise OutputError if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", field=field, value=path) from error

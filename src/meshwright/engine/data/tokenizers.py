"""Loads tokenizers from a local folder or the local Hugging Face cache; never downloads, never runs remote code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.engine.data import byte_level
from meshwright.errors import InputError, first_line
from meshwright.file_access import missing_path, neighbours
from meshwright.models.catalogue import find, is_path
from meshwright.recipes.types import Recipe

FIELD = "data.tokenizer"


def load_tokenizer(source: Recipe | str | Path, pretrained: Path | None = None) -> Any:
    """Load the tokenizer of a recipe (its own, the pretrained weights' or the model's), a folder or a cached hub id."""
    name = _name(source, pretrained) if isinstance(source, Recipe) else str(source)
    if name == byte_level.NAME:
        name = str(byte_level.cached_byte_tokenizer())
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent
    if path.is_dir():
        return _load(str(path), name, cached=False)
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise missing_path(name, FIELD, "no such folder")
    return _load(name, name, cached=True)


def check_ids(tokenizer: Any, vocab: int, field: str = FIELD) -> None:
    """Raise if the tokenizer has ids without an embedding in the model."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab:
        raise InputError(
            f"the tokenizer has ids up to {highest}, but the model's vocabulary has {vocab} tokens (0 to {vocab - 1})",
            field=field,
            value=tokenizer.name_or_path,
            fix=("data.tokenizer=the model's tokenizer", f"architecture.vocab={highest + 1}"),
        )


def _name(recipe: Recipe, pretrained: Path | None) -> str:
    if recipe.data.tokenizer:
        return recipe.data.tokenizer
    if pretrained is not None:
        return str(pretrained)
    if recipe.checkpoint.pretrained:
        return recipe.checkpoint.pretrained
    if is_path(recipe.model):
        return recipe.model
    hub_id = find(recipe.model).hf_id
    if hub_id:
        return hub_id
    raise InputError(
        f"{recipe.data.dataset} is text, but no tokenizer is set",
        field=FIELD,
        value="",
        fix=(*_folder_fix(), "--dataset mock"),
    )


def _folder_fix() -> tuple[str, ...]:
    return ("data.tokenizer=FOLDER with tokenizer.json and tokenizer_config.json",)


def _load(source: str, name: str, cached: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise InputError(f"the tokenizer needs another package: {first_line(error)}", field=FIELD, value=name) from None
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others for the same mistakes
        raise _load_error(name, cached, error) from None


def _load_error(name: str, cached: bool, error: Exception) -> InputError:
    if "trust_remote_code" in str(error):
        reason = "the tokenizer needs remote code, which is never run"
        return InputError(reason, field=FIELD, value=name, fix=_folder_fix())
    if cached:
        near = neighbours(Path(name))
        reason = f"not a folder{f' (did you mean {near[0]}?)' if near else ''} and not in the local Hugging Face cache"
        fix = (*near[:1], f"hf download {name} --include '*token*' '*.jinja'", *_folder_fix())
        return InputError(reason, field=FIELD, value=name, fix=fix)
    reason = "no tokenizer in this folder" if "backend tokenizer" in str(error) else f"cannot read: {first_line(error)}"
    return InputError(reason, field=FIELD, value=name, fix=_folder_fix())

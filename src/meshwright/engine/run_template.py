"""The chat template of a run (data.chat_template): kept in the run folder and saved with the exported tokenizer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright.engine.metrics.jsonl import warn
from meshwright.errors import InputError
from meshwright.recipes.run_folder import TEMPLATE
from meshwright.recipes.types import Recipe

NAME = TEMPLATE  # transformers' name, also in the run folder


def keep_template(recipe: Recipe, run: Path) -> None:
    """Copy the template into the run folder: the user's file may be edited, moved or deleted while the run lasts."""
    from meshwright.engine.data.templates import read_template
    from meshwright.engine.hf_io.shards import write_text

    if _has_template(recipe):
        text = read_template(recipe.data.chat_template)
        run.mkdir(parents=True, exist_ok=True)
        write_text(run / NAME, text)


def with_kept_template(recipe: Recipe, run: Path) -> Recipe:
    """Return the recipe with the template that its run folder has kept, if any."""
    if not _has_template(recipe) or not (run / NAME).is_file():
        return recipe
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, chat_template=str(run / NAME)))


def save_template(recipe: Recipe, run: Path, folder: Path) -> None:
    """Save the run's template with the tokenizer of a folder; a run without one keeps the tokenizer's own."""
    from meshwright.engine.data.templates import read_template
    from meshwright.engine.hf_io.tokenizer_files import set_chat_template

    if not _has_template(recipe):
        return
    try:
        text = read_template(with_kept_template(recipe, run).data.chat_template)
    except InputError as error:
        warn(f"{folder} has no chat template: data.chat_template={recipe.data.chat_template}: {error.reason}")
        return
    set_chat_template(folder, text)


def _has_template(recipe: Recipe) -> bool:
    from meshwright.engine.diffusion.config import is_diffusion

    return bool(recipe.data.chat_template) and recipe.goal != "pretrain" and not is_diffusion(recipe)

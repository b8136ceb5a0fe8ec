"""The recipe of a run of ours, from the header of its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from meshwright import file_access, json_text
from meshwright.errors import InputError
from meshwright.models import is_path
from meshwright.models.trained_folder import METRICS
from meshwright.recipes.types import Recipe

HEADER = '{"kind":"header"'
CHECKPOINTS = "checkpoints"
TEMPLATE = "chat_template.jinja"  # that the run keeps a copy of


def is_run_folder(name: str | Path) -> bool:
    """Return whether a name is the folder of a run; a folder named as a shipped model or recipe needs ./ before it."""
    folder = Path(name).expanduser()
    return file_access.is_dir(folder) and (folder / METRICS).is_file() and is_path(str(name))


def recipe_of_run(name: str | Path) -> Recipe:
    """Return the recipe that a run was last started with."""
    folder = Path(name).expanduser()
    settings = _settings(folder)
    if settings is None:
        reason = f"its {METRICS} has no settings of a run"
        raise InputError(reason, field="recipe", value=str(name), fix=("the --out folder of meshwright train",))
    try:
        recipe = msgspec.convert(settings, Recipe)
    except msgspec.ValidationError as error:
        reason = f"its {METRICS} was written by another version: {error}"
        raise InputError(reason, field="recipe", value=str(name), fix=("a recipe by name or file",)) from None
    if not recipe.data.chat_template or not (folder / TEMPLATE).is_file():
        return recipe
    return msgspec.structs.replace(
        recipe, data=msgspec.structs.replace(recipe.data, chat_template=str(folder / TEMPLATE))
    )


def is_tiny_run(name: str | Path) -> bool:
    """Return whether a folder is that of a --tiny run, whose model is smaller than its recipe's.

    The header of a benchmark has the same mark, but a benchmark saves no checkpoints.
    """
    folder = Path(name).expanduser()
    return is_run_folder(name) and (folder / CHECKPOINTS).is_dir() and (_header(folder) or {}).get("tiny") is True


def _settings(folder: Path) -> dict[str, Any] | None:
    found = (_header(folder) or {}).get("settings")
    return found if isinstance(found, dict) else None


def _header(folder: Path) -> dict[str, Any] | None:
    """Return the last header of a run: a resumed run writes another one."""
    found = None
    try:
        with (folder / METRICS).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(HEADER):
                    found = json_text.loads(line)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

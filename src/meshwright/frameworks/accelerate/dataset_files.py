"""Local datasets as TRL's SFTTrainer reads them: rows with messages, with prompt and completion, or with text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.frameworks.automodel.dataset_files import CHECKED_ROWS, as_messages, has_weights
from meshwright.recipes.types import Data, Recipe

TOOLS = "tools"  # the only optional column that SFTTrainer reads
READ = ({"messages"}, {"prompt", "completion"}, {"text"})  # columns that SFTTrainer finds by their names


def readable(recipe: Recipe, read: Sequence[set[str]] = READ) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe with datasets that TRL reads, and the converted files that it names.

    `read` are the columns of rows that need no conversion, of TRL or of another trainer.
    """
    data, files = recipe.data, {}
    parts = {"dataset": data, "validation": msgspec.structs.replace(data, dataset=data.validation)}
    needed = {key: part for key, part in parts.items() if _needs_messages(part, read)}
    if recipe.goal == "pretrain" or data.images or data.blend or not needed:
        return recipe, {}
    changes: dict[str, Any] = {"columns": {}, "split": "train"} if "dataset" in needed else {}
    for key, part in needed.items():
        name = f"{Path(part.dataset).name.partition('.')[0]}.messages.jsonl"
        files[name], changes[key] = as_messages(part), name
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(data, **changes)), files


def _needs_messages(data: Data, read: Sequence[set[str]]) -> bool:
    """Return whether a local dataset has conversations in columns, or with roles, that the trainer does not know."""
    from meshwright.engine.data.conversations import REQUIRED, detect_columns
    from meshwright.engine.data.files import find_rows

    path = Path(data.dataset).expanduser()
    if not data.dataset or file_access.closed() or not path.exists():
        return False
    try:
        rows = find_rows(path, data.split, data.dataset)
        row = rows.first()
        detected = detect_columns(row, data.columns, data.dataset)
        ignored = [column for key, column in detected.items() if key not in (*REQUIRED, TOOLS)]
        for _, one in islice(rows, CHECKED_ROWS):
            if has_weights(one) or any(one.get(column) for column in ignored):
                return True  # TRL ignores both; the conversion moves the columns and refuses the weights
        return "text" not in detected and not any(one <= set(row) for one in read)
    except InputError:  # train reports rows that cannot be parsed at all
        return False

"""Local datasets as TRL's SFTTrainer reads them: rows with messages, with prompt and completion, or with text."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.frameworks.automodel.dataset_files import CHECKED_ROWS, as_messages, has_weights
from meshwright.recipes.types import Data, Recipe

READ = ({"messages"}, {"prompt", "completion"}, {"text"})  # columns that SFTTrainer finds by their names


def readable(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe with a dataset that TRL reads, and the converted file that it names."""
    data = recipe.data
    if recipe.goal == "pretrain" or data.images or data.blend or not _needs_messages(data):
        return recipe, {}
    name = f"{Path(data.dataset).name.partition('.')[0]}.messages.jsonl"
    changed = msgspec.structs.replace(data, dataset=name, columns={}, split="train")
    return msgspec.structs.replace(recipe, data=changed), {name: as_messages(data)}


def _needs_messages(data: Data) -> bool:
    """Return whether a local dataset has conversations in columns, or with roles, that TRL does not know."""
    from meshwright.engine.data.conversations import detect_columns
    from meshwright.engine.data.files import find_rows

    path = Path(data.dataset).expanduser()
    if not data.dataset or file_access.closed() or not path.exists():
        return False
    try:
        rows = find_rows(path, data.split, data.dataset)
        row = rows.first()
        if any(has_weights(one) for _, one in islice(rows, CHECKED_ROWS)):
            return True  # TRL ignores them: the conversion says so
        detected = detect_columns(row, data.columns, data.dataset)
        return "text" not in detected and not any(one <= set(row) for one in READ)
    except InputError:  # train reports rows that cannot be parsed at all
        return False

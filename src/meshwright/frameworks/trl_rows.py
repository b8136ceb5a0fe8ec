"""The rows of a local data file as TRL reads them: texts, prompts with completions, or conversations."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from meshwright import file_access
from meshwright.errors import MeshwrightError

Rows = Literal["", "completions", "texts", "other"]
CONVERSATIONS = ("messages", "conversations")
PAIR = ("prompt", "completion")


def has_completions(dataset: str, folder: Path | None = None) -> bool:
    """Return whether a local dataset has the columns prompt and completion."""
    return set(PAIR) <= _first_row(dataset, folder).keys()


def columns_of(dataset: str, folder: Path | None = None) -> set[str]:
    """Return the columns of the first row of a local dataset; none if it cannot be read."""
    return set(_first_row(dataset, folder))


def rows_of(dataset: str, folder: Path | None = None) -> Rows:
    """Return what the rows of a local dataset are: completions and texts are strings; empty if it cannot be read."""
    row = _first_row(dataset, folder)
    if not row:
        return ""
    if any(row.get(key) is not None for key in CONVERSATIONS):
        return "other"
    if all(isinstance(row.get(key), str) for key in PAIR):
        return "completions"
    return "texts" if isinstance(row.get("text"), str) else "other"


def _first_row(dataset: str, folder: Path | None) -> dict[str, Any]:
    if not dataset or file_access.closed():
        return {}
    name = Path(dataset).expanduser()
    try:
        path = next((one for one in (name, *([folder / name] if folder else [])) if one.exists()), None)
        return {} if path is None else _read_row(path.resolve(), path.stat().st_mtime_ns)
    except (MeshwrightError, OSError):  # check of the data reports what is wrong with it
        return {}


@lru_cache(maxsize=32)  # a check parses its file again for every fix that it tries
def _read_row(path: Path, changed: int) -> dict[str, Any]:
    """Return the first row of a dataset; `changed` is when it was written."""
    from meshwright.engine.data.files import find_rows

    return dict(find_rows(path, "train", str(path)).first())

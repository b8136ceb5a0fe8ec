"""Whether a file contains the rows of a dataset, not a config."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from meshwright import file_access

DATA_FILES = (".jsonl", ".jsonl.gz", ".ndjson", ".csv", ".tsv", ".parquet")  # that are no config of any framework
START_BYTES = 1 << 16  # of a .json file, which show what it is
ONLY_LIST = re.compile(rb'\{\s*"(?:data|rows|examples|samples|train|conversations)"\s*:\s*\[\s*\{')
LIST_OF_ROWS = re.compile(rb'\[\s*(?:[{"\]]|$)')  # a row is an object; check reports one that is a text
MESSAGES = re.compile(
    rb'"(?:messages|conversations)"\s*:\s*\[\s*\{\s*"(?:role|from|content|value)"\s*:'
)  # at any depth
JSON_LINES = re.compile(rb"\{[^\n]*\}\r?\n\{")


def is_dataset_file(target: object) -> bool:
    """Return whether a target is a file of data on this machine, by its suffix or the start of a .json file."""
    if not isinstance(target, str | Path) or file_access.closed():
        return False
    path = Path(target).expanduser()
    return path.is_file() and (path.name.lower().endswith(DATA_FILES) or _has_rows(path))


def _has_rows(path: Path) -> bool:
    """Return whether a .json file is a list of rows, an object with nothing but one, or one with conversations."""
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        start = file.read(START_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    starts = (LIST_OF_ROWS, ONLY_LIST, JSON_LINES)
    return any(one.match(start) for one in starts) or bool(MESSAGES.search(start))

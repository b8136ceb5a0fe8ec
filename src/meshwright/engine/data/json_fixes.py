"""Commands that write JSON files of data in a form that can be read: in UTF-8, one row per line, as a list of rows."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.engine.data import csv_format
from meshwright.engine.data.rewrite import rewritten

HEAD_BYTES = 1 << 16
OVER_LINES = re.compile(rb"\s*\{\s*\n")  # an object whose first line is not all of it
MESSAGE_KEYS = {"role", "from", "content", "value"}
DEEPEST = 4  # sections around a list of rows
SHOWN = 2
PROGRAM = "import json, sys; json.dump({}, sys.stdout)"
SPLIT = (
    "import json, re, sys; [print(json.dumps(json.loads(one))) for one in "
    're.split(r"\\n(?=\\{)", sys.stdin.read()) if one.strip()]'
)


def not_json_fix(path: Path, error: Exception) -> tuple[str, ...]:
    """Return the command for a file whose first row cannot be parsed: of another encoding, or with rows over lines."""
    if path.suffix == ".gz":
        return ()
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if "utf-8" in str(error).lower() or head.startswith(csv_format.UTF_16):
        return csv_format.utf8_fix(path)
    if OVER_LINES.match(head.removeprefix(codecs.BOM_UTF8)):
        return (_command(path, SPLIT, f"{path.stem}_lines.jsonl"),)
    return ()


def no_list_fix(path: Path, value: object) -> tuple[str, ...]:
    """Return the commands that write the lists of rows inside a JSON object to files of their own."""
    places = islice(_places(value, "json.load(sys.stdin)", 0), SHOWN)
    return tuple(_command(path, PROGRAM.format(place), f"{path.stem}_rows.json") for place in places)


def _places(value: object, text: str, depth: int) -> Iterator[str]:
    """Yield where lists of rows are, or rows by their ids; a list of messages is a part of a row."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value[:SHOWN]):
        yield from () if MESSAGE_KEYS & value[0].keys() else (text,)
    elif isinstance(value, dict) and depth < DEEPEST and not _is_conversation(value):
        items: dict[str, Any] = value
        if items and all(map(_is_conversation, items.values())):
            yield f"list({text}.values())"
            return
        for key, one in items.items():
            yield from _places(one, f"{text}[{json.dumps(key)}]", depth + 1)


def _is_conversation(value: object) -> bool:
    """Return whether a value is a row with messages."""
    parts = value.values() if isinstance(value, dict) else ()
    lists = (one for one in parts if isinstance(one, list) and one and isinstance(one[0], dict))
    return any(MESSAGE_KEYS & one[0].keys() for one in lists)


def _command(path: Path, program: str, name: str) -> str:
    return rewritten(f"python3 -c {shlex.quote(program)} < {shlex.quote(str(path))}", path.with_name(name))

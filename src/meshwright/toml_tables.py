"""The TOML files that come with Meshwright, read table by table: a command needs one of a hundred."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class TomlTables(Mapping[str, dict[str, Any]]):
    """The tables of a shipped file by the name in their header, each parsed when it is asked for.

    Not for files of users: keys above the first header are left out, and a table that nobody asks for may be invalid.
    """

    def __init__(self, path: Path) -> None:
        _, *parts = re.split(r"^\[([\w.-]+)\]$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        self._texts = dict(zip(parts[::2], parts[1::2], strict=True))
        self._parsed: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._parsed:
            self._parsed[name] = tomllib.loads(self._texts[name])
        return self._parsed[name]

    def every(self, key: str) -> dict[str, Any]:
        """Return the value of a key in every table that has it, on one line, without parsing the other lines."""
        line = re.compile(rf"^{key} = .*$", re.MULTILINE)
        found = {name: line.search(text) for name, text in self._texts.items()}
        texts = {name: one[0] for name, one in found.items() if one is not None}
        return dict(zip(texts, (tomllib.loads(text)[key] for text in texts.values()), strict=True))

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

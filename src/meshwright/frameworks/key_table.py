"""Tables of the keys that a framework accepts, written from its source by benchmarks/corpora/source_tables.py.

A line has the owner of some keys (a class, a section, or nothing for the top level) and its keys with their types and
choices: `dim:int alpha:int|float dropout_position:str=pre|post`. `**` accepts any key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import closest, some
from meshwright.recipes.values import meant_integer, meant_number
from meshwright.similar import abbreviated, names_another_thing

OPEN = "**"
TYPO = 80.0  # percent of matching characters above which an unknown key is a typing error
WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "list": "a list", "map": "a table",
    "str": "text"}  # fmt: skip
BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0", "y", "n", "t", "f")
PLACEHOLDER = re.compile(r"<.*>")  # a value that the user is asked to fill in
SAME_VALUE = (
    ("bnb", "bitsandbytes"),
    ("bf16", "bfloat16"),
    ("fp16", "float16", "half"),
    ("fp32", "float32", "float"),
    ("fsdp", "fsdp2"),  # of Accelerate: fsdp_version says which
    ("multi_gpu", "ddp"),
)
"""Names of one value, of which a list of choices has one."""
NULLS = ("none", "null", "")


class Key(msgspec.Struct, frozen=True):
    """A key that a framework accepts."""

    name: str
    types: tuple[str, ...] = ()  # empty: any
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str:
        """Return why a value is refused; empty if it is not. Text that contains a value of the type is accepted."""
        if value is None or (not self.types and not self.choices):
            return ""
        if isinstance(value, str) and (value.strip().lower() in NULLS or PLACEHOLDER.fullmatch(value.strip())):
            return ""
        if self.choices:
            return self._choice_problem(value)
        if any(_is_type(value, kind) for kind in self.types):
            return ""
        expected = " or ".join(dict.fromkeys(WORDS[kind] for kind in self.types if kind in WORDS))
        return f"expected {expected}" if expected else ""

    def _choice_problem(self, value: Any) -> str:
        if (isinstance(value, dict) and "map" in self.types) or (isinstance(value, bool) and "bool" in self.types):
            return ""
        known = {choice.lower() for choice in self.choices}
        for one in value if isinstance(value, list) else [value]:
            listed = ("int",) if any(choice.isdigit() for choice in self.choices) else ()  # the choices are numbers too
            others = [kind for kind in self.types if kind not in ("str", "none", "list", *listed)]
            text = str(one).lower()
            if text not in known and not any(_is_type(one, kind) for kind in others):
                return f"allowed: {', '.join((*self._switches, *self.choices))}"
        return ""

    def meant(self, value: Any) -> str:
        """Return the choice or the number that a refused value may mean; else empty."""
        if self.choices:
            near = meant_choices(str(value), (*self._switches, *self.choices))
            return near[0] if near else ""
        if "int" in self.types:
            return meant_integer(str(value), self.name) or ""
        return (meant_number(str(value), self.name) or "") if "float" in self.types else ""

    @property
    def _switches(self) -> tuple[str, ...]:
        return ("true", "false") if "bool" in self.types else ()


def meant_choices(text: str, choices: Sequence[str]) -> list[str]:
    """Return the values that a refused one may mean, best first; the only one if there is no other."""
    plain = text.strip().lower()
    same = [one for names in SAME_VALUE if plain in names for one in choices if one.lower() in names]
    return (
        same or abbreviated(text, choices) or closest(text, choices, 1) or (list(choices) if len(choices) == 1 else [])
    )


def _is_type(value: Any, kind: str) -> bool:
    text = str(value).strip()
    if kind == "bool":
        return isinstance(value, bool) or text.lower() in BOOLEANS
    if kind == "list":  # one item is often written without brackets
        return not isinstance(value, Mapping | bool)
    if kind == "map":
        return isinstance(value, Mapping) or (isinstance(value, str) and text.startswith("{"))
    if kind == "str":
        return not isinstance(value, Mapping)
    if isinstance(value, bool):
        return value is False and kind == "int"  # off: parsers read it as 0
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return False
    return kind == "float" or (kind == "int" and number.is_integer())


class KeyTable(msgspec.Struct, frozen=True):
    """Keys by owner."""

    commit: str
    owners: Mapping[str, Mapping[str, Key]]

    def find(self, owner: str, name: str) -> Key | None:
        """Return a key of an owner; None if it has none of this name."""
        return self.owners.get(owner, {}).get(name)

    def accepts_any(self, owner: str) -> bool:
        """Return whether an owner is unknown, or accepts every key."""
        return owner not in self.owners or OPEN in self.owners[owner]

    def near(self, owner: str, name: str) -> str:
        """Return the key of an owner that a mistyped one may mean; else empty."""
        return near_name(name, tuple(self.owners.get(owner, ())))

    def hint(self, owner: str, near: str) -> str:
        """Return what a message says about an unknown key."""
        return f"did you mean {near}?" if near else f"it accepts {some(sorted(self.owners.get(owner, ())), 6)}"


def near_name(name: str, known: tuple[str, ...]) -> str:
    """Return the name that a mistyped one may mean; else empty."""
    from rapidfuzz import fuzz, process

    short = abbreviated(name, known)
    if len(short) == 1:
        return short[0]
    found = process.extract(name.lower(), known, scorer=fuzz.ratio, processor=str.lower, score_cutoff=TYPO)
    return next((one for one, *_ in found if not names_another_thing(name, one)), "")


def parse_key(text: str) -> Key:
    """Return the key of a cell."""
    head, _, choices = text.partition("=")
    name, _, types = head.partition(":")
    return Key(
        name.removesuffix("!"), tuple(types.split("|")) if types else (), tuple(choices.split("|")) if choices else ()
    )


@cache
def read_table(path: Path) -> KeyTable:
    """Return the table of a file."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    return KeyTable(head.split()[2].rstrip(","), dict(_owners(lines)))


def _owners(lines: list[str]) -> Iterator[tuple[str, dict[str, Key]]]:
    for line in lines:
        owner, _, cells = line.partition("\t")
        yield owner, {one.name: one for one in map(parse_key, cells.split())}

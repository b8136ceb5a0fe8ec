"""Options that a command gives more than once: the parser uses the last value, and says nothing of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from meshwright.display import plural
from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.key_table import read_table
from meshwright.frameworks.launch_checks import imported_launch
from meshwright.frameworks.trainer import NUMBERS, SWITCHES, TRL_KEYS
from meshwright.frameworks.types import SourcedValue

if TYPE_CHECKING:
    from meshwright.rules.rule import Finding

ON = "true"  # a switch without a value is the same as with this one


class Use(msgspec.Struct, frozen=True):
    """One use of an option: as it is written, its value, and where it is."""

    written: str
    value: str
    at: SourcedValue


def repeated_options(content: Content, parsed: ParsedConfig, findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a note for every option of the training that has several values; one of the user's own may collect them.

    `findings` are those of the framework's own parser, which may report the same.
    """
    launch = imported_launch(content, parsed)
    reported = {one.field for one in findings if one.rule == "value.replaced"}
    uses: dict[str, list[Use]] = {}
    for name, use in _uses(() if launch is None else launch.args):
        uses.setdefault(name, []).append(use)
    for name, found in uses.items():
        several = len({one.value.lower() for one in found}) > 1
        is_open = any(one.at.unresolved or "$" in one.value for one in found)
        if several and not is_open and name not in reported and _keeps_last(name, parsed):
            yield _note(found)


def _keeps_last(name: str, parsed: ParsedConfig) -> bool:
    """Return whether an option is one of the framework's or the Trainer's, whose parsers keep the last value."""
    known = name in NUMBERS or name in SWITCHES or read_table(TRL_KEYS).find("", name) is not None
    return name in parsed.settings or parsed.program.is_front_end or (name in parsed.program.given and known)


def _uses(args: Sequence[SourcedValue]) -> Iterator[tuple[str, Use]]:
    """Yield the options of a command, and its overrides KEY=VALUE, by name."""
    starts = [at for at, one in enumerate(args) if _is_option(one) or _is_override(one)]
    for start, end in pairwise((*starts, len(args))):
        written, equals, value = str(args[start].value).partition("=")
        values = [value] if equals else [str(one.value) for one in args[start + 1 : end]]
        opened = next((one for one in args[start:end] if one.unresolved), args[start])
        name = written.lstrip("-").replace("-", "_")
        yield name, Use(written, " ".join(values) or ON, opened)


def _is_option(one: SourcedValue) -> bool:
    return str(one.value).startswith("--") and len(str(one.value)) > 2


def _is_override(one: SourcedValue) -> bool:
    key, equals, _ = str(one.value).partition("=")
    return bool(equals) and key.replace(".", "_").isidentifier()


def _note(uses: Sequence[Use]) -> str:
    last = uses[-1]
    times = "twice" if len(uses) == 2 else plural(len(uses), "time")
    earlier = " and ".join(f"{one.value} ({_place(one.at)})" for one in uses[:-1])
    return f"{last.written} is given {times}: the last value counts, {last.value} ({_place(last.at)}), not {earlier}"


def _place(at: SourcedValue) -> str:
    return f"{at.file}:{at.line}" if at.file else f"line {at.line}"

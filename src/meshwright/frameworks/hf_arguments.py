"""Arguments of a command as transformers' HfArgumentParser reads them.

It has `--name` and `--na-me` of every field, `--no_name` of a switch that is on by default, and every unambiguous
beginning of an option, as argparse does. A switch takes yes, true, t, y, 1 and their opposites.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from meshwright.frameworks.key_table import Key, KeyTable
from meshwright.frameworks.types import SourcedValue
from meshwright.rules.rule import Finding

TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
PLAIN = ("true", "false")
NO = "no_"
ON, VALUED = "=on", "=valued"  # owners of a table: switches that are on by default, and those that need a value


def is_switch(key: Key | None) -> bool:
    """Return whether a field is true or false."""
    return key is not None and "bool" in key.types and {*key.types} <= {"bool", "none"}


def as_parsed(
    args: Mapping[str, SourcedValue],
    known: KeyTable,
    *,
    shortened: bool = False,
    every_switch: bool = False,
    older: Collection[str] = (),
) -> dict[str, SourcedValue]:
    """Return arguments by the fields that they set, with other words for true and false as these.

    `shortened`: the beginning of an option is completed, except for `older` ones that a finding explains.
    `every_switch`: each switch has its `--no-name`, as with click.
    """
    found: dict[str, SourcedValue] = {}
    for written, setting in args.items():
        name = _completed(written, known) if shortened and written not in older else written
        field = negated(name, known, every_switch)
        if field and setting.value is True:
            found[field] = msgspec.structs.replace(setting, value=False)
            continue
        text = str(setting.value).lower()
        others = text in (*TRUE, *FALSE) and text not in PLAIN
        if others and is_switch(known.find("", name)) and not setting.unresolved:
            setting = msgspec.structs.replace(setting, value=text in TRUE)
        found[name] = setting
    return found


def negated(name: str, known: KeyTable, every_switch: bool = False) -> str:
    """Return the switch that `--no_name` turns off; empty if there is none."""
    field = name.removeprefix(NO)
    if field == name or known.find("", name):
        return ""
    is_on = is_switch(known.find("", field)) if every_switch else known.find(ON, field) is not None
    return field if is_on else ""


def _completed(written: str, known: KeyTable) -> str:
    """Return the one option that starts like this; the argument as it is written if there is none, or several.

    Both spellings count: a beginning without an underscore fits --max_steps and --max-steps.
    """
    if known.find("", written):
        return written
    names: tuple[str, ...] = (*known.owners.get("", ()), *(f"{NO}{name}" for name in known.owners.get(ON, ())))
    fitting = [name for name in names if name.startswith(written)]
    if len(fitting) != 1 or written == NO[:-1] or ("_" in fitting[0] and "_" not in written):
        return written
    return fitting[0]


def flags_without_value(argv: Sequence[SourcedValue], known: KeyTable, title: str) -> Iterator[Finding]:
    """Yield switches with the default None that are written without a value, which the parser refuses."""
    for at, word in enumerate(argv):
        name = str(word.value).removeprefix("--").replace("-", "_")
        following = str(argv[at + 1].value) if at + 1 < len(argv) else "--"
        if not str(word.value).startswith("--") or not known.find(VALUED, name) or not following.startswith("--"):
            continue
        message = f"--{name} needs a value: its default is None, and the parser of {title} expects true or false"
        yield Finding("value.invalid", "warning", name, message, (f"--{name} true",), word.file, word.line)

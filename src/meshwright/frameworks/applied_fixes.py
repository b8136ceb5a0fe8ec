"""Write fixes into the text of a config or launch script: every other line stays as it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import UNSET

from meshwright import config_io
from meshwright.errors import MeshwrightError

FORMATS = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
SCRIPTS = ("", ".sh", ".bash", ".sbatch", ".slurm")
_REMOVED = re.compile(r"(?:without|remove) (\S+)")
_EXPORT = re.compile(r"export (\w+)=(.*)")
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(\S+)")  # set before a command
_PLACEHOLDER = re.compile(r"(?<![\w/.$-])[A-Z][A-Z_]{3,}(?![\w=])")
_ASSIGNED = re.compile(r"([\w.\[\]-]+)\s*=\s*(.+)")
_LAST_FLAG = re.compile(r"(?:^|[\s(])--?[A-Za-z]")


class FixedText(msgspec.Struct, frozen=True, kw_only=True):
    """A text with fixes, those that are in it, and those that a person has to write or complete."""

    text: str
    applied: tuple[str, ...]
    left: tuple[str, ...] = ()
    to_complete: tuple[str, ...] = ()  # placeholders among the applied, such as --data-path PREFIX


def fixed_text(text: str, name: str, fixes: Sequence[str]) -> FixedText:
    """Return a file's text with fixes that are written as settings of it."""
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    applied, left = [], []
    for fix in dict.fromkeys(fixes):
        changed = _with_setting(text, FORMATS[ending], fix) if ending in FORMATS else None
        if ending in SCRIPTS:
            changed = _with_words(text, fix)
        if changed is None:
            left.append(fix)
        else:
            text = changed
            applied.append(fix)
    open_ = tuple(fix for fix in applied if _PLACEHOLDER.search(fix.partition("=")[2] or fix.partition(" ")[2]))
    return FixedText(text=text, applied=tuple(applied), left=tuple(left), to_complete=open_)


def _with_setting(text: str, format: str, fix: str) -> str | None:
    """Return a YAML, TOML or JSON text with one setting; None if the fix is not one."""
    changes = settings_of_fix(fix, format)
    with suppress(ValueError, TypeError, MeshwrightError):
        return config_io.edit(text, format, changes) if changes else None
    return None


def settings_of_fix(fix: str, format: str) -> dict[str, Any] | None:
    """Return what a fix sets in a YAML, TOML or JSON file, by dotted key; UNSET for a key that it removes.

    None if the fix is not written as settings.
    """
    removed = _REMOVED.fullmatch(fix)
    with suppress(ValueError, TypeError, MeshwrightError):
        return {removed[1].strip('"'): UNSET} if removed else dict(_flat(_parsed(fix, format)))
    return None


def _parsed(fix: str, format: str) -> Mapping[str, Any]:
    """Return the settings of a fix: `a.b = 2`, `a.b=text`, `a.b: 2` or `"a": {"b": 2}`."""
    if format == "json" and fix.lstrip().startswith('"'):
        return config_io.parse_tree(f"{{{fix}}}", "json", "fix")[0]
    assigned = _ASSIGNED.fullmatch(fix)
    if assigned is None:
        return config_io.parse_tree(fix, "yaml", "fix")[0]
    value = config_io.parse_tree(f"value: {assigned[2]}", "yaml", "fix")[0]["value"]
    return {assigned[1]: value}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        rows += _flat(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return rows


def _with_words(text: str, fix: str) -> str | None:
    """Return a script with a fix: a flag, an exported variable, or an option of torchrun or sbatch."""
    if removed := _REMOVED.fullmatch(fix):
        return re.sub(rf"{_flag(removed[1])}(?:[ =]+(?![-\\])\S+)?[ \t]?", "", text) if removed[1][:2] == "--" else None
    if variable := _EXPORT.fullmatch(fix):
        line = re.compile(rf"(?m)^(\s*)export {variable[1]}=.*$")
        return line.sub(rf"\g<1>{fix}", text) if line.search(text) else _after_header(text, fix)
    if before := _VARIABLE.fullmatch(fix):
        word = re.compile(rf"(?<![\w$-]){before[1]}=[^\s;]+")
        return word.sub(lambda _: fix, text) if word.search(text) else None
    if fix.startswith("#SBATCH --"):
        line = re.compile(rf"(?m)^#SBATCH {re.escape(fix.split()[1].partition('=')[0])}(?=[ =]).*$")
        return line.sub(lambda _: fix, text) if line.search(text) else _after_header(text, fix)
    with suppress(ValueError):
        words = shlex.split(fix)
        launcher = words.pop(0) if words and words[0] == "torchrun" else ""
        if words and words[0].startswith("--"):
            for flag, values in _flags(words):
                text = _with_flag(text, flag, values, launcher)
            return text
    return None


def _flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found


def _flag(name: str) -> str:
    """Return a pattern for a flag with either separator."""
    return r"(?<![\w-])--" + re.sub(r"[-_]", "[-_]", re.escape(name.lstrip("-")).replace(r"\-", "-")) + r"(?![\w-])"


def _with_flag(text: str, flag: str, values: Sequence[str], launcher: str) -> str:
    written = " ".join(map(shlex.quote, values))
    value = rf"[ =]+(?:(?![-\\])\S+)(?:[ ](?![-\\#])[^\s\\]+){{{max(len(values) - 1, 0)}}}" if values else ""
    present = re.compile(rf"({_flag(flag)}){value}")
    if present.search(text):
        return present.sub(lambda found: f"{found[1]} {written}".rstrip(), text)
    added = f"{flag} {written}".rstrip()
    if launcher:
        return re.sub(rf"\b{launcher}\b", lambda found: f"{found[0]} {added}", text, count=1)
    lines = text.split("\n")
    last = max((n for n, one in enumerate(lines) if _is_argument(one)), default=len(lines) - 1)
    line, comment = lines[last].rstrip(), lines[last][: len(lines[last]) - len(lines[last].lstrip())] or "  "
    if line.endswith("\\"):
        lines.insert(last + 1, f"{comment}{added} \\")
    elif line.endswith(")"):
        lines[last] = f"{line[:-1].rstrip()} {added})"
    else:
        lines[last : last + 1] = [f"{line} \\", f"{comment}{added}"]
    return "\n".join(lines)


def _is_argument(line: str) -> bool:
    return bool(_LAST_FLAG.search(line)) and not line.lstrip().startswith(("#", "export", "srun --help"))


def _after_header(text: str, line: str) -> str:
    """Return a script with a line after its comments at the top."""
    lines = text.split("\n")
    header = next((n for n, one in enumerate(lines) if not one.startswith("#")), len(lines))
    return "\n".join([*lines[:header], line, *lines[header:]])

"""Paths in the config of another framework's job, which runs in another folder than the user's program."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright import config_io, file_access
from meshwright.frameworks.common import FOLDERS
from meshwright.frameworks.load import content_of
from meshwright.frameworks.types import Program
from meshwright.launch.other_frameworks import full_path

CONFIGS = (".toml", ".yaml", ".yml", ".json")
OUTPUTS = frozenset(
    ("cache", "dump", "log", "logging", "logs", "out", "output", "outputs", "results", "save", "tb", "tensorboard",
     "trace", "traces", "wandb")
)  # fmt: skip
"""Words in the names of keys whose folder the run creates: it stays relative to the folder of the job."""
INPUT_ENDS = ("_path", "_file", "_dir", "_folder")


class Located(NamedTuple):
    """The files and the program of a job with full paths, the paths that it reads by key, and notes."""

    files: Mapping[str, str]
    program: Program
    reads: Mapping[str, str]  # full path → its key
    notes: tuple[str, ...]


def located(
    files: Mapping[str, str], program: Program, key_map: str, bases: Sequence[Path], folder: str, notes: Sequence[str]
) -> Located:
    """Return a job's config and arguments with the full paths of what is on this machine.

    A relative path is looked for in `bases`. What is not here is in the notes, unless `notes` already names it: the
    program looks for it in the `folder` in which it starts.
    """
    if file_access.closed():
        return Located(files, program, {}, ())
    reads: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    written = dict(files)
    for name, text in files.items():
        if not name.endswith(CONFIGS):
            continue
        content = content_of(text, name)
        changes: dict[str, Any] = {}
        for key, setting in content.settings.items():
            if setting.unresolved or _is_output(key, key_map) or setting.value in [*files]:
                continue  # a file of the job is in its folder
            found = _located(key, setting.value, bases, reads, missing)
            if found != setting.value:
                changes[key] = found
        written[name] = config_io.edit(text, content.format, changes)
    argv = tuple(_arguments(program, files, key_map, bases, reads, missing))
    lost = (
        f"{' and '.join(keys)}: {text} is not on this machine, and the job looks for it in {folder}: "
        "write its full path"
        for text, keys in missing.items()
        if not any(text in note for note in notes)
    )
    return Located(written, msgspec.structs.replace(program, argv=argv), reads, tuple(lost))


def _arguments(
    program: Program,
    files: Collection[str],
    key_map: str,
    bases: Sequence[Path],
    reads: dict[str, str],
    missing: dict[str, list[str]],
) -> Iterator[str]:
    """Yield the program and its arguments, with full paths; the job's own files are in its folder."""
    option = ""
    for number, word in enumerate(program.argv):
        name, equals, value = word.partition("=")
        is_pair = bool(equals) and "/" not in name
        option = name if word.startswith("-") or is_pair else option
        key = option.lstrip("-").replace("-", "_") if option.startswith("--") else option
        fixed = not number or not option or word in program.expanded or "$" in word or _is_output(key, key_map)
        if fixed or word in files or value in files or (word.startswith("-") and not equals):
            yield word
        elif is_pair:
            yield f"{name}={_located(key, value, bases, reads, missing)}"
        else:
            yield str(_located(option, word, bases, reads, missing))


def _located(key: str, value: Any, bases: Sequence[Path], reads: dict[str, str], missing: dict[str, list[str]]) -> Any:
    """Return a value with full paths; record those that are read, and those that are not here."""
    if isinstance(value, list):
        return [_located(key, one, bases, reads, missing) for one in value]
    if not isinstance(value, str) or "$" in value or "://" in value or "\n" in value:
        return value
    if value.startswith("/"):
        reads[value] = key
        return value
    for base in bases:
        found = full_path(value, bare=False, start=base)
        if found != value:
            reads[found] = key
            return found
    last = key.rsplit(".", 1)[-1].lstrip("-").replace("-", "_")
    is_input = last.endswith(INPUT_ENDS) and "name_or" not in last and "/" in value
    if value.startswith(("./", "../", "~/")) or (is_input and " " not in value):
        missing.setdefault(value, []).append(key)
    return value


def _is_output(key: str, key_map: str) -> bool:
    """Return whether the run writes to the folder that a key names."""
    return key in FOLDERS.get(key_map, ())[:2] or bool(OUTPUTS & set(key.rsplit(".", 1)[-1].split("_")))

"""The files and commands that start a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from meshwright.errors import InputError, OutputError


class Launch(msgspec.Struct, frozen=True):
    """A job as files and commands, for a scheduler or a person."""

    scheduler: str
    files: Mapping[str, str]  # content by name
    commands: tuple[str, ...]  # to run in the folder of the files
    places: tuple[str, ...] = ()  # host of each command
    notes: tuple[str, ...] = ()


def write(launch: Launch, folder: str, overwrite: bool = False) -> tuple[str, ...]:
    """Write the files into a folder; an existing file with other content is kept unless `overwrite` is set."""
    paths = {Path(folder) / name: text for name, text in launch.files.items()}
    different = [path for path, text in paths.items() if not overwrite and _differs(path, text)]
    if different:
        reason = f"{different[0]} already exists with different content"
        raise InputError(reason, field="--write", value=folder, fix=("--overwrite", "another --write folder"))
    for path, text in paths.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write: {error.strerror}", field="--write", value=str(path)) from error
    return tuple(str(path) for path in paths)


def _differs(path: Path, text: str) -> bool:
    if not path.exists():
        return False
    try:
        return path.read_text(encoding="utf-8") != text
    except (OSError, ValueError):
        return True

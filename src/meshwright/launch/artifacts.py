"""What starting a job needs: files, and the commands that use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from meshwright.errors import InputError, OutputError


class Launch(msgspec.Struct, frozen=True):
    """A job as it is handed to a scheduler or to a person."""

    on: str
    files: Mapping[str, str]  # text by name
    commands: tuple[str, ...]  # what to run, where the files lie
    places: tuple[str, ...] = ()  # the host that each command is for
    notes: tuple[str, ...] = ()


def write(launch: Launch, folder: str, overwrite: bool = False) -> tuple[str, ...]:
    """Writes the files into a folder; a different file of the same name stays unless told otherwise."""
    paths = {Path(folder) / name: text for name, text in launch.files.items()}
    different = [path for path, text in paths.items() if not overwrite and _differs(path, text)]
    if different:
        reason = f"{different[0]} is there already and says something else"
        raise InputError(reason, field="--write", value=folder, fix=("--overwrite", "another --write folder"))
    for path, text in paths.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", field="--write", value=str(path)) from error
    return tuple(str(path) for path in paths)


def _differs(path: Path, text: str) -> bool:
    if not path.exists():
        return False
    try:
        return path.read_text(encoding="utf-8") != text
    except (OSError, ValueError):
        return True

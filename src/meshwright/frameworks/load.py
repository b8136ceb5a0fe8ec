"""Opening a file that a user names: its format, its settings with their lines, the trainings a script starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshwright import config_io, file_access
from meshwright.errors import InputError
from meshwright.frameworks.framework import Content, Format
from meshwright.frameworks.types import SourcedValue

SUFFIXES: Mapping[str, Format] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".py": "python",
    ".sh": "shell",
    ".bash": "shell",
    ".sbatch": "shell",
    ".slurm": "shell",
    ".sub": "shell",
    ".args": "shell",
    ".txt": "shell",
}


def open_file(path: str | Path) -> Content:
    """The content of a file; what cannot be read safely is an error that says why."""
    place = Path(path)
    folder = None if file_access.closed() else place.parent
    return content_of(config_io.read_text(place), str(path), folder=folder)


def content_of(text: str, path: str, format: Format | None = None, folder: Path | None = None) -> Content:
    """The content of a text that stands, or could stand, at a path."""
    kind = format or format_of(path, text)
    if kind == "shell":
        from meshwright.frameworks.shell import find_launches, read_script

        script = read_script(text, path, folder)
        return Content(path, text, kind, folder, script=script, launches=find_launches(script))
    if kind == "python":
        return Content(path, text, kind, folder)
    found = config_io.parse_leaves(text, kind, path)
    settings = {key: SourcedValue(leaf.value, leaf.line, path, pyyaml=leaf.pyyaml) for key, leaf in found.items()}
    return Content(path, text, kind, folder, settings=settings)


def format_of(path: str, text: str) -> Format:
    """The format of a file by its name, or by how it begins when the name does not say."""
    suffix = Path(path).suffix.lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    begin = text.lstrip()[:2]
    if begin[:1] == "{":
        return "json"
    if begin in ("#!", "--") or "torchrun" in text or "#SBATCH" in text:
        return "shell"
    raise InputError(
        "is of no format that is read here",
        field="file",
        value=path,
        fix=[f"name it with one of {', '.join(SUFFIXES)}"],
    )

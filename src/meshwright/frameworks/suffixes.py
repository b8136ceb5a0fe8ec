"""The suffixes of files, and whether a name is a file: all that a command about a model needs of this package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import file_access

if TYPE_CHECKING:
    from meshwright.frameworks.framework import Format

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


def is_file(name: str) -> bool:
    """Return whether a name refers to a file rather than a shipped recipe."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES or file_access.exists(path)

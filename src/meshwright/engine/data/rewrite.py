"""Fixes that write a data file anew: a shell command, and the option that names the file it writes."""

from __future__ import annotations

import shlex
from pathlib import Path


def rewritten(command: str, written: Path) -> str:
    """Return the fix whose command writes a file, and the option with which the file is used."""
    name = shlex.quote(str(written))
    return f"{command} > {name}, then --dataset {name}"

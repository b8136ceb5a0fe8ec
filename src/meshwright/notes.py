"""Notes for the user on stderr: how an ambiguous input was understood."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache


@cache
def note(text: str) -> None:
    """Print a note to stderr: once per process, and on one rank only."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0" and sys.stderr is not None:
        with suppress(OSError, ValueError):  # a closed stderr must not end the command
            print(f"note: {text}", file=sys.stderr, flush=True)

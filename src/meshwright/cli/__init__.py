"""The command line: parse, call the front desk, render."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress


def main() -> None:
    """Entry point of the `meshwright` command."""
    # numpy's BLAS starts a thread per core when it is imported; the adviser never multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # an answer takes a fraction of a second; looking for cycles meanwhile costs a tenth of it
    from meshwright.cli.run import run

    try:
        run()
    except SystemExit as ended:
        if "torch" not in sys.modules and isinstance(ended.code, int):
            _leave(ended.code)
        raise


def _leave(code: int) -> None:
    """Ends the process at once: an adviser has nothing to clean up, and freeing every module takes 0.05 s."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, gone, or never there
            stream.flush()
    os._exit(code)

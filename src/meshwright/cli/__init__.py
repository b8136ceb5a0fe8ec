"""The command line: parse, call the API, print."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress


def main() -> None:
    """Entry point of the `meshwright` command."""
    # numpy's BLAS starts a thread per core when it is imported; no planning command multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # a command takes a fraction of a second; collecting cycles would add a tenth
    from meshwright.cli.run import run

    try:
        run()
    except SystemExit as ended:
        if "torch" not in sys.modules and isinstance(ended.code, int):
            _exit_now(ended.code)
        raise


def _exit_now(code: int) -> None:
    """Exit without cleanup: there is nothing to clean up, and freeing every module takes 0.05 s."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or missing
            stream.flush()
    os._exit(code)

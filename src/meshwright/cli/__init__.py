"""The command line: parse, call the front desk, render."""

from __future__ import annotations

import gc
import os


def main() -> None:
    """Entry point of the `meshwright` command."""
    # numpy's BLAS starts a thread per core when it is imported; the adviser never multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # an answer takes a fraction of a second; looking for cycles meanwhile costs a tenth of it
    from meshwright.cli.run import run

    run()

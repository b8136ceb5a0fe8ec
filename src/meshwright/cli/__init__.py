"""The command line: parse, call the front desk, render."""

from __future__ import annotations

import os


def main() -> None:
    """Entry point of the `meshwright` command."""
    # numpy's BLAS starts a thread per core when it is imported; the adviser never multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from meshwright.cli.run import run

    run()

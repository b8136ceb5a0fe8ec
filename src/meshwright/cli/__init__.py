"""The command line: parse, call the API, print."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress

STOPPED = (75, 128 + signal.SIGINT)  # exit codes


def main() -> None:
    """Entry point of the `meshwright` command."""
    # numpy's BLAS starts a thread per core when it is imported; no planning command multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # a command takes a fraction of a second; collecting cycles would add a tenth
    _restore_ctrl_c()
    try:
        from meshwright.cli.run import run

        run()
    except KeyboardInterrupt:  # while modules are imported
        sys.stderr.write("interrupted\n")
        _exit_now(128 + signal.SIGINT)
    except SystemExit as ended:
        if ended.code in STOPPED:  # another Ctrl-C must not turn the exit into a traceback
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        if "torch" not in sys.modules and isinstance(ended.code, int):
            _exit_now(ended.code)
        raise


def _restore_ctrl_c() -> None:
    """Handle Ctrl-C as the foreground job of a terminal even if the program that started this one ignores it."""
    with suppress(OSError, ValueError, AttributeError):
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and os.tcgetpgrp(0) == os.getpgrp():
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_now(code: int) -> None:
    """Exit without cleanup: there is nothing to clean up, and freeing every module takes 0.05 s."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or missing
            stream.flush()
    os._exit(code)

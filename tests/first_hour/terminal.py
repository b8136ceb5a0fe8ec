"""Runs a command in a pseudo-terminal and presses Ctrl-C or sends signals when a text appears."""

from __future__ import annotations

import gc
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).parents[2]
CTRL_C = b"\x03"
SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CLEARED = re.compile(r"[^\n]*\r\x1b\[2K")

Action = bytes | signal.Signals


class Transcript(NamedTuple):
    """What the terminal showed, and the exit code."""

    code: int
    raw: str

    @property
    def text(self) -> str:
        """The output without escape sequences."""
        return ESCAPES.sub("", self.raw).replace("\r", "")

    @property
    def last_line(self) -> str:
        """The last line with text that was not cleared."""
        shown = self._replace(raw=CLEARED.sub("", self.raw))
        return [line for line in shown.text.splitlines() if line.strip(" ^C")][-1]

    @property
    def cursor_visible(self) -> bool:
        """Whether the cursor was shown again after it was hidden."""
        return self.raw.rfind(SHOW) >= self.raw.rfind(HIDE)


def in_terminal(
    arguments: Sequence[str],
    actions: Sequence[tuple[str | float, Action]],
    cwd: Path,
    timeout: float = 120.0,
    forked: bool = False,
) -> Transcript:
    """Run `meshwright` with arguments; do each action when its text was seen, or its seconds have passed.

    A forked command has what this process imported: importing torch takes most of the time of a short run.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ |= {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        if forked:
            _run_here(arguments)
        os.execv(sys.executable, [sys.executable, "-m", "meshwright", *arguments])
    output, seen, waiting = b"", 0, list(actions)
    until, last = time.monotonic() + timeout, time.monotonic()
    while True:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        if select.select([terminal], [], [], 0.02)[0]:
            try:
                output += os.read(terminal, 1 << 16)
            except OSError:  # the terminal is closed with its last process
                break
        if waiting and _due(waiting[0][0], output[seen:], last):
            _, action = waiting.pop(0)
            seen, last = len(output), time.monotonic()
            if isinstance(action, bytes):
                os.write(terminal, action)
            else:
                os.kill(pid, action)
    os.close(terminal)
    return Transcript(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output.decode(errors="replace"))


def _run_here(arguments: Sequence[str]) -> NoReturn:
    """Run the command in this fork as `python -m meshwright` would; end the process."""
    from meshwright import __main__ as started
    from meshwright.cli.run import run

    gc.freeze()  # objects of the parent may belong to threads that do not exist in the fork
    sys.argv = [str(started.__file__), *arguments]
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate(("r", "w", "w")))
    code = 99
    try:
        run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _due(trigger: str | float, output: bytes, last: float) -> bool:
    if isinstance(trigger, str):
        return trigger in ESCAPES.sub("", output.decode(errors="replace"))
    return time.monotonic() - last >= trigger

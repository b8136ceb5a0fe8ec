"""Megatron's table of timers with a line per rank (--timing-log-option all)."""

from __future__ import annotations

import re
from collections.abc import Callable

from meshwright.doctor.formats.text import NUMBER, number

TITLE = "times across ranks (ms):"
TIMER = re.compile(r"(?:^|\s)([a-z][\w/-]*):\s*$")
RANK = re.compile(rf"(?:^|\s)rank\s+(\d+):\s*({NUMBER})\s*$")


class RankTimes:
    """Collects such tables; lines of other ranks may stand between theirs, so a table is open until `end`."""

    def __init__(self, done: Callable[[str, dict[int, float]], None]) -> None:
        self._done = done  # called with a timer and its seconds by rank
        self._open, self._timer = False, ""
        self._times: dict[int, float] = {}

    def takes(self, text: str) -> bool:
        """Read a line; return whether it is one of a table."""
        if TITLE in text:
            self.end()
            self._open = True
            return True
        if not self._open:
            return False
        if self._timer and (found := RANK.search(text)):
            self._times[int(found[1])] = (number(found[2]) or 0.0) / 1e3
            return True
        if found := TIMER.search(text):
            self._finish()
            self._timer = found[1]
            return True
        return False

    def end(self) -> None:
        """End the table."""
        self._finish()
        self._open, self._timer = False, ""

    def _finish(self) -> None:
        if self._times:
            self._done(self._timer, self._times)
        self._times = {}

"""Collects the steps of a log: which start they belong to, and how many steps a line covers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from meshwright.doctor.run import Step, Validation

SHORTEST_INTERVAL = 1
TICKS = 30  # of a clock that one measured time has at least: reading it twice is off by up to one tick, here 3 %
MAX_LAG = 3  # lines by which a rank may log a step later than another


class Steps:
    """The steps collected so far; later figures of the same step are added to it."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self._tick_s = tick_s  # to which times of the log are rounded; 0: they are exact
        self._rows: list[dict[str, Any]] = []
        self._attempt, self._at_start = 0, True
        self._blocked = 0.0
        self._uncertain: set[int] = set()  # starts whose first line may cover several steps
        self.starts: list[int] = []
        self._validations: dict[tuple[str, int], Validation] = {}

    def start(self, first: int | None = None) -> None:
        """Start a new attempt, at this step if the log names one."""
        if self._rows and not self._at_start:
            self._attempt += 1
        self._at_start = True
        if first is not None:
            self._note_start(first)

    def add(self, step: int, line: int, **figures: Any) -> None:
        """Add a step with its metrics; a step that another rank already logged is dropped."""
        last = self._rows[-1] if self._rows else None
        if last is not None and not self._at_start:
            if step in self._recent_steps():
                return
            if step < last["step"]:  # restarted without a message
                self._attempt += 1
                self._at_start = True
        if self._at_start and len(self.starts) <= self._attempt:
            self._note_start(step)
            if "covers" not in figures:
                self._uncertain.add(self._attempt)
        figures = {name: value for name, value in figures.items() if value is not None}
        blocked, self._blocked = self._blocked, 0.0
        blocked += figures.pop("blocked_s", 0.0)
        row = {"step": step, "line": line, "attempt": self._attempt, "blocked_s": blocked, **figures}
        row.setdefault("covers", self._covers(step))
        self._rows.append(row)
        self._at_start = False

    def amend(self, **figures: Any) -> None:
        """Add metrics to the latest step."""
        if not self._rows:
            return
        for name, value in figures.items():
            if isinstance(value, dict):
                self._rows[-1].setdefault(name, {}).update(value)
            else:
                self._rows[-1][name] = value

    def add_part(self, name: str, seconds: float) -> None:
        """Add seconds to a part of the latest step."""
        if self._rows:
            parts = self._rows[-1].setdefault("parts_s", {})
            parts[name] = parts.get(name, 0.0) + seconds

    def block(self, seconds: float) -> None:
        """Record time that training was blocked since the latest step."""
        self._blocked += seconds

    def validated(self, step: int | None, loss: float | None, line: int, name: str = "") -> None:
        """Record a validation loss, by default of the latest step; one that is repeated replaces the earlier one."""
        step = self.last if step is None else step
        if loss is not None and step is not None:
            self._validations[name, step] = Validation(step=step, loss=loss, line=line, name=name)

    @property
    def validations(self) -> tuple[Validation, ...]:
        """The validation losses, in order of their steps."""
        return tuple(sorted(self._validations.values(), key=lambda one: one.step))

    def all(self) -> tuple[Step, ...]:
        """Return the steps."""
        if self._rows and self._blocked:
            self._rows[-1]["blocked_s"] += self._blocked
            self._blocked = 0.0
        for first, second in pairwise(self._rows):
            if first["attempt"] in self._uncertain and first["attempt"] == second["attempt"]:
                first["covers"] = max(1, min(first["step"], second["step"] - first["step"]))
                self._uncertain.discard(first["attempt"])
        for rows in self._timed_together():
            passed = sum(self._passed_s(row) for row in rows)
            each = passed / sum(self._rows[row]["covers"] for row in rows)
            for row in rows:
                self._rows[row].update({"seconds": each} if passed > 0 else {})
        return tuple(Step(**row) for row in self._rows)

    def _timed_together(self) -> Iterator[list[int]]:
        """Yield the rows that the clock can tell from those before: alone, or several of a clock with long ticks."""
        least, together = TICKS * self._tick_s, list[int]()
        for at, (first, second) in enumerate(pairwise(self._rows), 1):
            timed = first["attempt"] == second["attempt"] and "at_s" in first and "at_s" in second
            timed = timed and "seconds" not in second
            if together and (not timed or self._passed_s(at) >= least):
                yield together
                together = []
            if timed:
                together.append(at)
            if together and (not least or sum(map(self._passed_s, together)) >= least):
                yield together
                together = []
        if together:
            yield together

    def _passed_s(self, row: int) -> float:
        """Return the seconds between a row and the one before, without the time that training was blocked."""
        now, before = self._rows[row], self._rows[row - 1]
        return float(now["at_s"] - before["at_s"] - now["blocked_s"])

    @property
    def memory(self) -> float:
        """The highest memory logged so far for the latest step."""
        return float(self._rows[-1].get("memory_gib", 0.0)) if self._rows else 0.0

    @property
    def last(self) -> int | None:
        """The latest step."""
        return self._rows[-1]["step"] if self._rows else None

    def _recent_steps(self) -> list[int]:
        """Return the latest steps of this start; an earlier step means a restart."""
        return [row["step"] for row in self._rows[-MAX_LAG:] if row["attempt"] == self._attempt]

    def _note_start(self, step: int) -> None:
        while len(self.starts) <= self._attempt:
            self.starts.append(step)

    def _covers(self, step: int) -> int:
        """Return the steps since the previous line; the first line of a start covers those since its beginning."""
        if self._at_start:
            return max(SHORTEST_INTERVAL, step - self.starts[self._attempt] + 1)
        return max(SHORTEST_INTERVAL, step - int(self._rows[-1]["step"]))

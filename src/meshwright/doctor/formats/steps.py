"""Collecting the steps of a log one after another: which start they belong to, how many one line stands for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from meshwright.doctor.run import Step

SHORTEST_INTERVAL = 1
LATE = 3  # lines by which a rank may tell a step after another has


class Steps:
    """The steps told so far; figures that a log tells later of the same step are added to it."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._attempt, self._begins = 0, True
        self._blocked = 0.0
        self._guessed: set[int] = set()  # starts whose first line does not say how many steps it stands for
        self.starts: list[int] = []

    def start(self, first: int | None = None) -> None:
        """The log says that training begins, at this step where it says one."""
        if self._rows and not self._begins:
            self._attempt += 1
        self._begins = True
        if first is not None:
            self._note_start(first)

    def add(self, step: int, line: int, **figures: Any) -> None:
        """A step with its figures; one that was told before, by another rank, is left out."""
        last = self._rows[-1] if self._rows else None
        if last is not None and not self._begins:
            if step in self._lately():
                return
            if step < last["step"]:  # started again without saying so
                self._attempt += 1
                self._begins = True
        if self._begins and len(self.starts) <= self._attempt:
            self._note_start(step)
            if "covers" not in figures:
                self._guessed.add(self._attempt)
        figures = {name: value for name, value in figures.items() if value is not None}
        blocked, self._blocked = self._blocked, 0.0
        blocked += figures.pop("blocked_s", 0.0)
        row = {"step": step, "line": line, "attempt": self._attempt, "blocked_s": blocked, **figures}
        row.setdefault("covers", self._covers(step))
        self._rows.append(row)
        self._begins = False

    def amend(self, **figures: Any) -> None:
        """Figures of the step that was told last."""
        if not self._rows:
            return
        for name, value in figures.items():
            if isinstance(value, dict):
                self._rows[-1].setdefault(name, {}).update(value)
            else:
                self._rows[-1][name] = value

    def add_part(self, name: str, seconds: float) -> None:
        """Adds seconds to a part of the step that was told last."""
        if self._rows:
            parts = self._rows[-1].setdefault("parts_s", {})
            parts[name] = parts.get(name, 0.0) + seconds

    def block(self, seconds: float) -> None:
        """Training waited so long since the step that was told last."""
        self._blocked += seconds

    def all(self) -> tuple[Step, ...]:
        """The steps."""
        if self._rows and self._blocked:
            self._rows[-1]["blocked_s"] += self._blocked
            self._blocked = 0.0
        for first, second in pairwise(self._rows):
            if first["attempt"] in self._guessed and first["attempt"] == second["attempt"]:
                first["covers"] = max(1, min(first["step"], second["step"] - first["step"]))
                self._guessed.discard(first["attempt"])
        return tuple(Step(**row) for row in self._rows)

    @property
    def memory(self) -> float:
        """The most memory told of the last step so far."""
        return float(self._rows[-1].get("memory_gib", 0.0)) if self._rows else 0.0

    @property
    def last(self) -> int | None:
        """The step that was told last."""
        return self._rows[-1]["step"] if self._rows else None

    def _lately(self) -> list[int]:
        """The last few steps told of this start; who goes back further has started again."""
        return [row["step"] for row in self._rows[-LATE:] if row["attempt"] == self._attempt]

    def _note_start(self, step: int) -> None:
        while len(self.starts) <= self._attempt:
            self.starts.append(step)

    def _covers(self, step: int) -> int:
        """Steps since the line before; the first line of a start stands for those since its beginning."""
        if self._begins:
            return max(SHORTEST_INTERVAL, step - self.starts[self._attempt] + 1)
        return max(SHORTEST_INTERVAL, step - int(self._rows[-1]["step"]))

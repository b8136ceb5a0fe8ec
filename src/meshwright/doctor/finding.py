"""What the doctor says: what is wrong, by which figures, and what to try, cheapest first."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from meshwright.rules import Severity

What = Literal["layout", "contract", "environment", "action"]


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """Something to try, and what it would do by the estimate."""

    try_: tuple[str, ...] = msgspec.field(
        name="try"
    )  # overrides as they are typed, settings of the shell, or a sentence
    what: What
    why: str
    there: tuple[str, ...] = ()  # the same in the words of the framework that ran
    peak_gib: float | None = None  # memory with it
    fits: bool | None = None
    step_ratio: float | None = None  # step time with it, over that without


class Evidence(msgspec.Struct, frozen=True):
    """One figure of the run, beside what it is held against."""

    name: str
    value: float | str
    unit: str = ""
    against: float | str | None = None
    against_what: str = ""  # estimate, limit, median, …


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a run."""

    id: str
    severity: Severity
    message: str
    steps: tuple[int, int] | None = None  # the first and last that show it
    lines: tuple[str, ...] = ()  # file:line, with the words where they are telling
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()


class Figure(msgspec.Struct, frozen=True):
    """A figure of the run beside the estimate's, for runs that nothing is wrong with too."""

    name: str
    unit: str
    measured: float
    estimate: float | None = None


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found out about a run."""

    kind: str
    path: str
    file: str
    recipe: str | None
    model: str | None
    gpus: str | None
    engine: str | None
    steps: int  # lines that tell steps
    last_step: int
    total_steps: int | None
    starts: int
    figures: tuple[Figure, ...]
    mfu_convention: str
    findings: tuple[Finding, ...]
    looked_for: tuple[str, ...]  # the ids of everything that was examined
    not_examined: dict[str, str]  # what could not be, and what it would take
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Plain values; figures that are not finite are spelled."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

"""Types of a diagnosis: findings, their evidence, and remedies with the cheapest first."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from meshwright.display import Readable, Row, titled
from meshwright.doctor.curves import Curve
from meshwright.rules import Severity

What = Literal["layout", "contract", "environment", "action"]


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """Something to try, and its estimated effect."""

    try_: tuple[str, ...] = msgspec.field(name="try")  # overrides, environment variables, or a sentence
    what: What
    why: str
    there: tuple[str, ...] = ()  # the same as settings of the framework that ran
    peak_gib: float | None = None  # peak memory with the change
    fits: bool | None = None
    step_ratio: float | None = None  # step time with the change over that without


class Evidence(msgspec.Struct, frozen=True):
    """One figure of the run and what it is compared with."""

    name: str
    value: float | str
    unit: str = ""
    against: float | str | None = None
    against_what: str = ""  # estimate, limit, median, …


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a run."""

    id: str
    severity: Severity
    message: str
    steps: tuple[int, int] | None = None  # first and last step that show it
    lines: tuple[str, ...] = ()  # file:line, with the log's text if it helps
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def rule(self) -> str:
        """Its id, by the name that the findings of a check and the JSON have."""
        return self.id


class Figure(msgspec.Struct, frozen=True):
    """A measured figure of the run with its estimate; also reported for healthy runs."""

    name: str
    unit: str
    measured: float
    estimate: float | None = None


class Checkup(Readable, msgspec.Struct, frozen=True, kw_only=True):
    """The result of examining a run."""

    kind: str
    path: str
    file: str
    recipe: str | None
    model: str | None
    gpus: str | None  # None also for a run on CPUs
    cpu_ranks: int | None  # of a run on CPUs
    engine: str | None
    steps: int  # log lines with step metrics
    last_step: int
    total_steps: int | None
    starts: int
    figures: tuple[Figure, ...]
    mfu_convention: str
    findings: tuple[Finding, ...]
    looked_for: tuple[str, ...]  # ids of the diagnoses that were possible
    not_examined: dict[str, str]  # id -> what the log lacks for that diagnosis
    notes: tuple[str, ...] = ()
    curves: tuple[Curve, ...] = ()  # if they were requested

    def summary(self) -> list[Row]:
        """Return what ran, its figures, and the findings with their cheapest remedies."""
        ran = " · ".join(filter(None, (self.recipe or self.model, self.gpus, self.engine)))
        steps = f"{self.last_step:,} of {self.total_steps:,}" if self.total_steps else f"{self.last_step:,}"
        figures = [
            f"{one.name} {one.measured:.4g} {one.unit}".rstrip()
            + ("" if one.estimate is None else f" (estimate {one.estimate:.4g})")
            for one in self.figures
        ]
        found = [line for one in self.findings for line in _finding_lines(one)]
        return [
            ("Run", self.path + (f": {ran}" if ran else "")),
            ("Steps", steps),
            *titled("Figures", figures),
            *titled("Findings", found or ["none"]),
            *titled("Notes", self.notes),
        ]

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the checkup as plain values."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built if self.curves else {name: value for name, value in built.items() if name != "curves"}


def _finding_lines(finding: Finding) -> list[str]:
    """Return a finding and its first remedy."""
    remedies = [f"  try: {' '.join(one.try_)} ({one.why})" for one in finding.remedies[:1]]
    return [f"{finding.severity}: {finding.message} ({finding.id})", *remedies]

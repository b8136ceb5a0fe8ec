"""The result of checking a recipe or a config of any framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from meshwright.clusters import Cluster
from meshwright.costs import Estimate
from meshwright.display import Readable, Row, plural, titled
from meshwright.models import ModelSpec
from meshwright.planner import Contradiction, Option, Repair
from meshwright.recipes.types import Engine, Recipe
from meshwright.rules import Finding, can_be_built


class UnresolvedValue(msgspec.Struct, frozen=True):
    """A value that is known only at run time."""

    key: str
    text: str
    reason: str
    file: str
    line: int


class IgnoredFinding(msgspec.Struct, frozen=True):
    """A finding that the team accepts: by a comment in the file, an option, or the baseline of known findings."""

    finding: Finding
    by: Literal["comment", "option", "baseline"]
    reason: str = ""


class BaselineEntry(msgspec.Struct, frozen=True):
    """A known finding. Lines and figures of the message change, so that file, rule and field identify it."""

    file: str
    rule: str
    field: str
    message: str


def host_memory_notes(estimate: Estimate | None, on: Cluster | None) -> tuple[str, ...]:
    """Return the host memory that offloading needs, beside what the nodes are assumed to have; nothing without it."""
    host = 0.0 if estimate is None else float(estimate.memory.host)
    if on is None or host < 1:
        return ()
    each = f"{host:.0f} GiB of host memory per GPU, {host * on.gpus_per_node:.0f} GiB per node"
    has = f"{on.gpu.host_gib * on.gpus_per_node:g} GiB"
    known = has if on.own_host else f"{has} (assumed, as usual with {on.gpu.name})"
    return (f"offloading needs {each}; a node has {known}",)


class CheckResult(Readable, msgspec.Struct, frozen=True):
    """Findings, estimate and notes for a checked recipe or file."""

    framework: str
    version: str  # of the framework
    engine: Engine
    file: str  # empty for a shipped recipe
    recipe: Recipe
    model: ModelSpec | None  # None: unknown
    cluster: Cluster | None  # None: the GPUs are unknown
    findings: tuple[Finding, ...]
    estimate: Estimate | None  # None if the model or the GPUs are unknown
    unresolved: tuple[UnresolvedValue, ...] = ()
    notes: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()  # what would make it fit
    repair: Repair | None = None  # one change that removes all errors
    contradiction: Contradiction | None = None  # overrides that cannot be combined
    ignored: tuple[IgnoredFinding, ...] = ()  # accepted findings, which are not counted
    stale: tuple[BaselineEntry, ...] = ()  # of the baseline: findings that this file no longer has
    fail_on: str = "error"  # severity from which on the result is not ok; never: as error, the exit code is 0

    def summary(self) -> Sequence[Row]:
        """Return the verdict, the memory and the findings."""
        where = f" on {self.cluster}" if self.cluster else ""
        memory = [] if self.estimate is None else [self.estimate.memory]
        verdicts = [] if self.estimate is None else [self.estimate.fit]
        figures = [
            f"{float(one.total):.1f} of {float(one.capacity):.1f} GiB per GPU: {fit}"
            for one, fit in zip(memory, verdicts, strict=True)
        ]
        if figures and not self.exists:
            place = "ignored errors" if self.ok else "findings"
            figures = [f"no figures: this layout cannot be built (see the {place})"]
        findings = [
            f"{f.severity}: {f.message}" + (f"  fix: {' '.join(f.fix)}" if f.fix else "") for f in self.findings
        ]
        return [
            ("Check", f"{self.file or self.recipe.name}{where} with {self.runner}: {self.verdict}"),
            *titled("Memory", figures),
            *titled("Findings", findings or ["none"]),
            *titled("Ignored", [f"{one.finding.rule} ({one.by})" for one in self.ignored]),
            *titled("Notes", self.notes),
        ]

    @property
    def runner(self) -> str:
        """What runs it: another framework, or the engine of a recipe of ours."""
        return f"the {self.engine} engine" if self.framework == "meshwright" else self.framework

    @property
    def verdict(self) -> str:
        """The result in words; without errors, memory that may not suffice is named: an estimate is not certain."""
        if not self.ok:
            other_model = any(one.rule == "model.contradicts" for one in self.findings)  # the figures are of that one
            return "the file and --model contradict each other" if other_model else "cannot start or does not fit"
        accepted = sum(one.finding.severity == "error" for one in self.ignored)
        parts = [f"{plural(accepted, 'error')} ignored"] if accepted else []
        fit = self.estimate.fit if self.estimate is not None and self.exists else "fits"
        if "not" not in fit.split():
            return ", ".join(["ok", *parts])
        return f"{parts[0] if accepted else 'no errors'}; memory: {fit}"

    @property
    def ok(self) -> bool:
        """Whether there are no blocking findings."""
        failing = ("error", "warning") if self.fail_on == "warning" else ("error",)
        return not any(f.severity in failing for f in self.findings)

    @property
    def exists(self) -> bool:
        """Whether the layout can be built: our rules have no errors except memory."""
        return can_be_built((*self.findings, *(one.finding for one in self.ignored)))


class RecipeCheckResult(CheckResult, frozen=True):
    """Result for a native recipe, whose model and GPUs are always known."""

    model: ModelSpec
    cluster: Cluster
    estimate: Estimate

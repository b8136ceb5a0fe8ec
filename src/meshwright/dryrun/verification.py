"""Verification reports: which checks were run on a recipe, their outcome, the date and the package versions.

All reports are in one JSON Lines file, one line per recipe. A report carries a fingerprint of the recipe and of its
model's architecture, which shows whether the report still applies to the recipe that is shipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from meshwright.recipes import index
from meshwright.recipes.case import model_of
from meshwright.recipes.types import Recipe

_INSTALLED, _CHECKOUT = Path(__file__).with_name("verification.jsonl"), Path(__file__).parents[3] / "docs" / "data"
REPORTS = _INSTALLED if _INSTALLED.is_file() else _CHECKOUT / "verification.jsonl"
CHECKS = ("rules", "estimate", "dryrun", "tiny")
# Fields that describe a model without changing what runs. Editing them does not make a report stale.
DESCRIPTIVE = ("source", "published_total", "published_active", "aliases", "quantization")
FINGERPRINT_DIGITS = 16

CheckName = Literal["rules", "estimate", "dryrun", "tiny"]
Outcome = Literal["ok", "failed", "not applicable"]
Figures = TypeVar("Figures")


class RulesResult(msgspec.Struct, frozen=True):
    """Rules with findings for the recipe on its reference cluster: rule ids by severity."""

    findings: dict[str, tuple[str, ...]]


class EstimateResult(msgspec.Struct, frozen=True):
    """The cost model's estimate of the recipe on its reference cluster."""

    fits: bool
    memory_gib: dict[str, float]  # by part, total and capacity
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    band: dict[str, float]  # per cent, for step time and memory


class CollectiveTotal(msgspec.Struct, frozen=True):
    """All collectives of one kind over one mesh axis in a step of the worst rank."""

    axis: str
    kind: str
    ranks: int
    count: int
    gib: float


class TracedRank(msgspec.Struct, frozen=True):
    """One rank that the dry run executed."""

    rank: int
    represents: tuple[int, ...]  # pipeline ranks
    allocated_gib: float
    reserved_gib: float
    exact: bool
    traced: str


class DryRunResult(msgspec.Struct, frozen=True):
    """The dry run at full size on the recipe's reference cluster; figures are of the rank that needs most memory."""

    world: int
    fits: bool
    worst: int  # rank
    pp_rank: int  # of the worst rank
    memory_gib: dict[str, float]  # by part, overhead, total and capacity
    reserved_gib: float
    peak_phase: str
    peak_at: str
    flops: dict[str, float]
    collectives: tuple[CollectiveTotal, ...]
    ranks: tuple[TracedRank, ...]
    cpu_s: float
    difference_gib: dict[str, float]  # dry run minus estimate of the same pipeline rank, by part


class TinyRunResult(msgspec.Struct, frozen=True):
    """A few training steps of a tiny model on two processes, compared with the same steps on one."""

    layout: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    loss_difference: float | None  # largest relative difference over the steps; None if a value is not finite
    norm_difference: float | None
    tolerance: float
    learns: bool


class Check(msgspec.Struct, Generic[Figures], frozen=True):
    """One check: its outcome, the reason if it is not ok, and its figures."""

    outcome: Outcome
    date: str
    versions: dict[str, str]
    seconds: float  # duration
    reason: str = ""
    figures: Figures | None = None


class Checks(msgspec.Struct, frozen=True):
    """The checks of a report; None if a check has not run yet."""

    rules: Check[RulesResult] | None = None
    estimate: Check[EstimateResult] | None = None
    dryrun: Check[DryRunResult] | None = None
    tiny: Check[TinyRunResult] | None = None


class VerificationReport(msgspec.Struct, frozen=True):
    """The checks that were run on one recipe."""

    recipe: str
    family: str
    model: str
    goal: str
    cluster: str
    fingerprint: str
    withdrawn: str = ""  # set by hand: why the recipe must not be used, if a check failed and it cannot be fixed
    checks: Checks = Checks()

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name in CHECKS if (check := self.check(name)) is not None and check.outcome == "failed"]

    @property
    def missing(self) -> list[str]:
        """Names of the checks that have not run yet."""
        return [name for name in CHECKS if self.check(name) is None]

    @property
    def date(self) -> str:
        """Date of the latest check."""
        return max((check.date for name in CHECKS if (check := self.check(name)) is not None), default="")

    def check(self, name: str) -> Check[Any] | None:
        """Return the check with this name, or None if it has not run."""
        found: Check[Any] | None = getattr(self.checks, name)
        return found

    def with_check(self, name: str, check: Check[Any]) -> VerificationReport:
        """Return the report with one check replaced; a check with the same result keeps its old date."""
        known = self.check(name)
        if known is not None and _undated(known) == _undated(check):
            return self
        return msgspec.structs.replace(self, checks=msgspec.structs.replace(self.checks, **{name: check}))


def _undated(check: Check[Any]) -> Check[Any]:
    return msgspec.structs.replace(check, date="", seconds=0.0)


def fingerprint(recipe: Recipe) -> str:
    """Return a short hash of the values of a recipe and of its model's architecture that differ from their defaults.

    A field that is added later has its default in every recipe, and makes no report stale.
    """
    model = {name: value for name, value in _set_values(model_of(recipe)).items() if name not in DESCRIPTIVE}
    text = json.dumps({"recipe": _set_values(recipe), "model": model}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def _set_values(value: Any) -> Any:
    """Return a struct as plain values, without the fields that have their default."""
    if isinstance(value, msgspec.Struct):
        pairs = {field.name: (getattr(value, field.name), field.default) for field in msgspec.structs.fields(value)}
        return {name: _set_values(now) for name, (now, default) in pairs.items() if now != default}
    if isinstance(value, tuple | list):
        return [_set_values(one) for one in value]
    return msgspec.to_builtins(value)


def empty(name: str) -> VerificationReport:
    """Return a report without checks for a recipe."""
    recipe = index.load(name)
    return VerificationReport(
        recipe.name, index.family(name), recipe.model, recipe.goal, recipe.cluster, fingerprint(recipe)
    )


def current(reports: Mapping[str, VerificationReport], name: str) -> VerificationReport:
    """Return the report of a recipe, or an empty one if there is none or it is stale."""
    report = reports.get(name)
    return empty(name) if report is None or is_stale(report) else report


def is_stale(report: VerificationReport) -> bool:
    """Return whether the recipe or its model changed after the checks ran."""
    return report.fingerprint != fingerprint(index.load(report.recipe))


def is_fresh(check: Check[Any] | None, versions: dict[str, str]) -> bool:
    """Return whether a check can be kept: it did not fail and every package still has the version it ran with."""
    return check is not None and check.outcome != "failed" and check.versions == versions


def read(path: Path = REPORTS) -> dict[str, VerificationReport]:
    """Return all reports of a file by recipe name; none if the file does not exist."""
    if not path.exists():
        return {}
    return {report.recipe: report for report in _DECODER.decode_lines(path.read_bytes())}


def update(path: Path, changed: Iterable[VerificationReport]) -> None:
    """Replace or add these reports in a file; readers, and an interrupted run, see the old file or the new one."""
    reports = read(path) | {report.recipe: report for report in changed}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".verification-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_ENCODER.encode_lines([reports[name] for name in sorted(reports)]))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# Lines are sorted by recipe and keys follow the structs, so that a diff shows which recipes changed.
_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder(VerificationReport)

"""The response of check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from meshwright import clusters, file_access, frameworks, planner
from meshwright.api import requests
from meshwright.api.check_targets import SkippedFile
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import Error, Estimate, Finding, Part, Response, copied, estimate_part, finding_parts
from meshwright.frameworks import CheckResult, UnresolvedValue


class FailedCheck(Part, frozen=True, kw_only=True):
    """A target that could not be read."""

    file: str
    error: Error


class IgnoredFinding(Finding, frozen=True, kw_only=True):
    """A finding that is accepted, and by what."""

    by: Literal["comment", "option", "baseline"]
    reason: str


class Findings(Response, frozen=True, kw_only=True):
    """What every response of check has."""

    framework: str
    ok: bool
    findings: Sequence[Finding]
    notes: Sequence[str]
    ignored: Sequence[IgnoredFinding] | UnsetType = UNSET  # accepted by a comment, an option or the baseline
    stale: Sequence[frameworks.BaselineEntry] | UnsetType = UNSET  # of the baseline, which are no longer found


class FileCheck(Part, frozen=True, kw_only=True):
    """The findings for one of several recipes or files."""

    framework: str
    version: str
    ok: bool
    file: str | None
    recipe: str
    model: str | None
    gpus: str | None
    engine: str
    findings: Sequence[Finding]
    unresolved: Sequence[UnresolvedValue]
    notes: Sequence[str]
    estimate: Estimate | None
    options: Sequence[planner.Option] = ()
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    assumed: Sequence[clusters.Assumption] = ()
    ignored: Sequence[IgnoredFinding] | UnsetType = UNSET
    stale: Sequence[frameworks.BaselineEntry] | UnsetType = UNSET


class CheckResponse(Findings, frozen=True, kw_only=True):
    """The findings for a recipe or file; with several, those of all, and the response for each in `files`."""

    version: str | UnsetType = UNSET
    file: str | UnsetType | None = UNSET
    recipe: str | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    parameters: int | UnsetType = UNSET  # of the model that the figures are of
    active_parameters: int | UnsetType = UNSET
    gpus: str | UnsetType | None = UNSET
    engine: str | UnsetType = UNSET
    unresolved: Sequence[UnresolvedValue] | UnsetType = UNSET
    estimate: Estimate | UnsetType | None = UNSET
    options: Sequence[planner.Option] | UnsetType = UNSET
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    assumed: Sequence[clusters.Assumption] | UnsetType = UNSET
    files: Sequence[FileCheck] | UnsetType = UNSET
    failed: Sequence[FailedCheck] | UnsetType = UNSET
    skipped: Sequence[SkippedFile] | UnsetType = UNSET
    corrected: frameworks.FixedText | UnsetType = UNSET


def _typed_gpus(request: requests.Check | None, result: CheckResult) -> str | int | None:
    """Return the GPUs of a request; of a type alone, whose count the file states, the checked cluster."""
    given = None if request is None else request.gpus
    if given is None or not clusters.is_known(str(given).strip()):
        return given
    return None if result.cluster is None else str(result.cluster)


def check_response(result: CheckResult, request: requests.Check | None = None) -> CheckResponse:
    """Return the response of check."""
    return copied(
        CheckResponse,
        result,
        file=result.file or None,
        recipe=result.recipe.name,
        model=result.model.name if result.model else None,
        parameters=result.model.params.total if result.model else UNSET,
        active_parameters=result.model.params.active if result.model else UNSET,
        gpus=str(result.cluster) if result.cluster else None,
        findings=finding_parts(result.findings),
        estimate=estimate_part(result.estimate, result.exists) if result.estimate else None,
        repair=result.repair or UNSET,
        contradiction=result.contradiction or UNSET,
        assumed=assumed_in(_typed_gpus(request, result)),
        ignored=[_ignored_part(one) for one in result.ignored] or UNSET,
        stale=result.stale or UNSET,
        corrected=_corrected(result, str(request.target)) if request is not None and request.corrected else UNSET,
    )


def _corrected(result: CheckResult, path: str) -> frameworks.FixedText | UnsetType:
    """Return the file with its repair, or with the fix of every error; unset for a recipe without a file."""
    text = file_access.text_of(path) if file_access.exists(path) else None
    if text is None:
        return UNSET
    errors = [one for one in result.findings if one.severity == "error"] or result.findings
    if result.repair is not None:
        return frameworks.fixed_text(text, path, result.repair.overrides)
    return frameworks.fixed_text(text, path, frameworks.pasted_fixes(frameworks.open_file(path), errors))


def _ignored_part(ignored: frameworks.IgnoredFinding) -> IgnoredFinding:
    part = finding_parts([ignored.finding])[0]
    return copied(IgnoredFinding, part, by=ignored.by, reason=ignored.reason)

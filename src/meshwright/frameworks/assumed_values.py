"""Severities of our findings where the file leaves values or GPUs open, or states a choice on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from meshwright import costs, rules
from meshwright.errors import InputError
from meshwright.frameworks.mapping import text_of
from meshwright.frameworks.to_recipe import alternatives
from meshwright.planner import case_of
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.types import field_value, recipe_fields
from meshwright.rules import Finding

JUDGEMENTS = (
    "dispatch.allgather-large",
    "kernels.compiled-experts",
    "moe.ep-too-low",
    "network.context-domain",
    "optimizer.no-clipping",
    "precision.bf16-reduction",
    "precision.fp16",
    "sequence.long-without-context-parallel",
    "strategy.fsdp-with-tensor-parallel",
)
"""Warnings about choices that published configs make for good reasons: advice in their files."""
FILE_WARNINGS = ("moe.forced-balance", "precision.bf16-gpu")
"""Errors of a plan that a file may state on purpose: the training runs, for a measurement, or slowly."""
CAPACITY = ("memory.state", "memory.peak", "memory.replicated-state")
"""Errors about the memory of a GPU."""


def as_in_files(finding: Finding) -> Finding:
    """Return the finding with its severity in another framework's file."""
    if finding.severity == "error" and finding.rule in FILE_WARNINGS:
        return msgspec.structs.replace(finding, severity="warning")
    is_judgement = finding.severity == "warning" and finding.rule in JUDGEMENTS
    return msgspec.structs.replace(finding, severity="advice") if is_judgement else finding


def downgrade_host(finding: Finding) -> Finding:
    """Return an error on the memory of the host as a warning: of unknown machines, it is assumed."""
    is_host = finding.rule == "memory.host" and finding.severity == "error"
    return msgspec.structs.replace(finding, severity="warning") if is_host else finding


def downgrade_within_error(finding: Finding, cases: Sequence[Case]) -> Finding:
    """Downgrade a memory peak to a warning if a candidate case fits it within the error of the estimate.

    The candidates are clusters, and values of fields that only the program sets: of these the largest that may fit is
    named, since the peak in the message is that of the first.
    """
    if finding.rule != "memory.peak":
        return finding
    estimates = [costs.estimate(case) for case in cases]
    fitting = [
        (float(one.memory.total), case, one.band.memory_pct)
        for case, one in zip(cases, estimates, strict=True)
        if one.memory.total * (1 - one.band.memory_pct / 100) <= one.memory.capacity
    ]
    if not fitting:
        return finding
    first = cases[0]
    near = next((error for _, case, error in fitting if case is first or case.cluster is not first.cluster), None)
    if near is not None:
        case = next(case for _, case, _ in fitting if case is first or case.cluster is not first.cluster)
        where = "" if case is first else f" on {case.cluster.gpu.name}"
        message = f"{finding.message}, within the error of the estimate (±{near:.0f} %){where}"
        return msgspec.structs.replace(finding, severity="warning", message=message)
    total, case, error = max(fitting, key=lambda one: one[0])
    names = [name for name in recipe_fields() if field_value(case.recipe, name) != field_value(first.recipe, name)]
    assumed, lean = (
        " ".join(f"{name}={text_of(field_value(one.recipe, name))}" for name in names) for one in (first, case)
    )
    open_fields = " ".join(f"{name}=VALUE" for name in names)
    message = (
        f"{finding.message} with {assumed}, which is assumed; with {lean} it is {total:.1f} GiB (±{error:.0f} %) and "
        f"may fit: write {open_fields}"
    )
    return msgspec.structs.replace(finding, severity="warning", message=message)


def downgrade_assumed(finding: Finding, assumed: Sequence[str], cases: Sequence[Case]) -> Finding:
    """Return a finding on memory with the values that the file does not have.

    An error becomes a warning, unless it holds with the leanest values too.
    """
    if finding.severity == "advice" or rules.RULES[finding.rule].subject != "memory" or not assumed:
        return finding
    case = cases[0]
    fields = [field for field in assumed if field in recipe_fields()]
    if finding.severity == "error" and len(fields) == len(assumed) and finding.rule in CAPACITY:
        least = [_least_gib(one, fields) for one in cases]
        if None not in least:
            message = f"{finding.message}; at least {min(filter(None, least)):.0f} GiB with any {' and '.join(fields)}"
            return msgspec.structs.replace(finding, message=message)
    values = ", ".join(f"{field}={text_of(field_value(case.recipe, field))}" for field in fields)
    values = values or f"{case.cluster.world} GPUs"
    state = " ".join(f"{field}=VALUE" for field in fields) or "--gpus"
    message = f"{finding.message}, with {values} assumed; write {state} if it differs"
    return msgspec.structs.replace(finding, severity="warning", message=message)


def _least_gib(case: Case, fields: Sequence[str]) -> float | None:
    """Return the memory with the leanest values of fields, less the error of its estimate; None if that fits."""
    recipe, least = case.recipe, costs.estimate(case)
    for field in fields:
        for value in alternatives(field):
            with suppress(InputError):
                changed, _ = override.change(recipe, {field: value})
                estimate = costs.estimate(case_of(changed, case.model, case.cluster, case.engine))
                if estimate.memory.total < least.memory.total:
                    recipe, least = changed, estimate
    total = float(least.memory.total) * (1 - least.band.memory_pct / 100)
    return total if total > least.memory.capacity else None

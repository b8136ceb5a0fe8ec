"""Layouts and words for findings that no rule's own fix resolves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

import msgspec

from meshwright import rules
from meshwright.planner.levers import host_needed, with_levers
from meshwright.planner.search import ScoredBatch, best, changed_values, choose
from meshwright.recipes.case import Case
from meshwright.recipes.model_changes import shape_overrides
from meshwright.recipes.types import ENGINES
from meshwright.rules import Finding

OF_THE_CLUSTER = (
    "memory",
    "topology",
    "batch",
    "moe",
    "heads",
    "pipeline",
    "schedule",
    "sequence",
    "offload",
    "network",
)
"""Subjects of rules that more or other GPUs resolve."""


def layout_fix(
    case: Case, ignoring: frozenset[str], searched: list[ScoredBatch] | None = None
) -> dict[str, Any] | None:
    """Return the layout fields to change so that the case is legal and fits; None if no layout is.

    `searched` are the scored layouts of the case if the caller has them already.
    """
    known = case.cached(_known_fixes)  # a repair and the findings both ask
    if ignoring not in known:
        known[ignoring] = _layout_fix(case, ignoring, searched)
    return known[ignoring]


def note_no_layout_fix(case: Case) -> None:
    """Keep that no layout of a case fits, with or without levers: its repair need not search again."""
    case.cached(_known_fixes)[frozenset()] = None


def has_no_layout_fix(case: Case) -> bool:
    """Return whether a search has found that no layout of a case fits."""
    return case.cached(_known_fixes).get(frozenset(), {}) is None


def _known_fixes(case: Case) -> dict[frozenset[str], dict[str, Any] | None]:
    return {}


def _layout_fix(case: Case, ignoring: frozenset[str], searched: list[ScoredBatch] | None) -> dict[str, Any] | None:
    found = best(case, {}, ignoring) if searched is None else choose(searched, case)
    if found is not None and not found.fits:
        found = with_levers(case, {}, found)
    return None if found is None or not found.fits else changed_values(found.layout, case)


def explain_missing(findings: Iterable[Finding], case: Case) -> Iterator[Finding]:
    """Yield the findings; those without a fix say why there is none and what else can be done."""
    for finding in findings:
        explained = bool(finding.fix or finding.no_fix)
        yield finding if explained else msgspec.structs.replace(finding, no_fix=_no_fix(finding, case))


def _no_fix(finding: Finding, case: Case) -> str:
    if finding.severity != "error":
        return "no setting resolves it without breaking another rule"
    rule = rules.all_rules()[finding.rule]
    if rule.subject not in OF_THE_CLUSTER:
        others = [engine for engine in ENGINES if engine != case.engine and not _breaks(rule, case, engine)]
        return (
            f"no setting of {case.engine} resolves it; other engines can: --engine {' or '.join(others)}"
            if others
            else "no setting resolves it: it follows from the model and the goal"
        )
    model = " ".join((case.recipe.model, *shape_overrides(case.recipe)))
    size = f"meshwright size {model} --goal {case.recipe.goal} --gpu {_node_words(case)}"
    return (
        f"no layout of this recipe runs on {case.cluster} with the {case.engine} engine; use more GPUs or larger ones "
        f"({size} --engine {case.engine} gives a count){_more_host_memory(case) if rule.subject == 'memory' else ''}"
    )


def _node_words(case: Case) -> str:
    """Return the same nodes as an argument of `size`: the cluster's file, its counts if unusual, or the GPU."""
    on = case.cluster
    usual = on.nodes == 1 or on.gpus_per_node == on.gpu.gpus_per_node
    return on.file or (on.gpu.name if usual else str(on))


def _more_host_memory(case: Case) -> str:
    """Return how much host memory would be enough, if there is too little, and where to say how much there is."""
    found = case.cached(host_needed)
    if found is None or found[1] <= case.host_gib:
        return ""
    kind, needed = found
    on = case.cluster
    known = (
        f"{on.file or 'the cluster file'} has host_gib = {case.host_gib:g}"
        if on.own_host
        else f"{case.host_gib:g} GiB are assumed for {on.gpu.name} unless host_gib in a cluster file says otherwise"
    )
    return f", or layout.offload={kind} with {ceil(needed)} GiB of host memory per GPU: {known}"


def _breaks(rule: rules.Rule, case: Case, engine: Any) -> bool:
    other = Case(case.recipe, case.model, case.cluster, engine)
    return engine in rule.engines and bool(rule.broken(other))

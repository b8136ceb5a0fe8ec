"""Layouts and words for findings that no rule's own fix resolves."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import ceil
from typing import Any

import msgspec

from meshwright import rules
from meshwright.planner.levers import host_needed, with_levers
from meshwright.planner.search import ScoredBatch, best, changed_values, choose
from meshwright.recipes import index
from meshwright.recipes.capabilities import engines_with, trains_goal
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.model_changes import request_overrides, shape_overrides
from meshwright.recipes.types import ENGINES, keys_by_flat_name
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
SEQ_LENGTH, STEPS = "data.seq_length", "train.steps"
BUDGET, PRICED = frozenset(("--tokens", "--days")), ("--price", "--currency")
"""Options with the length of a training, and with its price."""


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


def explain_missing(
    findings: Iterable[Finding], case: Case, typed: Collection[str] = (), options: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yield the findings; those without a fix say why there is none and what else can be done.

    `typed` are fields the user set, by flat name, and `options` others that change an answer: a command that is
    printed repeats them.
    """
    for finding in findings:
        explained = bool(finding.fix or finding.no_fix)
        yield finding if explained else msgspec.structs.replace(finding, no_fix=_no_fix(finding, case, typed, options))


def _no_fix(finding: Finding, case: Case, typed: Collection[str], options: Sequence[str] = ()) -> str:
    if finding.severity != "error":
        return "no setting resolves it without breaking another rule"
    rule = rules.all_rules()[finding.rule]
    if rule.subject not in OF_THE_CLUSTER:
        others = [one for one in ENGINES if one != case.engine and not _breaks(rule, case, one) and _trains(case, one)]
        return (
            f"no setting of {case.engine} resolves it; other engines can: --engine {' or '.join(others)}"
            if others
            else "no setting resolves it: it follows from the model and the goal"
        )
    more_host = _more_host_memory(case) if rule.subject == "memory" else ""
    return (
        f"no layout of this recipe runs on {case.cluster} with the {case.engine} engine; use more GPUs or larger ones "
        f"({_size_command(case, typed, options)} gives a count){more_host}"
    )


def _size_command(case: Case, typed: Collection[str], options: Sequence[str]) -> str:
    """Return the command that finds GPUs for this training: its length of samples, and all that the user set."""
    recipe, keys = case.recipe, keys_by_flat_name()
    own = () if index.is_known(recipe.name) else request_overrides(recipe)  # a file's contract is not the catalogue's
    typed_keys = {keys[name]: name for name in sorted(typed) if not keys[name].startswith("architecture.")}
    fields = (format_override(key, getattr(case, name)) for key, name in typed_keys.items())
    length = format_override(SEQ_LENGTH, recipe.data.seq_length)
    kept = _size_options(options)
    left_out = (length, *((format_override(STEPS, recipe.train.steps),) if BUDGET & {*kept} else ()))
    overrides = [one for one in dict.fromkeys((*shape_overrides(recipe), *own, *fields)) if one not in left_out]
    words = ("meshwright", "size", recipe.model, "--goal", recipe.goal, "--gpu", _node_words(case))
    return shlex.join((*words, "--seq", str(recipe.data.seq_length), "--engine", case.engine, *kept, *overrides))


def _size_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the user's options with their values; `size` takes a price only for a length."""
    without_length = PRICED if not BUDGET & {*options} else ()
    pairs = zip(options[::2], options[1::2], strict=True)
    return tuple(word for name, value in pairs if name not in without_length for word in (name, value))


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


def _trains(case: Case, engine: str) -> bool:
    """Return whether an engine has a case's goal and, of adapters, its method: torchtitan has none."""
    goal = case.recipe.goal
    return trains_goal(engine, goal) and (goal != "peft" or engine in engines_with("method", case.recipe.peft.method))


def _breaks(rule: rules.Rule, case: Case, engine: Any) -> bool:
    other = Case(case.recipe, case.model, case.cluster, engine)
    return engine in rule.engines and bool(rule.broken(other))

"""Every constraint on a recipe, one function per rule, grouped by subject."""

from meshwright.rules import (  # noqa: F401  # importing a subject registers its rules
    batch,
    data,
    diffusion,
    dispatch,
    engine,
    graphs,
    heads,
    kernels,
    learning_rate,
    memory,
    moe,
    network,
    offload,
    optimizer,
    overlap,
    peft,
    pipeline,
    precision,
    prediction,
    ranges,
    recompute,
    schedule,
    sequence,
    sequence_parallel,
    strategy,
    topology,
    unused,
    vision,
    weights,
)
from meshwright.rules.evaluate import applicable, check, fix_texts, illegal_by_rule, legal, message, try_fixes
from meshwright.rules.refusal import RefusedError
from meshwright.rules.rule import RULES, SEVERITIES, Finding, Rule, Severity, all_rules

__all__ = [
    "RULES",
    "SEVERITIES",
    "Finding",
    "RefusedError",
    "Rule",
    "Severity",
    "all_rules",
    "applicable",
    "check",
    "fix_texts",
    "illegal_by_rule",
    "legal",
    "message",
    "try_fixes",
]

"""The settings of a run, checked with the rules that `train` applies before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright import rules
from meshwright.doctor import remedies
from meshwright.doctor.advised_rate import ANY_MODEL
from meshwright.doctor.finding import Evidence, Finding
from meshwright.doctor.run_stats import RunStats
from meshwright.recipes import overrides as override
from meshwright.recipes.types import field_value, recipe_fields

RATE_ADVICE = ("learning_rate.adapters",)
"""Advice that explains a loss; other advice is for before the start."""


def checked_settings(stats: RunStats) -> Iterator[Finding]:
    """The run's settings break a rule that `train` warns about."""
    case, header = stats.case, stats.run.header
    if case is None or header.recipe is None:
        return
    found = rules.check(case, ("error", "warning", "advice"))
    for one in found:
        if one.severity == "advice" and one.rule not in RATE_ADVICE:
            continue
        applies = rules.RULES[one.rule].subject in rules.HARDWARE_FREE and (not header.tiny or one.rule in ANY_MODEL)
        if not applies:
            continue
        value = field_value(case.recipe, one.field) if one.field in recipe_fields() else None
        values = override.requested(case.recipe, one.fix)
        yield Finding(
            id=one.rule,
            severity=one.severity,
            message=f"{one.message}: {rules.RULES[one.rule].symptom}",
            evidence=() if value is None else (Evidence(one.field, value if isinstance(value, float) else str(value)),),
            remedies=(remedies.contract(stats, dict(values), rules.RULES[one.rule].cause),) if values else (),
        )

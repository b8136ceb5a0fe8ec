"""The learning rate that a remedy may advise: none that `check` would find too high."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright import rules
from meshwright.doctor.run_stats import RunStats
from meshwright.recipes import overrides as override

LR = "optimizer.lr"
ANY_MODEL = ("learning_rate.far-too-high", "learning_rate.diverges", "learning_rate.too-small")
"""Rules that also hold for the random weights of --tiny and bench; the others expect a model of full size."""
FAR_TOO_HIGH = ("learning_rate.diverges", "learning_rate.far-too-high", "learning_rate.fine-tuning")
"""Rules about rates that explain a loss that diverges by themselves."""
TOO_HIGH = (
    *FAR_TOO_HIGH,
    "learning_rate.too-high-for-size",
    "learning_rate.adapters-too-high",
    "learning_rate.adapters",
    "learning_rate.continued-pretraining",
    "learning_rate.pretraining",
)


def advised_rate(stats: RunStats, rate: float, limits: Sequence[str] = TOO_HIGH) -> tuple[float, str]:
    """Return a rate and an empty text; if a rule finds it too high, the lower rate of its fix and the rule's cause."""
    if stats.case is None:
        return rate, ""
    case = stats.case.rebuild(override.change(stats.case.recipe, {LR: rate})[0])
    for name in limits:
        rule = rules.all_rules()[name]
        if (stats.run.header.tiny and name not in ANY_MODEL) or case.engine not in rule.engines:
            continue
        if bool(rule.broken(case)):
            fixed = override.requested(case.recipe, rules.try_fixes(rule, case)).get(LR)
            if fixed is not None and fixed < rate:
                return float(fixed), rule.cause
    return rate, ""

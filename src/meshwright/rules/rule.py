"""What a rule is, and what it says when a case breaks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import ENGINES

Severity = Literal["error", "warning", "advice"]
Fix = dict[str, Sequence[Any] | Callable[[Case], Sequence[Any]]]
"""Recipe fields by flat name, each with the values to try, nearest first."""


@dataclass(frozen=True)
class Rule:
    """An executable check: when it is broken, what the user would see, why, and what repairs it."""

    id: str
    subject: str
    severity: Severity
    field: str  # flat name of the field the finding points at
    broken: Callable[[Case], Column]
    message: str  # template over the case's names
    symptom: str
    cause: str
    fixes: tuple[Fix, ...]
    engines: tuple[str, ...]
    pitfall: str = ""  # its row in the mission's pitfall table, when it has one


@dataclass(frozen=True)
class Finding:
    """What one rule found in one case."""

    rule: str
    severity: Severity
    field: str
    message: str
    fix: tuple[str, ...]  # overrides that together make the finding disappear


RULES: dict[str, Rule] = {}


def rule(
    id: str,
    severity: Severity,
    field: str,
    *,
    message: str,
    symptom: str,
    cause: str,
    fixes: Sequence[Fix] = (),
    engines: Sequence[str] = ENGINES,
    pitfall: str = "",
) -> Callable[[Callable[[Case], Column]], Callable[[Case], Column]]:
    """Registers a function of a case that is true (or a column of truths) where the rule is broken."""

    def register(broken: Callable[[Case], Column]) -> Callable[[Case], Column]:
        if id in RULES:
            raise ValueError(f"two rules are called {id}")
        subject = broken.__module__.rsplit(".", 1)[-1]
        RULES[id] = Rule(
            id, subject, severity, field, broken, message, symptom, cause, tuple(fixes), tuple(engines), pitfall
        )
        return broken

    return register

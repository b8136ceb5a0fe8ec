"""What a rule is, and what it says when a case breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from meshwright import extensions
from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import ENGINES

Severity = Literal["error", "warning", "advice"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The gravest first."""
Broken = Callable[[Case], Column]
MessageValue = Callable[[Case], object]
Fix = Mapping[str, Sequence[Any] | Callable[[Case], Sequence[Any]]]
"""Recipe fields by flat name, each with the values to try, nearest first."""


class Rule(msgspec.Struct, frozen=True):
    """An executable check: when it is broken, what the user would see, why, and what repairs it."""

    id: str
    subject: str
    severity: Severity
    field: str  # flat name of the field the finding points at
    broken: Broken
    message: str  # template over the case's names and the values
    symptom: str
    cause: str
    fixes: tuple[Fix, ...]
    engines: tuple[str, ...]
    pitfall: str = ""  # its row in the well-known pitfalls, when it has one
    values: Mapping[str, MessageValue] = msgspec.field(default_factory=dict)  # named by the message


class Finding(msgspec.Struct, frozen=True):
    """What one rule found in one case."""

    rule: str
    severity: Severity
    field: str
    message: str
    fix: tuple[str, ...]  # overrides that together make the finding disappear
    file: str = ""  # where it stands, when it was found in a file
    line: int = 0  # from 1; 0 when the file does not say it


RULES: dict[str, Rule] = {}


def all_rules() -> Mapping[str, Rule]:
    """Return the shipped rules and those of extensions, by id."""
    extensions.modules("rules")
    return RULES


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
    values: Mapping[str, MessageValue] | None = None,
) -> Callable[[Broken], Broken]:
    """Registers a function of a case that is true (or a column of truths) where the rule is broken."""

    def register(broken: Broken) -> Broken:
        if id in RULES:
            raise ValueError(f"two rules are called {id}")
        RULES[id] = Rule(
            id=id,
            subject=broken.__module__.rsplit(".", 1)[-1],
            severity=severity,
            field=field,
            broken=broken,
            message=message,
            symptom=symptom,
            cause=cause,
            fixes=tuple(fixes),
            engines=tuple(engines),
            pitfall=pitfall,
            values=values or {},
        )
        return broken

    return register

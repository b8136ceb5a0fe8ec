"""The types of a rule and its finding, and the decorator that registers a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from meshwright import extensions
from meshwright.display import Entry, Row, field_rows
from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import ENGINES

Severity = Literal["error", "warning", "advice"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Most severe first."""
HARDWARE_FREE = ("data", "engine", "learning_rate", "optimizer", "ranges", "unused")
"""Subjects of rules that hold on any hardware; the others are about GPUs, which a run on CPUs does not have."""
Broken = Callable[[Case], Column]
MessageValue = Callable[[Case], object]
Fix = Mapping[str, Sequence[Any] | Callable[[Case], Sequence[Any]]]
"""Values to try by flat field name, closest to the current value first."""


class Rule(Entry, msgspec.Struct, frozen=True):
    """An executable constraint: where it is broken, what the user would see, why, and the fixes to try."""

    id: str
    subject: str
    severity: Severity
    field: str  # flat name of the field the finding points at
    broken: Broken
    message: str  # template over names of the case and of `values`
    symptom: str
    cause: str
    fixes: tuple[Fix, ...]
    engines: tuple[str, ...]
    pitfall: str = ""  # its row in docs/pitfalls.md, if any
    values: Mapping[str, MessageValue] = msgspec.field(default_factory=dict)  # computed for the message

    def summary(self) -> Sequence[Row]:
        """Return what the rule is about; the fields that its fixes set, not their functions."""
        fixes = " or ".join(" + ".join(fix) for fix in self.fixes)
        rows = field_rows(self, leave_out=("broken", "fixes", "values", "subject"))
        return [*rows, *([("Fix", fixes)] if fixes else [])]


class Finding(msgspec.Struct, frozen=True):
    """A broken rule in one case or config file."""

    rule: str
    severity: Severity
    field: str
    message: str
    fix: tuple[str, ...]  # overrides that together resolve the finding
    file: str = ""  # the config file with the finding, if any
    line: int = 0  # from 1; 0 if the file does not set the field
    no_fix: str = ""  # why `fix` is empty, and what else can be done
    undoes: tuple[str, ...] = ()  # keys of the user's own settings that `fix` replaces: no other change resolves it


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
    """Register a function that returns True where a case breaks the rule (a boolean array for a batch of cases)."""

    def register(broken: Broken) -> Broken:
        if id in RULES:
            raise ValueError(f"rule id {id} is registered twice")
        RULES[id] = Rule(
            id=id,
            subject=id.partition(".")[0],
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


def can_be_built(findings: Iterable[Finding]) -> bool:
    """Return whether a layout with these findings exists: our rules have no errors except memory."""
    blocking = (f for f in findings if f.severity == "error" and f.rule in RULES)
    return all(f.rule.startswith("memory.") for f in blocking)

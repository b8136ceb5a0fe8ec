"""Accessors for AutoModel's rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.frameworks.automodel.values import axis_size
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.rules.rule import Finding


def run_rule(rule: FrameworkRule, ctx: RuleContext) -> Iterator[Finding]:
    """Run a rule on a file that is still being parsed."""
    found = rule.check(ctx)
    problems: Iterable[Problem] = () if found is None else (found,) if isinstance(found, Problem) else found
    for problem in problems:
        key = problem.key or next((key for key in rule.keys if ctx.is_set(key)), "")
        setting, files = ctx.parsed.settings.get(key), ctx.parsed.files
        yield Finding(
            rule.id,
            problem.severity or rule.severity,
            key,
            problem.message,
            problem.fix,
            file=setting.file if setting else files[0] if files else "",
            line=setting.line if setting else 0,
        )


def size(ctx: RuleContext, name: str) -> int:
    """Return the effective size of a parallel axis."""
    return axis_size(ctx.parsed.settings, name)


def positive_int(ctx: RuleContext, key: str) -> int | None:
    """Return a positive integer, or None."""
    value = ctx.get(key)
    return value if is_int(value) and value > 0 else None


def is_unresolved(ctx: RuleContext, *keys: str) -> bool:
    """Return whether a value is known only when the job starts."""
    return any(setting.unresolved for key in keys if (setting := ctx.parsed.settings.get(key)) is not None)


def text_value(ctx: RuleContext, key: str) -> str:
    """Return a string value, or an empty string."""
    value = ctx.get(key)
    return value if isinstance(value, str) else ""

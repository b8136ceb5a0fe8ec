"""What rules ask of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.frameworks.automodel.values import size_of
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.rules.rule import Finding


def noticed(rule: FrameworkRule, ctx: RuleContext) -> Iterator[Finding]:
    """What a rule finds, at the lines of a file that is still being read."""
    found = rule.check(ctx)
    problems: Iterable[Problem] = () if found is None else (found,) if isinstance(found, Problem) else found
    for problem in problems:
        key = problem.key or next((key for key in rule.keys if ctx.is_set(key)), "")
        said, files = ctx.parsed.settings.get(key), ctx.parsed.files
        yield Finding(
            rule.id,
            problem.severity or rule.severity,
            key,
            problem.message,
            problem.fix,
            file=said.file if said else files[0] if files else "",
            line=said.line if said else 0,
        )


def size(ctx: RuleContext, name: str) -> int:
    """One of their sizes as it holds."""
    return size_of(ctx.parsed.settings, name)


def as_int(ctx: RuleContext, key: str) -> int | None:
    """A whole number above 0, or None."""
    value = ctx.get(key)
    return value if is_int(value) and value > 0 else None


def is_open(ctx: RuleContext, *keys: str) -> bool:
    """Whether a value is only known once the job starts."""
    return any(said.unresolved for key in keys if (said := ctx.parsed.settings.get(key)) is not None)


def text(ctx: RuleContext, key: str) -> str:
    """A text, empty when it is none."""
    value = ctx.get(key)
    return value if isinstance(value, str) else ""

"""Accessors for AutoModel's rules."""

from __future__ import annotations

from meshwright.frameworks.automodel.values import axis_size
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import RuleContext


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

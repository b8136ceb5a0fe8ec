"""What rules ask of a file of Megatron-LM."""

from __future__ import annotations

from meshwright.frameworks.framework import RuleContext
from meshwright.frameworks.megatron_lm.arguments import REST
from meshwright.frameworks.megatron_lm.parse import number, text


def on(ctx: RuleContext, key: str) -> bool:
    return ctx.is_set(key) and ctx.get(key) is True


def number_of(ctx: RuleContext, key: str) -> int:
    """The whole number of a flag; 0 when it is unsaid and has no default, or is open."""
    return number(ctx.parsed.settings, key) or 0


def text_of(ctx: RuleContext, key: str) -> str:
    return text(ctx.parsed.settings, key) or ""


def is_open(ctx: RuleContext) -> bool:
    """Whether arguments come from somewhere that was not read: then nothing can be said to be missing."""
    return ctx.is_set(REST)

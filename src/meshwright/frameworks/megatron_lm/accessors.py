"""Accessors to Megatron-LM flags for the rules."""

from __future__ import annotations

from meshwright.frameworks.framework import RuleContext
from meshwright.frameworks.megatron_lm.arguments import UNREAD_ARGS
from meshwright.frameworks.megatron_lm.parse import int_value, text


def is_on(ctx: RuleContext, key: str) -> bool:
    """Return whether a switch is given."""
    return ctx.is_set(key) and ctx.get(key) is True


def get_int(ctx: RuleContext, key: str) -> int:
    """Return the integer value of a flag or its default; 0 if it is unset or unresolved."""
    return int_value(ctx.parsed.settings, key) or 0


def get_text(ctx: RuleContext, key: str) -> str:
    return text(ctx.parsed.settings, key) or ""


def has_unread_args(ctx: RuleContext, *keys: str) -> bool:
    """Return whether arguments could not be read, or these flags may be set, so that none is reported as missing."""
    return ctx.is_set(UNREAD_ARGS) or any(key in ctx.parsed.possible_keys for key in keys)

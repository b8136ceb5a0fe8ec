"""Helpers shared by Accelerate's rules."""

from __future__ import annotations

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import RuleContext
from meshwright.recipes.key_maps.accelerate import FSDP, distributed_type


def type_of(ctx: RuleContext) -> str:
    return distributed_type({"distributed_type": ctx.get("distributed_type", "NO")})


def is_enabled(ctx: RuleContext, key: str) -> bool:
    return str(ctx.get(key, False)).lower() in ("true", "1", "yes", "on")


def int_value(ctx: RuleContext, key: str) -> int | None:
    found = ctx.get(key)
    return found if is_int(found) else None


def fsdp_version(ctx: RuleContext) -> str:
    return str(ctx.get(f"{FSDP}fsdp_version"))


def has_command_line(ctx: RuleContext) -> bool:
    """Return whether the command line is known too; a file alone may be completed by one."""
    files = {setting.file for setting in ctx.parsed.settings.values()} - {""}  # "": a typed value
    return any(not name.endswith((".yaml", ".yml", ".json")) for name in files)

"""Helpers shared by DeepSpeed's rules."""

from __future__ import annotations

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import RuleContext

ZERO = "zero_optimization."
STAGE = "zero_optimization.stage"


def stage_of(ctx: RuleContext) -> int | None:
    found = ctx.get(STAGE)
    return found if is_int(found) else None


def is_on(ctx: RuleContext, key: str) -> bool:
    return str(ctx.get(key, False)).lower() == "true"


def offload_device(ctx: RuleContext, part: str) -> str:
    found = ctx.get(f"{ZERO}offload_{part}.device", "none")
    return str(found) if found is not None else "none"

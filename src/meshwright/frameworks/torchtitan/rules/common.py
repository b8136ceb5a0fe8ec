"""Keys and helpers shared by torchtitan's rules."""

from __future__ import annotations

from typing import Any

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import FrameworkRule, RuleContext
from meshwright.recipes.key_maps.torchtitan import LOCAL_BATCH

PP, EP, ETP, TP, CP = (
    f"parallelism.{name}_parallel_degree" for name in ("pipeline", "expert", "expert_tensor", "tensor", "context")
)
SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
NAME, FLAVOR = "model.name", "model.flavor"


def is_current(ctx: RuleContext) -> bool:
    """Return whether the config is a command of 0.3.0 or main, not of the 0.2 line."""
    return ctx.is_set("config")


def in_tokens(ctx: RuleContext) -> bool:
    """Return whether batch sizes are in tokens."""
    return is_current(ctx) and not ctx.is_set(LOCAL_BATCH)


def degree(ctx: RuleContext, key: str) -> int:
    """Return the size of an axis, or 1 if it is unknown or invalid."""
    value = ctx.get(key)
    return value if is_int(value) and value > 0 else 1


def has_custom_module(ctx: RuleContext) -> bool:
    """Return whether a custom module may register more names."""
    return any(ctx.get(f"experimental.{key}") for key in ("custom_import", "custom_args_module"))


def rule(
    name: str, severity: Any, keys: tuple[str, ...], broken: Any, symptom: str, cause: str, covers: tuple[str, ...] = ()
) -> FrameworkRule:
    """Return a torchtitan rule."""
    return FrameworkRule(f"torchtitan.{name}", severity, keys, broken, symptom=symptom, cause=cause, supersedes=covers)

"""What torchtitan's rules share: its keys, and how a file is asked for them."""

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


def today(ctx: RuleContext) -> bool:
    """Whether it is a command of today's line."""
    return ctx.is_set("config")


def in_tokens(ctx: RuleContext) -> bool:
    """Whether a batch is counted in tokens."""
    return today(ctx) and not ctx.is_set(LOCAL_BATCH)


def degree(ctx: RuleContext, key: str) -> int:
    """The ranks of an axis; 1 where they are not known or wrong."""
    value = ctx.get(key)
    return value if is_int(value) and value > 0 else 1


def custom(ctx: RuleContext) -> bool:
    """Whether a module of the user's own may register more names."""
    return any(ctx.get(f"experimental.{key}") for key in ("custom_import", "custom_args_module"))


def rule(
    name: str,
    severity: Any,
    keys: tuple[str, ...],
    broken: Any,
    symptom: str,
    cause: str,
    covers: tuple[str, ...] = (),
) -> FrameworkRule:
    """One of torchtitan's rules."""
    return FrameworkRule(f"torchtitan.{name}", severity, keys, broken, symptom=symptom, cause=cause, supersedes=covers)

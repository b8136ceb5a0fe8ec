"""Mixture of experts: parameter storage, grouped GEMM, token dispatch and router balancing."""

from __future__ import annotations

from meshwright.engine.experts.balance import LOSSES, Balancing
from meshwright.engine.experts.dispatch import (
    ExchangeCounts,
    ExpertAxis,
    balanced_counts,
    exchange_counts,
    experts_forward,
)
from meshwright.engine.experts.expert_params import (
    ExpertBlock,
    ExpertShardSpec,
    expert_blocks,
    fused_shape,
    reshape_experts,
    shard_specs,
)
from meshwright.engine.experts.router import (
    RouterState,
    attach_router,
    mask_routers,
    reset,
    router_states,
    statistics,
    update_biases,
)
from meshwright.engine.patching import symbol

IMPLEMENTATION = "meshwright"

__all__ = [
    "IMPLEMENTATION",
    "LOSSES",
    "Balancing",
    "ExchangeCounts",
    "ExpertAxis",
    "ExpertBlock",
    "ExpertShardSpec",
    "RouterState",
    "attach_router",
    "balanced_counts",
    "exchange_counts",
    "expert_blocks",
    "experts_forward",
    "fused_shape",
    "mask_routers",
    "register",
    "reset",
    "reshape_experts",
    "router_states",
    "shard_specs",
    "statistics",
    "update_biases",
]


def register() -> None:
    """Register `config._experts_implementation = "meshwright"` with transformers; may be called repeatedly."""
    symbol("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS").register(IMPLEMENTATION, experts_forward)

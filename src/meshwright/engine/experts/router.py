"""What is attached to a router: its balancing loss, its figures per step, its bias, and computing in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.engine.experts.balance import Balancing, RouterMetrics, router_metrics
from meshwright.engine.patching import Patch, apply
from meshwright.errors import InputError

STATE = "router_state"
BIAS = "e_score_correction_bias"  # transformers' name for the bias that steers the choice of experts


@dataclass
class RouterState:
    """One router's settings and what it saw since the last `reset`."""

    settings: Balancing
    bias_owner: nn.Module | None  # router or block; the buffer itself is replaced when a model moves
    scale: float = 1.0  # gradient of the balancing loss: 1 / micro batches over all dp ranks, times the loss scale
    counts: torch.Tensor | None = None  # [E] int64: pairs of this rank
    sums: torch.Tensor | None = None  # float64: aux loss, z loss and entropy of this rank
    tokens: int = 0
    micro_batches: int = 0

    def record(self, measures: RouterMetrics, tokens: int) -> None:
        """Adds a micro batch."""
        sums = torch.stack((measures.aux_loss, measures.z_loss, measures.entropy)).detach().double()
        self.counts = measures.counts if self.counts is None else self.counts + measures.counts
        self.sums = sums if self.sums is None else self.sums + sums
        self.tokens += tokens
        self.micro_batches += 1


def attach_router(gate: nn.Module, block: nn.Module, settings: Balancing) -> RouterState:
    """Balances a router from now on; the state is also found at `block.router_state`."""
    owner = next((one for one in (gate, block) if isinstance(getattr(one, BIAS, None), torch.Tensor)), None)
    if settings.kind == "bias" and owner is None:
        reason = f"the router {type(gate).__name__} has no bias on its choice of experts"
        raise InputError(reason, field="moe.balancing", value="bias", fix=("moe.balancing=aux_loss",))
    if owner is not None:
        setattr(owner, BIAS, getattr(owner, BIAS).float())  # steps of 1e-3 are lost in bf16
    if settings.router_in_fp32:
        compute_in_fp32(gate)
    state = RouterState(settings, owner)
    gate.register_forward_hook(partial(_after_routing, state))
    setattr(block, STATE, state)
    return state


def router_states(model: nn.Module) -> list[RouterState]:
    """The states of all routers of a model, in the order of its layers."""
    found = (getattr(module, STATE, None) for module in model.modules())
    return [state for state in found if isinstance(state, RouterState)]


def reset(states: Sequence[RouterState]) -> None:
    """Forgets what the routers saw: called once per step, after the biases and the statistics."""
    for state in states:
        state.counts = state.sums = None
        state.tokens = state.micro_batches = 0


def update_biases(states: Sequence[RouterState], group: dist.ProcessGroup | None, rate: float) -> None:
    """Raises the bias of experts with less than the mean load and lowers the others, by one rate for all.

    The group holds all ranks that saw other tokens of the step.
    """
    chosen = [state for state in states if state.settings.kind == "bias" and state.counts is not None]
    if not chosen:
        return
    for state, counts in zip(chosen, _total_counts(chosen, group), strict=True):
        bias = getattr(state.bias_owner, BIAS)
        load = counts.to(bias.device, torch.float32)
        bias += rate * torch.sign(load.mean() - load)


def statistics(states: Sequence[RouterState], group: dist.ProcessGroup | None) -> dict[str, float]:
    """The step's figures over all routers given and all tokens of the group; asks the device once.

    max_over_mean_load is the worst layer's; the losses and the entropy are means over the layers.
    """
    seen = [state for state in states if state.counts is not None]
    if not seen:
        return {}
    loads = [counts.double() for counts in _total_counts(seen, group)]
    sums = torch.stack([state.sums for state in seen if state.sums is not None])
    # Every rank that holds a part of a sequence counted its micro batch.
    seen_by_rank = [(state.tokens, state.micro_batches / _size(state.settings.group)) for state in seen]
    figures = torch.cat((sums, sums.new_tensor(seen_by_rank)), dim=1)
    if group is not None:
        dist.all_reduce(figures, group=group)
    aux, z, entropy, tokens, micro_batches = figures.unbind(1)
    values = torch.stack([
        torch.stack([load.max() / load.mean() for load in loads]).max(),
        torch.cat([load == 0 for load in loads]).double().mean(),
        (aux / micro_batches).mean(),
        (z / micro_batches).mean(),
        (entropy / tokens).mean(),
    ])  # fmt: skip
    names = ("max_over_mean_load", "experts_without_tokens", "aux_loss", "z_loss", "entropy")
    return dict(zip(names, values.tolist(), strict=True))


def compute_in_fp32(gate: nn.Module) -> None:
    """Makes a router compute in fp32 whatever the type of its weights and inputs, autocast or not."""
    apply(gate, Fp32Router)


def is_recomputing() -> bool:
    """Whether this forward is activation checkpointing's second one: it alone runs inside a backward."""
    return torch._C._current_graph_task_id() != -1


class _InFp32:
    """What a router's forward gets as `self`: the router with every floating-point tensor in fp32."""

    def __init__(self, gate: nn.Module) -> None:
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._gate, name)
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Fp32Router(Patch):
    """A router that computes in fp32."""

    tag = "FP32Router"

    def forward(self, hidden_states: torch.Tensor, *rest: Any) -> Any:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return super(Fp32Router, type(self)).forward(_InFp32(self), hidden_states.float(), *rest)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; the state is no graph's business
def _after_routing(state: RouterState, gate: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> Any:
    """Adds the balancing loss to the graph through the routing weights, and records the micro batch once."""
    logits, weights, indices, *rest = output
    if not gate.training:
        return None
    measures = router_metrics(logits, indices, state.settings)
    if not is_recomputing():
        state.record(measures, indices.shape[0])
    if not measures.loss.requires_grad:
        return None
    return (logits, AddLoss.apply(weights, measures.loss, state), indices, *rest)  # type: ignore[no-untyped-call]


class AddLoss(torch.autograd.Function):
    """Passes a tensor on and, in backward, gives a loss beside it the gradient `state.scale`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, state: RouterState) -> torch.Tensor:
        ctx.state, ctx.like = state, (loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dtype, device = ctx.like
        return grads[0], torch.full((), ctx.state.scale, dtype=dtype, device=device), None


def _total_counts(states: Sequence[RouterState], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    each = [state.counts for state in states if state.counts is not None]
    every = torch.cat(each)
    if group is not None:
        dist.all_reduce(every, group=group)
    return list(every.split_with_sizes([one.numel() for one in each]))


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)

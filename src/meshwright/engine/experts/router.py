"""Router state: balancing loss, statistics per step, the expert bias, and fp32 computation."""

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
BIAS = "e_score_correction_bias"  # transformers' name of the bias on the choice of experts


@dataclass
class RouterState:
    """A router's settings and its statistics since the last `reset`."""

    settings: Balancing
    bias_owner: nn.Module | None  # router or block: the buffer object is replaced when the model moves
    scale: float = 1.0  # gradient of the balancing loss: loss scale / micro batches over all dp ranks
    counts: torch.Tensor | None = None  # [E] int64: pairs of this rank
    sums: torch.Tensor | None = None  # float64: aux loss, z loss and entropy of this rank
    tokens: int = 0
    micro_batches: int = 0
    token_mask: torch.Tensor | None = None  # of the current micro batch: tokens that the losses count

    def record(self, metrics: RouterMetrics, tokens: int) -> None:
        """Add the metrics of a micro batch."""
        sums = torch.stack((metrics.aux_loss, metrics.z_loss, metrics.entropy)).detach().double()
        self.counts = metrics.counts if self.counts is None else self.counts + metrics.counts
        self.sums = sums if self.sums is None else self.sums + sums
        self.tokens += tokens
        self.micro_batches += 1


def attach_router(gate: nn.Module, block: nn.Module, settings: Balancing) -> RouterState:
    """Attach balancing to a router; the state is also `block.router_state`."""
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


def mask_routers(layer: Any) -> None:
    """Make a decoder layer with routers take a `token_mask` [samples, tokens]: their losses leave out other tokens."""
    layer.masked_routers = router_states(layer)
    if layer.masked_routers:
        apply(layer, MaskedRouters)


class MaskedRouters(Patch):
    """A decoder layer that passes its routers the token mask; also when it is recomputed."""

    tag = "TokenMask"

    def forward(self: Any, *args: Any, token_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        for state in self.masked_routers:
            state.token_mask = token_mask
        return super().forward(*args, **kwargs)


def takes_token_mask(layer: Any) -> bool:
    """Return whether `mask_routers` found routers in a layer."""
    return bool(getattr(layer, "masked_routers", ()))


def router_states(model: nn.Module) -> list[RouterState]:
    """Return the states of all routers of a model in layer order."""
    found = (getattr(module, STATE, None) for module in model.modules())
    return [state for state in found if isinstance(state, RouterState)]


def reset(states: Sequence[RouterState]) -> None:
    """Clear the statistics: called once per step, after the biases were updated and the statistics read."""
    for state in states:
        state.counts = state.sums = None
        state.tokens = state.micro_batches = 0


def update_biases(states: Sequence[RouterState], group: dist.ProcessGroup | None, rate: float) -> None:
    """Raise the bias of experts below the mean load and lower the others, by the same rate.

    The group contains all ranks with other tokens of the step.
    """
    chosen = [state for state in states if state.settings.kind == "bias" and state.counts is not None]
    if not chosen:
        return
    for state, counts in zip(chosen, _total_counts(chosen, group), strict=True):
        bias = getattr(state.bias_owner, BIAS)
        load = counts.to(bias.device, torch.float32)
        bias += rate * torch.sign(load.mean() - load)


def statistics(states: Sequence[RouterState], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Return the step's statistics over all routers and all tokens of the group, with one host synchronization.

    max_over_mean_load is that of the worst layer; the losses and the entropy are means over the layers.
    """
    active = [state for state in states if state.counts is not None]
    if not active:
        return {}
    loads = [counts.double() for counts in _total_counts(active, group)]
    sums = torch.stack([state.sums for state in active if state.sums is not None])
    # Every rank with a shard of a sequence counted its micro batch.
    counted = [(state.tokens, state.micro_batches / _size(state.settings.group)) for state in active]
    totals = torch.cat((sums, sums.new_tensor(counted)), dim=1)
    if group is not None:
        dist.all_reduce(totals, group=group)
    aux, z, entropy, tokens, micro_batches = totals.unbind(1)
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
    """Make a router compute in fp32 whatever the dtype of its weights and inputs, with or without autocast."""
    gate.__dict__["forward_of_class"] = type(gate).forward  # the compiler cannot trace a call through super() with it
    apply(gate, Fp32Router)


def is_recomputing() -> bool:
    """Return whether this is the recompute of activation checkpointing: only that runs inside a backward pass."""
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

    def forward(self: Any, hidden_states: torch.Tensor, *rest: Any) -> Any:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return self.forward_of_class(_InFp32(self), hidden_states.float(), *rest)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch: untyped. The state must stay outside graphs
def _after_routing(state: RouterState, gate: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> Any:
    """Add the balancing loss to the graph through the routing weights, and record the micro batch once."""
    logits, weights, indices, *rest = output
    if not gate.training:
        return None
    metrics = router_metrics(logits, indices, state.settings, state.token_mask)
    if not is_recomputing():
        state.record(metrics, indices.shape[0])
    if not metrics.loss.requires_grad:
        return None
    return (logits, AddLoss.apply(weights, metrics.loss, state), indices, *rest)  # type: ignore[no-untyped-call]


class AddLoss(torch.autograd.Function):
    """Return a tensor unchanged; in the backward pass, give the loss the gradient `state.scale`."""

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

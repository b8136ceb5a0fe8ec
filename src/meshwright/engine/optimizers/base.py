"""The base of all update rules, which work on the local shards of parameters, with state sharded likewise.

DTensors of different meshes cannot be passed to one multi-tensor call; their local shards can. An elementwise rule
gives the same result on shards as on the full tensor, so only Muon needs to know how a parameter is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

# Elements updated per multi-tensor call; bounds each fp32 temporary of bf16 tensors to 256 MiB.
BUCKET = 2**26

Group = dict[str, Any]
Tensors = Sequence[Tensor]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; call it under no_grad."""
    if not isinstance(tensor, DTensor):
        return tensor
    # `to_local` of a parameter makes a view each time, which is a third of the time of a dry run's update.
    shard = tensor._local_tensor
    return shard if type(shard) is Tensor else tensor.to_local()


def as_fp32(tensors: Tensors) -> list[Tensor]:
    """Return the tensors in fp32: themselves if they are fp32, else copies."""
    return [tensor.float() for tensor in tensors]


def store(targets: Tensors, values: Tensors) -> None:
    """Write fp32 values back where `as_fp32` made copies."""
    pairs = [(target, value) for target, value in zip(targets, values, strict=True) if target is not value]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])


def apply_weight_decay(weights: list[Tensor], group: Group) -> None:
    """Multiply the weights by 1 - lr * weight_decay (decoupled weight decay)."""
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])


def buckets(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Yield parameters in buckets of about BUCKET local elements, without those that are empty on this rank."""
    run: list[Parameter] = []
    size = 0
    for parameter in parameters:
        elements = local(parameter).numel()
        if run and size + elements > BUCKET:
            yield run
            run, size = [], 0
        if elements:
            run.append(parameter)
            size += elements
    if run:
        yield run


class LocalOptimizer(torch.optim.Optimizer):
    """An optimizer over local shards, with a step count per group and state dtypes independent of the weights."""

    def __init__(self, groups: list[Group], lr: float) -> None:
        # lr_scale: the trainer multiplies the schedule's learning rate by it.
        super().__init__(groups, {"lr": lr, "lr_scale": 1.0, "weight_decay": 0.0, "rule": "", "step": 0})
        self.factor: Tensor | None = None  # multiplies the gradients: clipping without a pass of its own

    @property
    def takes_factor(self) -> bool:
        """Whether `step` multiplies gradients by `factor` itself."""
        return False

    def init_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        """Return a parameter's state before its first step."""
        raise NotImplementedError

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        """Update parameters that have a gradient; group["step"] already includes this step."""
        raise NotImplementedError

    def eval_mode(self) -> None:
        """Load the weights for evaluation into the parameters; a no-op for most rules."""

    def train_mode(self) -> None:
        """Load the weights for training back into the parameters."""

    @torch.no_grad()
    def allocate_state(self) -> None:
        """Initialize the state of parameters that have none yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state and (state := self.init_state(parameter, group)):
                    self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # one body
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_new = not self.state
        self.allocate_state()
        # torch.distributed.checkpoint initializes state by a step with learning rate 0, which must not be counted.
        if is_new and not any(group["lr"] for group in self.param_groups):
            return loss
        for group in self.param_groups:
            group["step"] += 1
            self.update(group, [one for one in group["params"] if _has_gradient(one)])
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; it keeps the dtype it was saved in."""
        super().load_state_dict(dict(state_dict))
        # torch casts all state to its parameter's dtype, which is not that of the moments.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        current = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, current, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and self.state[parameter][name].dtype != value.dtype:
                    self.state[parameter][name] = value.to(device=parameter.device)

    def locals(self, parameters: Sequence[Parameter], name: str) -> list[Tensor]:
        """Return this rank's shards of one state entry."""
        return [local(self.state[parameter][name]) for parameter in parameters]


def weights_and_gradients(parameters: Sequence[Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's shards of the parameters and their gradients."""
    return [local(one) for one in parameters], [local(one.grad) for one in parameters if one.grad is not None]


def _has_gradient(parameter: Parameter) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return False
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        found, expected = gradient.placements, parameter.placements
        if found != expected:
            raise RuntimeError(f"a gradient has placements {found}, its parameter {expected}")
    return True

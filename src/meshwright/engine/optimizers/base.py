"""What all update rules share: they work on each rank's own part of a parameter, with state that lives like it.

Parameters of different meshes cannot meet in one multi-tensor call as DTensors; their local parts can. An elementwise
rule gives the same numbers on parts as on the whole, so no rule but Muon's needs to know how a parameter is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

# Elements updated per multi-tensor call. It bounds the fp32 temporaries of narrow formats to some 256 MiB each.
BUCKET = 2**26

Group = dict[str, Any]
Tensors = Sequence[Tensor]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; call it without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def widened(tensors: Tensors) -> list[Tensor]:
    """The tensors in fp32: themselves where they are, copies otherwise."""
    return [tensor.float() for tensor in tensors]


def store(targets: Tensors, values: Tensors) -> None:
    """Writes fp32 values back where `widened` made copies."""
    pairs = [(target, value) for target, value in zip(targets, values, strict=True) if target is not value]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])


def shrink(weights: list[Tensor], group: Group) -> None:
    """Decoupled weight decay."""
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])


def buckets(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters in runs of about BUCKET local elements; those with nothing on this rank are left out."""
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
    """An optimizer whose groups carry their step count, and whose state has formats of its own."""

    def __init__(self, groups: list[Group], lr: float) -> None:
        # lr_scale: the loop sets every group's lr to the schedule's times this.
        super().__init__(groups, {"lr": lr, "lr_scale": 1.0, "weight_decay": 0.0, "rule": "", "step": 0})
        self.factor: Tensor | None = None  # gradients count times this: clipping, where the rule can do it in its pass

    @property
    def takes_factor(self) -> bool:
        """Whether `step` multiplies gradients by `factor` itself."""
        return False

    def fresh_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        """One step of parameters that have a gradient; group["step"] counts it already."""
        raise NotImplementedError

    def eval_mode(self) -> None:
        """Puts the weights to evaluate into the parameters; most rules train on those already."""

    def train_mode(self) -> None:
        """Puts the weights to train back into the parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # one body
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fresh = not self.state
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state and (state := self.fresh_state(parameter, group)):
                    self.state[parameter] = state
        # torch.distributed.checkpoint makes state exist by a step of learning rate 0, which must not count as one.
        if fresh and not any(group["lr"] for group in self.param_groups):
            return loss
        for group in self.param_groups:
            group["step"] += 1
            self.update(group, [one for one in group["params"] if _gradient_fits(one)])
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; state keeps the format it was saved in."""
        super().load_state_dict(dict(state_dict))
        # torch has cast every state to its parameter's format, which is not that of the moments.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and self.state[parameter][name].dtype != value.dtype:
                    self.state[parameter][name] = value.to(device=parameter.device)

    def locals(self, parameters: Sequence[Parameter], name: str) -> list[Tensor]:
        """This rank's parts of one kind of state."""
        return [local(self.state[parameter][name]) for parameter in parameters]


def weights_and_gradients(parameters: Sequence[Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's parts of parameters and of their gradients."""
    return [local(one) for one in parameters], [local(one.grad) for one in parameters if one.grad is not None]


def _gradient_fits(parameter: Parameter) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return False
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        laid_out, expected = gradient.placements, parameter.placements
        if laid_out != expected:
            raise RuntimeError(f"a gradient is laid out {laid_out}, its parameter {expected}")
    return True

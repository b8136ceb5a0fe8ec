"""What a rank holds of a training's state, as parts of whole tensors that every layout names alike.

Stages keep the model's names, cut tensors know their place in the whole, and an embedding that several stages hold
(as a tied head, or for multi-token prediction) is one tensor. So a checkpoint of one layout is one of all layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.engine.experts.router import BIAS
from meshwright.engine.faults import RunError
from meshwright.engine.model.init import local_indices
from meshwright.engine.optimizers.grouping import decays
from meshwright.engine.parallelize.init_weights import tied_embedding_name

if TYPE_CHECKING:
    from meshwright.engine.model.stage import Stage
    from meshwright.engine.optimizers import LocalOptimizer
    from meshwright.engine.trainer import Trainer

# What the recipe says of a group; the rest of its numbers are state.
GROUP_SETTINGS = ("params", "lr", "lr_scale", "weight_decay", "rule")


@dataclass(frozen=True)
class Part:
    """A box of a whole tensor, and this rank's memory of it."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor  # plain; its shape is that of the box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def held_parts(trainer: Trainer) -> list[Part]:
    """This rank's parts of weights, buffers and optimizer state; what a frozen base has is left out with adapters."""
    make_state_exist(trainer.optimizer)
    adapters_only = trainer.recipe.goal == "peft"
    found = [part for stage in trainer.stages for part in _of_stage(stage, trainer.optimizer, adapters_only)]
    return [part for part in found if part.tensor.numel()]


def make_state_exist(optimizer: LocalOptimizer) -> None:
    """Gives parameters that have not been updated yet the state they start with."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state and (state := optimizer.fresh_state(parameter, group)):
                optimizer.state[parameter] = state


def group_numbers(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Step counts and other numbers of the optimizer's groups on this rank, by what is in the group."""
    return {
        _group_name(group, names): {
            key: value
            for key, value in group.items()
            if key not in GROUP_SETTINGS and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for group, names in _groups(trainer)
    }


def load_group_numbers(trainer: Trainer, saved: dict[str, dict[str, float]]) -> None:
    """Puts the numbers back; a group that the checkpoint does not know is a KeyError."""
    for group, names in _groups(trainer):
        group.update(saved[_group_name(group, names)])


def _groups(trainer: Trainer) -> Iterator[tuple[dict[str, Any], dict[int, str]]]:
    names = {id(p): name for stage in trainer.stages for name, p in stage.named_parameters()}
    for group in trainer.optimizer.param_groups:
        yield group, names


def _group_name(group: dict[str, Any], names: dict[int, str]) -> str:
    first = group["params"][0]
    return f"{group['rule']}, {'decays' if decays(names[id(first)], first) else 'does not decay'}"


def _of_stage(stage: Stage, optimizer: LocalOptimizer, adapters_only: bool) -> Iterator[Part]:
    tied = tied_embedding_name(stage)
    for name, parameter in stage.named_parameters():
        known = tied if tied and name == "lm_head.weight" else name
        if parameter.requires_grad or not adapters_only or name.endswith(BIAS):
            yield part_of(f"model/{known}", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            yield part_of(f"optimizer/{key}/{known}", value)
    for path, module in stage.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            kept = name not in module._non_persistent_buffers_set
            if kept and (name == BIAS or not adapters_only):
                yield part_of(f"model/{path}.{name}", buffer)


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """The part of a tensor that this rank holds."""
    plain = tensor.detach()
    if not isinstance(plain, DTensor):
        return Part(name, tuple(plain.shape), (0,) * plain.dim(), plain)
    rows = [local_indices(plain, dim) for dim in range(plain.dim())]
    local = plain.to_local()
    if [len(one) for one in rows] != list(local.shape):
        raise RunError(
            f"{name} is cut in a way that checkpoints do not know: {tuple(local.shape)} of {tuple(plain.shape)} "
            f"as {plain.placements}",
            fix=("layout.strategy=fsdp2",),
        )
    offset = tuple(int(one[0]) if len(one) else 0 for one in rows)
    return Part(name, tuple(plain.shape), offset, local)

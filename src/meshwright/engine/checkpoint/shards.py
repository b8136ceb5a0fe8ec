"""The shards of the training state that a rank holds, under names that are the same in every layout.

Stages keep the model's parameter names, shards know their offset in the full tensor, and an embedding on several
stages (as a tied head, or for multi-token prediction) is one tensor. So any layout can load any checkpoint.
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

if TYPE_CHECKING:
    from meshwright.engine.model.stage import Stage
    from meshwright.engine.optimizers import LocalOptimizer
    from meshwright.engine.trainer import Trainer

# Entries of a parameter group that come from the recipe; its other numbers are state.
GROUP_SETTINGS = ("params", "lr", "lr_scale", "weight_decay", "rule")


@dataclass(frozen=True)
class Shard:
    """A rectangular part of a full tensor, and this rank's memory of it."""

    name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor  # a plain tensor of the shard's shape

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def local_shards(trainer: Trainer) -> list[Shard]:
    """Return this rank's shards of weights, buffers and optimizer state; with adapters, without the frozen base."""
    trainer.optimizer.allocate_state()
    adapters_only = trainer.recipe.goal == "peft"
    found = [shard for stage in trainer.stages for shard in _stage_shards(stage, trainer.optimizer, adapters_only)]
    return [shard for shard in found if shard.tensor.numel()]


def group_state(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Return the step counts and other numbers of this rank's parameter groups, by group name."""
    return {
        _group_name(group, names): {
            key: value
            for key, value in group.items()
            if key not in GROUP_SETTINGS and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for group, names in _groups(trainer)
    }


def load_group_state(trainer: Trainer, saved: dict[str, dict[str, float]]) -> None:
    """Restore the numbers of the parameter groups; raise KeyError for a group that the checkpoint does not have."""
    for group, names in _groups(trainer):
        group.update(saved[_group_name(group, names)])


def _groups(trainer: Trainer) -> Iterator[tuple[dict[str, Any], dict[int, str]]]:
    names = {id(p): stage.shared_name(name) for stage in trainer.stages for name, p in stage.named_parameters()}
    for group in trainer.optimizer.param_groups:
        yield group, names


def _group_name(group: dict[str, Any], names: dict[int, str]) -> str:
    first = group["params"][0]
    return f"{group['rule']}, {'decays' if decays(names[id(first)], first) else 'does not decay'}"


def _stage_shards(stage: Stage, optimizer: LocalOptimizer, adapters_only: bool) -> Iterator[Shard]:
    for name, parameter in stage.named_parameters():
        known = stage.shared_name(name)
        if parameter.requires_grad or not adapters_only or name.endswith(BIAS):
            yield shard_of(f"model/{known}", parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            yield shard_of(f"optimizer/{key}/{known}", value)
    for path, module in stage.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            kept = name not in module._non_persistent_buffers_set
            if kept and (name == BIAS or not adapters_only):
                yield shard_of(f"model/{path}.{name}", buffer)


def shard_of(name: str, tensor: torch.Tensor) -> Shard:
    """Return this rank's shard of a tensor."""
    plain = tensor.detach()
    if not isinstance(plain, DTensor):
        return Shard(name, tuple(plain.shape), (0,) * plain.dim(), plain)
    rows = [local_indices(plain, dim) for dim in range(plain.dim())]
    local = plain.to_local()
    if [len(one) for one in rows] != list(local.shape):
        raise RunError(
            f"{name} has a sharding that checkpoints do not support: {tuple(local.shape)} of {tuple(plain.shape)} "
            f"as {plain.placements}",
            fix=("layout.strategy=fsdp2",),
        )
    offset = tuple(int(one[0]) if len(one) else 0 for one in rows)
    return Shard(name, tuple(plain.shape), offset, local)

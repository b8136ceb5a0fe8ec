"""Collectives of Python objects, for what ranks exchange outside the step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks in rank order, on every rank (all-gather)."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value, group=group)
    return values

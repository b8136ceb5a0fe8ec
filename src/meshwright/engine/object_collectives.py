"""Plain values that ranks tell each other beside the step: what is saved, found or wrong."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def rank() -> int:
    """The number of this process; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gathered(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks in their order, on all of them."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value, group=group)
    return values

"""Counts the bytes that a model saves between forward and backward, by tracking the outputs of operations."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Records weak references to the storages of all operation outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen[id(storage)] = weakref.ref(storage)
        return out

    def alive(self) -> int:
        """Return the bytes of storages that are still alive."""
        found = [one() for one in self.seen.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)


def kept_bytes(model: nn.Module, call: Any) -> int:
    """Return the bytes that stay alive with the result of a call, without the model's parameters and buffers."""
    storages = [
        one.untyped_storage() for one in (*model.parameters(), *model.buffers())
    ]  # kept alive, so that their ids are not reused
    of_model = {id(one) for one in storages}
    watch = _Watch()
    with watch:
        result = call()
    for known in of_model & set(watch.seen):
        del watch.seen[known]
    alive = watch.alive()
    del result
    return alive

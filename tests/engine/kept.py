"""How many bytes a model keeps between forward and backward, by watching the memory that operations return."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Remembers every piece of memory that an operation returned, without keeping it alive."""

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
        """Bytes of what is still there."""
        found = [one() for one in self.seen.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)


def kept_bytes(model: nn.Module, call: Any) -> int:
    """Bytes that a call leaves alive as long as its result is there; the model's own memory does not count."""
    held = [one.untyped_storage() for one in (*model.parameters(), *model.buffers())]  # alive: ids are not given again
    own = {id(one) for one in held}
    watch = _Watch()
    with watch:
        result = call()
    for known in own & set(watch.seen):
        del watch.seen[known]
    alive = watch.alive()
    del result
    return alive

"""Outputs that are not kept: a module is computed again when the backward pass asks for what it gave.

Checkpointing a norm or a linear by itself frees nothing, because the next operation keeps its output as an input. Here
whoever would keep that output keeps a note of how to compute it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Dropped:
    """One output that is made again; held only while there are askers left."""

    def __init__(self, again: Callable[[], torch.Tensor]) -> None:
        self.again, self.askers = again, 0
        self.value: torch.Tensor | None = None

    def give(self) -> torch.Tensor:
        """The output once more."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.again()
        value = self.value
        self.askers -= 1
        if self.askers <= 0:
            self.value = None
        return value


class Notes:
    """The dropped outputs of one forward of a layer, found by the memory they lie in."""

    def __init__(self) -> None:
        self.outputs: dict[int, tuple[torch.Tensor, Dropped]] = {}  # tensors too: memory in use is not given out again

    def add(self, output: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        """From now on nobody keeps this output."""
        self.outputs[output.untyped_storage()._cdata] = (output, Dropped(again))

    def hooks(self) -> AbstractContextManager[Any]:
        """While it lasts, what autograd would keep of dropped outputs is replaced by notes."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        found = self.outputs.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        found[1].askers += 1
        return found[1], tensor.shape, tensor.stride(), tensor.storage_offset()


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    dropped, shape, stride, offset = kept
    value: torch.Tensor = dropped.give()
    return value.as_strided(shape, stride, offset)


def drop_outputs(layer: Any, modules: list[nn.Module]) -> None:
    """Makes a layer keep none of these modules' outputs."""
    for module in modules:
        module.layer_notes = layer.__dict__.setdefault("notes_now", [])  # shared by all
        module.__class__ = _dropping(type(module))  # type: ignore[arg-type]  # mypy: classes are no Hashable
    if modules:
        layer.__class__ = _noting(type(layer))  # type: ignore[arg-type]  # mypy: classes are no Hashable


@cache
def _noting(kind: type[Any]) -> type[Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes = Notes()
        self.notes_now.append(notes)
        try:
            with notes.hooks():
                return kind.forward(self, *args, **kwargs)
        finally:
            self.notes_now.remove(notes)
            notes.outputs.clear()

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@cache
def _dropping(kind: type[Any]) -> type[Any]:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = kind.forward(self, hidden)
        if torch.is_grad_enabled() and self.layer_notes:
            # Inside a tensor-parallel region a module's parameters are other tensors than later, in the backward pass.
            parameters = [dict(module._parameters) for module in self.modules()]
            self.layer_notes[-1].add(output, partial(_once_more, self, kind.forward, parameters, hidden))
        return output

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _once_more(module: nn.Module, forward: Any, parameters: list[dict[str, Any]], hidden: torch.Tensor) -> torch.Tensor:
    """The module's forward with the parameters it had at the first time."""
    now = [dict(one._parameters) for one in module.modules()]
    try:
        for one, then in zip(module.modules(), parameters, strict=True):
            one._parameters.update(then)
        output: torch.Tensor = forward(module, hidden)
        return output
    finally:
        for one, before in zip(module.modules(), now, strict=True):
            one._parameters.update(before)

"""Outputs that autograd does not save: the backward pass recomputes or gathers them again.

Checkpointing a norm or a linear layer by itself frees nothing, because the next operation saves its output as an input.
Here saved-tensor hooks replace that output by a note of how to make it: run a module again, or gather the shards of the
other ranks again.

Autograd calls only the innermost hooks. So this is not used inside a fully recomputed module, which saves nothing
anyway, nor with activation offload, whose hooks it would hide, nor in compiled layers, where the compiler decides what
is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.engine.patching import Patch, apply


class RecomputedTensor:
    """An output that the backward pass recomputes once for all operations that saved it."""

    def __init__(self, recompute: Callable[[], torch.Tensor]) -> None:
        self.recompute, self.pending = recompute, 0  # saves that were not unpacked yet
        self.value: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        """Return the output; free it after the last operation that saved it."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.recompute()
        value = self.value
        self.pending -= 1
        if self.pending <= 0:
            self.value = None
        return value


class OutputNotes:
    """The outputs of one forward pass of a layer that are not saved, by their storage."""

    def __init__(self) -> None:
        # Weak references: a later tensor at the same address has another storage object and is saved as usual.
        self.outputs: dict[int, tuple[weakref.ref[torch.UntypedStorage], RecomputedTensor]] = {}

    def add(self, output: torch.Tensor, recompute: Callable[[], torch.Tensor]) -> None:
        """Register an output that later operations must not save."""
        storage = output.untyped_storage()
        self.outputs[storage._cdata] = (weakref.ref(storage), RecomputedTensor(recompute))

    def gathered(self, gather: Callable[[torch.Tensor], torch.Tensor], shard: torch.Tensor) -> torch.Tensor:
        """Gather a shard; only the shard is saved (or, if it is itself recomputed, its note)."""
        full = gather(shard)
        if torch.is_grad_enabled():
            self.add(full, partial(_gather_again, gather, self._pack(shard)))
        return full

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the context in which autograd saves notes in place of registered outputs."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        reference, output = self.outputs.get(storage._cdata, (None, None))
        if output is None or reference is None or reference() is not storage:
            # Detached: an operation that saves its own output would otherwise keep itself alive in a cycle.
            return tensor if tensor.grad_fn is None else tensor.detach()
        output.pending += 1
        return output, tensor.shape, tensor.stride(), tensor.storage_offset()


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    output, shape, stride, offset = packed
    value: torch.Tensor = output.unpack()
    return value.as_strided(shape, stride, offset)


def _gather_again(gather: Callable[[torch.Tensor], torch.Tensor], packed: Any) -> torch.Tensor:
    return gather(_unpack(packed))


def recompute_outputs(layer: Any, modules: list[nn.Module]) -> None:
    """Recompute the outputs of these modules of a layer in the backward pass."""
    _enable_notes(layer, modules)
    for module in modules:
        apply(module, RecomputedOutput)


def recompute_gathers(layer: Any, modules: list[nn.Module]) -> None:
    """Save only this rank's shard of the inputs of these tensor-parallel modules; the backward pass gathers again."""
    _enable_notes(layer, modules)
    for module in modules:
        apply(module, RecomputedGather)


def _enable_notes(layer: Any, modules: list[nn.Module]) -> None:
    if modules and "active_notes" not in layer.__dict__:
        layer.active_notes = []  # a stack: forward passes of a layer may nest
        apply(layer, OutputNoting)
    for module in modules:
        module.layer_notes = layer.active_notes  # the same list


class OutputNoting(Patch):
    """A layer in whose forward pass autograd saves notes in place of registered outputs."""

    tag = "OutputNotes"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes = OutputNotes()
        self.active_notes.append(notes)
        try:
            with notes.hooks():
                return super().forward(*args, **kwargs)
        finally:
            self.active_notes.remove(notes)
            notes.outputs.clear()


class RecomputedOutput(Patch):
    """A module whose output nobody saves: the backward pass computes it again."""

    tag = "RecomputeOutput"

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden)
        if torch.is_grad_enabled() and self.layer_notes:
            # A tensor-parallel parent has replaced the parameters by local ones, which are gone in the backward pass.
            parameters = [dict(module._parameters) for module in self.modules()]
            self.layer_notes[-1].add(output, partial(_run_again, self, super().forward, parameters, hidden))
        return output


class RecomputedGather(Patch):
    """A tensor-parallel module whose gathered input nobody saves: the backward pass gathers it again."""

    tag = "RecomputeGather"

    def gather_input(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        gather: Any = super().gather_input  # type: ignore[misc]  # that of TensorParallel, which is below
        full: torch.Tensor = self.layer_notes[-1].gathered(gather, hidden) if self.layer_notes else gather(hidden)
        return full


def _run_again(module: nn.Module, forward: Any, parameters: list[dict[str, Any]], hidden: torch.Tensor) -> torch.Tensor:
    """Run a module's forward with the parameters of the first pass."""
    current = [dict(one._parameters) for one in module.modules()]
    try:
        for one, first in zip(module.modules(), parameters, strict=True):
            one._parameters.update(first)
        output: torch.Tensor = forward(hidden)
        return output
    finally:
        for one, before in zip(module.modules(), current, strict=True):
            one._parameters.update(before)

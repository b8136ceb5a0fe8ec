"""Outputs that are not kept: they are made again when the backward pass asks for them.

Checkpointing a norm or a linear by itself frees nothing, because the next operation keeps its output as an input. Here
whoever would keep that output keeps a note of how to make it instead: by computing a module again, or by gathering once
more what the other ranks hold.

Only the innermost of autograd's hooks sees what is saved. So nothing is dropped inside what is run again as a whole,
where nothing is kept anyway, nor where hooks that move activations to the host would be hidden; and a compiler, which
decides itself what its graphs keep, knows no notes.
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


class OutputNotes:
    """The dropped outputs of one forward of a layer, found by the memory they lie in."""

    def __init__(self) -> None:
        # Notes keep nothing alive: what lies in the same place later is told from the output by its storage.
        self.outputs: dict[int, tuple[weakref.ref[torch.UntypedStorage], RecomputedTensor]] = {}

    def add(self, output: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        """From now on nobody keeps this output."""
        storage = output.untyped_storage()
        self.outputs[storage._cdata] = (weakref.ref(storage), RecomputedTensor(again))

    def gathered(self, gather: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor) -> torch.Tensor:
        """What `gather` makes of this rank's part and the others'; nobody keeps more than the part, or a note of it."""
        whole = gather(part)
        if torch.is_grad_enabled():
            self.add(whole, partial(_gathered_again, gather, self._pack(part)))
        return whole

    def hooks(self) -> AbstractContextManager[Any]:
        """While it lasts, what autograd would keep of dropped outputs is replaced by notes."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        there, dropped = self.outputs.get(storage._cdata, (None, None))
        if dropped is None or there is None or there() is not storage:
            # Without its history: an operation that keeps its own output would hold itself.
            return tensor if tensor.grad_fn is None else tensor.detach()
        dropped.askers += 1
        return dropped, tensor.shape, tensor.stride(), tensor.storage_offset()


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    dropped, shape, stride, offset = kept
    value: torch.Tensor = dropped.give()
    return value.as_strided(shape, stride, offset)


def _gathered_again(gather: Callable[[torch.Tensor], torch.Tensor], kept: Any) -> torch.Tensor:
    return gather(_unpack(kept))


def recompute_outputs(layer: Any, modules: list[nn.Module]) -> None:
    """Makes a layer keep none of these modules' outputs."""
    _take_notes(layer, modules)
    for module in modules:
        apply(module, RecomputedOutput)


def recompute_gathers(layer: Any, regions: list[nn.Module]) -> None:
    """Makes a layer keep of what enters these regions this rank's part alone; the backward pass gathers it again."""
    _take_notes(layer, regions)
    for region in regions:
        apply(region, RecomputedGather)


def _take_notes(layer: Any, modules: list[nn.Module]) -> None:
    if modules and "notes_now" not in layer.__dict__:
        layer.notes_now = []
        apply(layer, NotesOutputs)
    for module in modules:
        module.layer_notes = layer.notes_now  # shared by all


class NotesOutputs(Patch):
    """A layer in whose forward pass autograd saves notes instead of outputs that are recomputed."""

    tag = "RecomputeNotes"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes = OutputNotes()
        self.notes_now.append(notes)
        try:
            with notes.hooks():
                return super().forward(*args, **kwargs)
        finally:
            self.notes_now.remove(notes)
            notes.outputs.clear()


class RecomputedOutput(Patch):
    """A module whose output nobody saves: the backward pass computes it again."""

    tag = "RecomputeOutput"

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden)
        if torch.is_grad_enabled() and self.layer_notes:
            # Inside a tensor-parallel region a module's parameters are other tensors than later, in the backward pass.
            parameters = [dict(module._parameters) for module in self.modules()]
            self.layer_notes[-1].add(output, partial(_once_more, self, super().forward, parameters, hidden))
        return output


class RecomputedGather(Patch):
    """A tensor-parallel module whose gathered input nobody saves: the backward pass gathers it again."""

    tag = "RecomputeGather"

    def enter(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        gather: Any = super().enter  # type: ignore[misc]  # that of TensorParallel, which is below
        entered: torch.Tensor = self.layer_notes[-1].gathered(gather, hidden) if self.layer_notes else gather(hidden)
        return entered


def _once_more(module: nn.Module, forward: Any, parameters: list[dict[str, Any]], hidden: torch.Tensor) -> torch.Tensor:
    """The module's forward with the parameters it had at the first time."""
    now = [dict(one._parameters) for one in module.modules()]
    try:
        for one, then in zip(module.modules(), parameters, strict=True):
            one._parameters.update(then)
        output: torch.Tensor = forward(hidden)
        return output
    finally:
        for one, before in zip(module.modules(), now, strict=True):
            one._parameters.update(before)

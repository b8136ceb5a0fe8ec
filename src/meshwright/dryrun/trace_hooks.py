"""Marks in the book: which micro batch, which layer, forward or backward; and what is left out of a shortened step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from meshwright.dryrun.allocation_log import AllocationLedger, Key
from meshwright.dryrun.layer_dedup import kept_layers, kept_micro_batches, kind_of_layer, likes
from meshwright.engine.parallelize.document_isolation import runs_by_document
from meshwright.engine.patching import Patch, apply
from meshwright.engine.trainer import StepCallbacks, Trainer

BEFORE, AFTER = -1, 1 << 20  # in place of a layer's number: what comes before the first and after the last
REPLAYED = 1 << 21  # a whole pass of a micro batch that was left out


_NEVER_GATHERED = SimpleNamespace(grad=None)


class _Mark(torch.autograd.Function):
    """Passes a tensor on and notes what begins: on its way forward, and on its gradient's way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marks: Marks, ahead: Key | None, behind: Key, left: Any) -> torch.Tensor:
        ctx.marks, ctx.behind, ctx.left = marks, behind, left
        if ahead is not None:
            marks.ledger.mark(ahead)
        return x.detach()  # not a view: schedules that split the backward pass cut outputs off in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.left is not None:
            ctx.marks.ledger.tag(_whole_gradients(ctx.left), "gradients")
        ctx.marks.ledger.mark(ctx.behind)
        return grads[0], None, None, None, None


def _passed(x: torch.Tensor, marks: Marks, ahead: Key | None, behind: Key, left: Any = None) -> torch.Tensor:
    return _Mark.apply(x, marks, ahead, behind, left)  # type: ignore[no-any-return, no-untyped-call]  # torch's


def _whole_gradients(module: nn.Module) -> Iterator[Any]:
    """Gradients that FSDP has not cut up yet: those of several micro batches are summed before."""
    yield from _summed(_gathered_parameters(module))


def _summed(parameters: Iterable[Any]) -> Iterator[Any]:
    for parameter in parameters:
        yield getattr(parameter, "unsharded_accumulated_grad", None)
        whole = getattr(parameter, "_unsharded_param", None)
        yield whole.grad if whole is not None else None


def _gathered_parameters(module: nn.Module) -> Iterator[Any]:
    """What FSDP knows of every parameter that it gathers inside a module."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            state: Any = one._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                yield from group.fsdp_params if group is not None else ()


def _kinds(layers: list[nn.Module]) -> list[Hashable]:
    """The kinds of layers; the first that sees documents apart works out where they lie, for all behind it."""
    kinds = [kind_of_layer(layer) for layer in layers]
    for place in [place for place, layer in enumerate(layers) if runs_by_document(layer)][:1]:
        kinds[place] = "finds documents", kinds[place]
    return kinds


class Chunk:
    """One of the rank's pipeline chunks: its layers, which of them are run, and how many passes there were."""

    def __init__(self, number: int, stage: Any, shortened: bool) -> None:
        self.number, self.stage = number, stage
        self.layers: dict[int, nn.Module] = dict(getattr(stage, "own_layers", {}))
        self.numbers = list(self.layers)
        kinds = _kinds(list(self.layers.values()))
        places = kept_layers(kinds) if shortened else list(range(len(kinds)))
        self.kept = [self.numbers[i] for i in places]
        self.like = [self.numbers[i] for i in likes(kinds, places)]
        self.forwards = 0
        self.now = -1  # the micro batch that a pipeline runs forward
        inside = {id(p) for layer in self.layers.values() for p in _gathered_parameters(layer)}
        self.outside = [p for p in _gathered_parameters(stage) if id(p) not in inside]

    @property
    def left_out(self) -> list[int]:
        """Layers that are not run."""
        return [number for number in self.numbers if number not in self.kept]


class TracedLayers(Patch):
    """A stage that runs only the layers to trace, each with its marks."""

    tag = "Traced"

    @property
    def own_layers(self: Any) -> dict[int, Any]:
        layers: dict[int, Any] = self.traced_layers
        return layers


class Marks(StepCallbacks):
    """Looks on while the trainer steps and notes what begins; runs only what has to be traced."""

    def __init__(self, ledger: AllocationLedger, trainer: Trainer, shortened: bool = False) -> None:
        self.ledger, self.trainer = ledger, trainer
        self.step = 0
        self.chunks = [Chunk(number, stage, shortened) for number, stage in enumerate(trainer.stages)]
        self.micro_batches = kept_micro_batches(trainer.micro_batches) if shortened else None
        for chunk in self.chunks:
            self._follow(chunk)

    def _follow(self, chunk: Chunk) -> None:
        stage: Any = chunk.stage
        stage.register_forward_pre_hook(lambda *_: self._begins(chunk), prepend=True)
        stage.register_forward_hook(lambda _, __, out: self._ends(chunk, out))
        if chunk.layers:
            for number in chunk.left_out if not self._gathers_stages() else ():
                for parameter in _gathered_parameters(chunk.layers[number]):
                    parameter._unsharded_param = _NEVER_GATHERED
            stage.traced_layers = {number: self._layer(chunk, number) for number in chunk.kept}
            apply(stage, TracedLayers)

    def _gathers_stages(self) -> bool:
        """Whether weights are gathered by the schedule, a stage at a time: then those of left-out layers are too."""
        pipeline = self.trainer.pipeline
        return pipeline is not None and isinstance(pipeline.schedule, PipelineScheduleMulti)

    def _begins(self, chunk: Chunk) -> None:
        self.ledger.tag(_summed(chunk.outside), "gradients")
        self.ledger.mark(Key(self.step, "forward", chunk.number, self._number(chunk), BEFORE))

    def _ends(self, chunk: Chunk, out: torch.Tensor) -> torch.Tensor:
        number = self._number(chunk)
        chunk.forwards += 1
        return _passed(out, self, None, Key(self.step, "backward", chunk.number, number, AFTER))

    def _number(self, chunk: Chunk) -> int:
        """The micro batch that runs forward, by its number among all of the step."""
        if self.trainer.pipeline is not None:
            return chunk.now
        return self.traced(self.step)[chunk.forwards]

    def traced(self, step: int) -> list[int]:
        """The micro batches of a step that are run; the first step is there for the state that its update makes."""
        every = list(range(self.trainer.micro_batches))
        if self.micro_batches is None:
            return every
        return self.micro_batches if step or self.trainer.pipeline is not None else every[-1:]

    def _layer(self, chunk: Chunk, number: int) -> Any:
        layer = chunk.layers[number]
        at = chunk.kept.index(number)
        before = chunk.kept[at - 1] if at else BEFORE
        is_last = number == chunk.kept[-1]

        def run(hidden: torch.Tensor, **told: Any) -> Any:
            where = Key(self.step, "forward", chunk.number, self._number(chunk), number)
            back = where._replace(phase="backward")
            hidden = _passed(hidden, self, where, back._replace(layer=before), layer)
            out = layer(hidden, **told)
            out = out[0] if isinstance(out, tuple) else out
            if not is_last:
                return out
            return _passed(out, self, where._replace(layer=AFTER), back)

        return run

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Data; the passes, which mark themselves; gradients."""
        if name == "data":
            for chunk in self.chunks:
                chunk.forwards = 0
            self.ledger.mark(Key(self.step, "data"))
        elif name == "optimizer":
            self._fill_up()
            self.ledger.mark(Key(self.step, "gradients"))
        yield

    def on_stop_vote(self, stops: torch.Tensor) -> None:
        """The gradients are done; the update begins."""
        self.ledger.mark(Key(self.step, "optimizer"))

    def _fill_up(self) -> None:
        """Gives layers that were not run the gradients that they would have."""
        parameters = [p for chunk in self.chunks for p in chunk.stage.parameters()]
        self.ledger.tag((p.grad for p in parameters), "gradients")
        self.ledger.mark(Key(self.step, "filled"))
        for chunk in self.chunks:
            for number in chunk.left_out:
                for p in chunk.layers[number].parameters():
                    if p.requires_grad and p.grad is None:
                        p.grad = torch.empty_like(p)
        self.ledger.tag((p.grad for p in parameters), "gradients")


def shortened_batch(batch: Any, kept: list[int]) -> Any:
    """A step's batch that gives only some of its micro batches."""

    class Shortened(type(batch)):  # type: ignore[misc]  # a batch is what its loader says
        def micro_batches(self, size: int) -> Any:
            every = super().micro_batches(size)
            return [every[i] for i in kept]

    return Shortened(**{name: getattr(batch, name) for name in batch.__dataclass_fields__})

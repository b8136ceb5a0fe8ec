"""Trace hooks: mark in the allocation log which micro batch, layer and pass runs, and skip what is replayed later."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from meshwright.dryrun.allocation_log import AllocationLog, SegmentKey
from meshwright.dryrun.layer_dedup import kept_layers, kept_micro_batches, layer_signature, representatives
from meshwright.engine.parallelize.document_isolation import isolates_documents
from meshwright.engine.patching import Patch, apply
from meshwright.engine.trainer import StepCallbacks, Trainer

BEFORE, AFTER = -1, 1 << 20  # in place of a layer number: before the first and after the last layer
REPLAYED = 1 << 21  # in place of a layer number: a pass of a micro batch that was left out


_NEVER_GATHERED = SimpleNamespace(grad=None)


class _TracePoint(torch.autograd.Function):
    """An identity function that starts a log segment in the forward pass, and another in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        hooks: TraceHooks,
        forward_key: SegmentKey | None,
        backward_key: SegmentKey,
        finished: Any,
    ) -> torch.Tensor:
        ctx.hooks, ctx.backward_key, ctx.finished = hooks, backward_key, finished
        if forward_key is not None:
            hooks.log.begin(forward_key)
        return x.detach()  # not a view: schedules that split the backward pass detach outputs in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.finished is not None:
            ctx.hooks.log.tag(_unsharded_gradients(ctx.finished), "gradients")
        ctx.hooks.log.begin(ctx.backward_key)
        return grads[0], None, None, None, None


def _trace_point(
    x: torch.Tensor, hooks: TraceHooks, forward_key: SegmentKey | None, backward_key: SegmentKey, finished: Any = None
) -> torch.Tensor:
    apply: Any = _TracePoint.apply  # torch leaves it untyped
    result: torch.Tensor = apply(x, hooks, forward_key, backward_key, finished)
    return result


def _unsharded_gradients(module: nn.Module) -> Iterator[Any]:
    """Yield gradients that FSDP has not reduce-scattered yet: micro batches accumulate before that."""
    yield from _accumulated_gradients(_fsdp_parameters(module))


def _accumulated_gradients(parameters: Iterable[Any]) -> Iterator[Any]:
    for parameter in parameters:
        yield getattr(parameter, "unsharded_accumulated_grad", None)
        unsharded = getattr(parameter, "_unsharded_param", None)
        yield unsharded.grad if unsharded is not None else None


def _fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP's record of every parameter that it gathers inside a module."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            state: Any = one._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                yield from group.fsdp_params if group is not None else ()


def _signatures(layers: list[nn.Module]) -> list[Hashable]:
    """Return layer signatures; the first layer that isolates documents finds their boundaries for all others."""
    signatures = [layer_signature(layer) for layer in layers]
    for position in [position for position, layer in enumerate(layers) if isolates_documents(layer)][:1]:
        signatures[position] = "finds documents", signatures[position]
    return signatures


class Chunk:
    """One pipeline chunk of the rank: its layers, which of them run, and how many forward passes there were."""

    def __init__(self, number: int, stage: Any, shortened: bool) -> None:
        self.number, self.stage = number, stage
        self.layers: dict[int, nn.Module] = dict(getattr(stage, "decoder_layers", {}))
        self.numbers = list(self.layers)
        signatures = _signatures(list(self.layers.values()))
        positions = kept_layers(signatures) if shortened else list(range(len(signatures)))
        self.kept = [self.numbers[i] for i in positions]
        self.representative = [self.numbers[i] for i in representatives(signatures, positions)]
        self.forwards = 0
        self.forward_micro_batch = -1  # the micro batch whose forward pass the pipeline runs
        in_layers = {id(p) for layer in self.layers.values() for p in _fsdp_parameters(layer)}
        self.outside = [p for p in _fsdp_parameters(stage) if id(p) not in in_layers]

    @property
    def left_out(self) -> list[int]:
        """Layers that do not run."""
        return [number for number in self.numbers if number not in self.kept]


class TracedLayers(Patch):
    """A stage that runs only the layers to trace, each with its trace points."""

    tag = "Traced"

    @property
    def decoder_layers(self: Any) -> dict[int, Any]:
        layers: dict[int, Any] = self.traced_layers
        return layers


class TraceHooks(StepCallbacks):
    """Step callbacks that write the allocation log and run only what has to be traced."""

    def __init__(self, log: AllocationLog, trainer: Trainer, shortened: bool = False) -> None:
        self.log, self.trainer = log, trainer
        self.step = 0
        self.chunks = [Chunk(number, stage, shortened) for number, stage in enumerate(trainer.stages)]
        self.micro_batches = kept_micro_batches(trainer.micro_batches) if shortened else None
        for chunk in self.chunks:
            self._install(chunk)

    def _install(self, chunk: Chunk) -> None:
        stage: Any = chunk.stage
        stage.register_forward_pre_hook(lambda *_: self._on_forward_start(chunk), prepend=True)
        stage.register_forward_hook(lambda _, __, out: self._on_forward_end(chunk, out))
        if chunk.layers:
            for number in chunk.left_out if not self._schedule_gathers_weights() else ():
                for parameter in _fsdp_parameters(chunk.layers[number]):
                    parameter._unsharded_param = _NEVER_GATHERED
            stage.traced_layers = {number: self._layer(chunk, number) for number in chunk.kept}
            apply(stage, TracedLayers)

    def _schedule_gathers_weights(self) -> bool:
        """Return whether the schedule gathers weights per stage: then also those of skipped layers."""
        pipeline = self.trainer.pipeline
        return pipeline is not None and isinstance(pipeline.schedule, PipelineScheduleMulti)

    def _on_forward_start(self, chunk: Chunk) -> None:
        self.log.tag(_accumulated_gradients(chunk.outside), "gradients")
        self.log.begin(SegmentKey(self.step, "forward", chunk.number, self._micro_batch(chunk), BEFORE))

    def _on_forward_end(self, chunk: Chunk, out: torch.Tensor) -> torch.Tensor:
        number = self._micro_batch(chunk)
        chunk.forwards += 1
        return _trace_point(out, self, None, SegmentKey(self.step, "backward", chunk.number, number, AFTER))

    def _micro_batch(self, chunk: Chunk) -> int:
        """Return the micro batch whose forward pass runs, by its number in the step."""
        if self.trainer.pipeline is not None:
            return chunk.forward_micro_batch
        return self.traced(self.step)[chunk.forwards]

    def traced(self, step: int) -> list[int]:
        """Return the micro batches of a step that run; the first step only creates optimizer state."""
        all_micro_batches = list(range(self.trainer.micro_batches))
        if self.micro_batches is None:
            return all_micro_batches
        return self.micro_batches if step or self.trainer.pipeline is not None else all_micro_batches[-1:]

    def _layer(self, chunk: Chunk, number: int) -> Any:
        layer = chunk.layers[number]
        at = chunk.kept.index(number)
        before = chunk.kept[at - 1] if at else BEFORE
        is_last = number == chunk.kept[-1]

        def run(hidden: torch.Tensor, **kwargs: Any) -> Any:
            where = SegmentKey(self.step, "forward", chunk.number, self._micro_batch(chunk), number)
            back = where._replace(phase="backward")
            hidden = _trace_point(hidden, self, where, back._replace(layer=before), layer)
            out = layer(hidden, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            if not is_last:
                return out
            return _trace_point(out, self, where._replace(layer=AFTER), back)

        return run

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Start the segments for data and gradients; forward and backward start their own."""
        if name == "data":
            for chunk in self.chunks:
                chunk.forwards = 0
            self.log.begin(SegmentKey(self.step, "data"))
        elif name == "optimizer":
            self._fill_in_gradients()
            self.log.begin(SegmentKey(self.step, "gradients"))
        yield

    def on_stop_vote(self, stops: torch.Tensor) -> None:
        """Start the optimizer segment: the gradients are complete."""
        self.log.begin(SegmentKey(self.step, "optimizer"))

    def _fill_in_gradients(self) -> None:
        """Allocate the gradients that skipped layers would have."""
        parameters = [p for chunk in self.chunks for p in chunk.stage.parameters()]
        self.log.tag((p.grad for p in parameters), "gradients")
        self.log.begin(SegmentKey(self.step, "filled"))
        for chunk in self.chunks:
            for number in chunk.left_out:
                for p in chunk.layers[number].parameters():
                    if p.requires_grad and p.grad is None:
                        p.grad = torch.empty_like(p)
        self.log.tag((p.grad for p in parameters), "gradients")


def shortened_batch(batch: Any, kept: list[int]) -> Any:
    """Return a step's batch that yields only some of its micro batches."""

    class Shortened(type(batch)):  # type: ignore[misc]  # the batch type depends on the loader
        def micro_batches(self, size: int) -> Any:
            all_micro_batches = super().micro_batches(size)
            return [all_micro_batches[i] for i in kept]

    return Shortened(**{name: getattr(batch, name) for name in batch.__dataclass_fields__})

"""The allocation log of a dry run: every allocation and free, every matrix product and every collective, in order.

Nothing is summed up while the step runs. Peaks and their holders are computed from the log afterwards.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.dryrun.op_costs import collective_of, counts_flops, flops_of, is_communication
from meshwright.dryrun.stack_origin import Origin, origin_of
from meshwright.dryrun.workspaces import lasting, transient
from meshwright.engine.kernels.device_caps import DRY

ROUNDING = 512  # bytes: torch's CUDA allocator rounds every block up to it


class SegmentKey(NamedTuple):
    """Which part of the step a segment of the log belongs to."""

    step: int  # -1 during construction of the trainer
    phase: str
    chunk: int = 0  # pipeline chunk of the rank
    micro_batch: int = -1
    layer: int = -1


@dataclass
class Block:
    """One allocation; `part` is final only when the step is over."""

    bytes: int
    part: str
    operation: str
    origin: Origin
    segment: int  # number of the segment that allocated it
    stream: int = 0  # number of the stream that allocated it; 0 is the default stream


@dataclass
class Segment:
    """The entries of the log between two trace points."""

    key: SegmentKey
    events: list[int] = field(default_factory=list)  # i: block i is allocated; ~i: block i is freed
    flops: dict[str, int] = field(default_factory=dict)  # forward, recompute or backward
    collectives: list[tuple[str, str, int]] = field(default_factory=list)  # process group, kind, bytes


@dataclass(frozen=True)
class CompositeOp:
    """The log entries of the first run of a composite operation: its allocations and frees in order."""

    first: int  # block
    events: tuple[int, ...]
    flops: int
    outputs: tuple[int, ...]  # the block of each output


class AllocationLog:
    """Records the allocations on one type of device."""

    def __init__(self, device_type: str = DRY, capability: tuple[int, int] = (0, 0)) -> None:
        """A GPU's `capability` adds library buffers and kernel workspaces; a CPU has none."""
        self.device_type, self.capability = device_type, capability
        self.blocks: list[Block] = []
        self.segments: list[Segment] = [Segment(SegmentKey(-1, "build"))]
        # Placeholder block of a skipped pass -> that pass, and the traced block that it represents.
        self.represents: dict[int, tuple[SegmentKey, int]] = {}
        self.received: dict[int, SegmentKey] = {}  # block -> the pass for which the pipeline receives it
        self._paused = 0
        self._streams: dict[Any, int] = {}  # numbered in order of first use
        self._library_buffers: set[tuple[str, bool]] = set()  # library, and whether for the backward thread
        self._live_storages: dict[int, tuple[int, Any]] = {}  # storage -> block, weak reference
        # The latest gradient sum: its storage, its block, the block of its first operand.
        self._accumulated: tuple[int, int, int] | None = None

    def begin(self, key: SegmentKey) -> None:
        """Start a new segment."""
        self.segments.append(Segment(key))

    @property
    def key(self) -> SegmentKey:
        """The key of the current segment."""
        return self.segments[-1].key

    def record(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that has run."""
        if self._paused:
            return
        segment = self.segments[-1]
        origin: Origin | None = None
        for tensor in _tensors(result):
            if tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live_storages:
                origin = origin or origin_of(sys._getframe(1))
                self._add(storage, storage.nbytes(), str(operation), origin)
        self._accumulated = self._gradient_accumulation(operation, args, result)
        if self.capability > (0, 0):
            self._workspaces(operation, args)
        if counts_flops(operation):
            origin = origin or origin_of(sys._getframe(1))
            kind = "recompute" if origin.recomputing else segment.key.phase
            segment.flops[kind] = segment.flops.get(kind, 0) + flops_of(operation, args, kwargs, result)
        elif is_communication(operation):
            collective = collective_of(operation, args, result)
            if collective is not None:
                segment.collectives.append(collective)

    def record_composite(self, run_op: Callable[[], Any]) -> tuple[Any, CompositeOp]:
        """Run a composite operation; return its result and the log entries to repeat for equal shapes."""
        segment, first = self.segments[-1], len(self.blocks)
        events, flops = len(segment.events), sum(segment.flops.values())
        result = run_op()
        outputs = tuple(self.block_of(tensor) for tensor in _tensors(result))
        done = segment.events[events:]
        freed = {~event for event in done if event < 0}
        # A buffer that a library keeps is allocated once: leave it out of the entries to repeat.
        repeated = tuple(e for e in done if (e if e >= 0 else ~e) in freed or e in outputs)
        return result, CompositeOp(first, repeated, sum(segment.flops.values()) - flops, outputs)

    def replay_composite(self, known: CompositeOp, result: Any) -> None:
        """Repeat the log entries of a composite operation whose result already exists."""
        if self._paused:
            return
        origin = origin_of(sys._getframe(1))
        results = dict(zip(known.outputs, _tensors(result), strict=True))
        copies: dict[int, int] = {}  # first run's block -> this run's block
        for event in known.events:
            if event < 0:
                self.segments[-1].events.append(~copies[~event])
                continue
            first_run = self.blocks[event]
            source = first_run.origin._replace(recomputing=origin.recomputing)
            copies[event] = self._new(first_run.bytes, first_run.operation, source)
            if event in results:
                self._watch(results[event].untyped_storage(), copies[event])
        if known.flops:
            segment = self.segments[-1]
            kind = "recompute" if origin.recomputing else segment.key.phase
            segment.flops[kind] = segment.flops.get(kind, 0) + known.flops

    def _workspaces(self, operation: Any, args: Any) -> None:
        """Record the kernel's temporary workspace, and buffers that its library keeps from now on."""
        workspace = transient(operation, args)
        if workspace:
            number = self._new(workspace, str(operation), Origin("activations", f"inside {operation}", False))
            self.segments[-1].events.append(~number)
        for library, size in lasting(operation, self.capability).items():
            owner = library, self.key.phase == "backward"  # autograd's backward pass runs in a thread of its own
            if owner not in self._library_buffers:
                self._library_buffers.add(owner)
                self._new(size, str(operation), Origin("buffers", f"kept by {library}", False))

    def _new(self, size: int, operation: str, origin: Origin) -> int:
        rounded = -(-size // ROUNDING) * ROUNDING
        stream = self._streams.setdefault(
            torch.get_device_module(self.device_type).current_stream(), len(self._streams)
        )
        self.blocks.append(Block(rounded, origin.part, operation, origin, len(self.segments) - 1, stream))
        self.segments[-1].events.append(len(self.blocks) - 1)
        return len(self.blocks) - 1

    def _add(self, storage: Any, size: int, operation: str, origin: Origin) -> None:
        self._watch(storage, self._new(size, operation, origin))

    def _watch(self, storage: Any, number: int) -> None:
        key = storage._cdata
        self._live_storages[key] = (number, weakref.ref(storage, lambda _: self._remove(key)))

    def _remove(self, key: int) -> None:
        found = self._live_storages.pop(key, None)
        if found is None:
            return
        events = self.segments[-1].events
        if self._accumulated is not None and self._accumulated[1:] == (events[-1] if events else -1, found[0]):
            events.pop()
            self._live_storages[self._accumulated[0]] = (found[0], self._live_storages[self._accumulated[0]][1])
        else:
            events.append(~found[0])

    def _gradient_accumulation(self, operation: Any, args: Any, result: Any) -> tuple[int, int, int] | None:
        """Detect a sum that autograd would accumulate into its first gradient in place.

        Autograd does so if nothing else references the first gradient, but never with fake tensors. Whether it would is
        known when the first gradient is freed: immediately after the sum, or not.
        """
        if operation is not torch.ops.aten.add.Tensor or self.device_type != DRY or torch.is_grad_enabled():
            return None
        first, second = args
        if torch._C._current_autograd_node() is None or not isinstance(result, torch.Tensor):
            return None
        if not isinstance(second, torch.Tensor) or first._is_view():
            return None
        storage = result.untyped_storage()._cdata
        old, new = self._live_storages.get(first.untyped_storage()._cdata), self._live_storages.get(storage)
        if old is None or new is None or self.blocks[old[0]].bytes != self.blocks[new[0]].bytes:
            return None
        return storage, new[0], old[0]

    def resized(self, storage: Any, size: int) -> None:
        """Record that a storage was resized: its block is freed and a new one allocated."""
        found = self._live_storages.pop(storage._cdata, None)
        if found is None:
            return
        self.segments[-1].events.append(~found[0])
        before = self.blocks[found[0]]
        origin = origin_of(sys._getframe(1))
        self._add(storage, size, before.operation, Origin("buffers", origin.source or before.origin.source, False))

    def tag(self, tensors: Iterable[Any], part: str) -> None:
        """Set the part of these tensors' blocks: weights, gradients or optimizer."""
        for tensor in tensors:
            storage = _storage(tensor)
            found = self._live_storages.get(storage._cdata) if storage is not None else None
            if found is not None:
                self.blocks[found[0]].part = part

    def block_of(self, tensor: Any) -> int:
        """Return the number of the block that holds a tensor; -1 if it is on another device."""
        found = self._live_storages.get(_storage(tensor)._cdata)
        return found[0] if found is not None else -1

    @contextmanager
    def patch_torch(self) -> Iterator[None]:
        """Patch torch so that resized storages are recorded and shape propagation is not.

        FSDP frees gathered weights by resizing their storage, which dispatches no operation. DTensor infers shapes by
        running operations on global tensors, which no rank allocates.
        """
        original_resize: Any = torch.UntypedStorage.resize_
        original_propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: Any, size: int) -> Any:
            result = original_resize(storage, size)
            self.resized(storage, size)
            return result

        def propagate(*args: Any, **kwargs: Any) -> Any:
            self._paused += 1
            try:
                return original_propagate(*args, **kwargs)
            finally:
                self._paused -= 1

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original_resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = original_propagate  # type: ignore[method-assign]


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
        return
    for one in tree_iter(result):
        if isinstance(one, torch.Tensor):
            yield one


def _storage(tensor: Any) -> Any:
    if tensor is None:
        return None
    local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    inner = getattr(local, "elem", local)  # the result of an asynchronous collective
    return inner.untyped_storage()


class RealTensorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what real tensors do; a dry run is compared with it."""

    def __init__(self, log: AllocationLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor dispatches operations on the local shard, which arrive here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.log.record(func, args, kwargs, result)
        return result

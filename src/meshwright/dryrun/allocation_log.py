"""The book of a dry run: every block of memory that comes and goes, every product and every collective, in order.

Nothing is summed up while the step runs. Levels, peaks and who holds them are read from the book afterwards.
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

from meshwright.dryrun.op_costs import collective_of, counts_flops, flops_of
from meshwright.dryrun.stack_origin import Origin, origin_of
from meshwright.dryrun.workspaces import lasting, transient
from meshwright.engine.kernels.device_caps import DRY

ROUNDING = 512  # bytes: what CUDA's allocator of torch rounds every block up to


class Key(NamedTuple):
    """Where in the step something happens."""

    step: int  # -1 while the trainer is built
    phase: str
    chunk: int = 0  # of the rank's pipeline chunks
    micro_batch: int = -1
    layer: int = -1


@dataclass
class Block:
    """One block of memory; `part` is known for good only when the step is over."""

    bytes: int
    part: str
    operation: str
    origin: Origin
    segment: int  # in which it was made
    stream: int = 0  # on which it was made; 0 is that of the build


@dataclass
class Segment:
    """A stretch of the book between two marks."""

    key: Key
    events: list[int] = field(default_factory=list)  # block i comes: i; block i goes: ~i
    flops: dict[str, int] = field(default_factory=dict)  # forward, recompute or backward
    collectives: list[tuple[str, str, int]] = field(default_factory=list)  # group, kind, bytes


@dataclass(frozen=True)
class Steps:
    """What an operation of many steps did the first time: its blocks in the order they came and went."""

    first: int  # block
    events: tuple[int, ...]
    flops: int
    outputs: tuple[int, ...]  # the block of each


class AllocationLedger:
    """Notes what happens to the memory of one kind of device."""

    def __init__(self, device_type: str = DRY, capability: tuple[int, int] = (0, 0)) -> None:
        """`capability` of a GPU adds what its libraries keep and its kernels take while they run; a CPU's take none."""
        self.device_type, self.capability = device_type, capability
        self.blocks: list[Block] = []
        self.segments: list[Segment] = [Segment(Key(-1, "build"))]
        self.stands_for: dict[int, tuple[Key, int]] = {}  # block -> the pass it stands in, and the block it is like
        self.received: dict[int, Key] = {}  # block -> the pass that a pipeline receives it for
        self._closed = 0
        self._streams: dict[Any, int] = {}  # those that blocks were made on, in order
        self._kept: set[tuple[str, bool]] = set()  # what libraries keep already, for which thread
        self._live: dict[int, tuple[int, Any]] = {}  # storage -> its block, and the reference that watches it
        self._sum: tuple[int, int, int] | None = None  # the storage of a sum of gradients, its block, the first's block

    def mark(self, key: Key) -> None:
        """Something else begins."""
        self.segments.append(Segment(key))

    @property
    def key(self) -> Key:
        """What is going on."""
        return self.segments[-1].key

    def saw(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation was carried out."""
        if self._closed:
            return
        segment = self.segments[-1]
        origin: Origin | None = None
        for tensor in _tensors(result):
            if tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                origin = origin or origin_of(sys._getframe(1))
                self._add(storage, storage.nbytes(), str(operation), origin)
        self._sum = self._sum_of_gradients(operation, args, result)
        if self.capability > (0, 0):
            self._workspaces(operation, args)
        if counts_flops(operation):
            origin = origin or origin_of(sys._getframe(1))
            kind = "recompute" if origin.recomputing else segment.key.phase
            segment.flops[kind] = segment.flops.get(kind, 0) + flops_of(operation, args, kwargs, result)
        elif operation.namespace == "c10d":
            found = collective_of(operation, args)
            if found is not None:
                segment.collectives.append(found)

    def steps(self, carry_out: Callable[[], Any]) -> tuple[Any, Steps]:
        """Carries out an operation of many steps; its result and what there is to write when it is done again."""
        segment, first = self.segments[-1], len(self.blocks)
        events, flops = len(segment.events), sum(segment.flops.values())
        result = carry_out()
        outputs = tuple(self.block_of(tensor) for tensor in _tensors(result))
        done = segment.events[events:]
        gone = {~event for event in done if event < 0}
        # What a library keeps from its first call on comes once.
        passing = tuple(e for e in done if (e if e >= 0 else ~e) in gone or e in outputs)
        return result, Steps(first, passing, sum(segment.flops.values()) - flops, outputs)

    def steps_again(self, known: Steps, result: Any) -> None:
        """Writes what an operation of many steps does, as it did it the first time; its result is here."""
        if self._closed:
            return
        origin = origin_of(sys._getframe(1))
        results = dict(zip(known.outputs, _tensors(result), strict=True))
        numbers: dict[int, int] = {}
        for event in known.events:
            if event < 0:
                self.segments[-1].events.append(~numbers[~event])
                continue
            like = self.blocks[event]
            from_there = like.origin._replace(recomputing=origin.recomputing)
            numbers[event] = self._new(like.bytes, like.operation, from_there)
            if event in results:
                self._watch(results[event].untyped_storage(), numbers[event])
        if known.flops:
            segment = self.segments[-1]
            kind = "recompute" if origin.recomputing else segment.key.phase
            segment.flops[kind] = segment.flops.get(kind, 0) + known.flops

    def _workspaces(self, operation: Any, args: Any) -> None:
        """What the kernel takes for a moment, and what its library keeps from now on."""
        taken = transient(operation, args)
        if taken:
            number = self._new(taken, str(operation), Origin("activations", f"inside {operation}", False))
            self.segments[-1].events.append(~number)
        for library, size in lasting(operation, self.capability).items():
            owner = library, self.key.phase == "backward"  # torch's backward pass has a thread of its own
            if owner not in self._kept:
                self._kept.add(owner)
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
        self._live[key] = (number, weakref.ref(storage, lambda _: self._remove(key)))

    def _remove(self, key: int) -> None:
        found = self._live.pop(key, None)
        if found is None:
            return
        events = self.segments[-1].events
        if self._sum is not None and self._sum[1:] == (events[-1] if events else -1, found[0]):
            events.pop()
            self._live[self._sum[0]] = (found[0], self._live[self._sum[0]][1])
        else:
            events.append(~found[0])

    def _sum_of_gradients(self, operation: Any, args: Any, result: Any) -> tuple[int, int, int] | None:
        """A sum that torch's backward pass would write over its first gradient, were nobody else to hold that.

        It never does so with tensors without data. Whether it would is known when the first one goes: at once, or not.
        """
        if operation is not torch.ops.aten.add.Tensor or self.device_type != DRY or torch.is_grad_enabled():
            return None
        first, second = args
        if torch._C._current_autograd_node() is None or not isinstance(result, torch.Tensor):
            return None
        if not isinstance(second, torch.Tensor) or first._is_view():
            return None
        storage = result.untyped_storage()._cdata
        old, new = self._live.get(first.untyped_storage()._cdata), self._live.get(storage)
        if old is None or new is None or self.blocks[old[0]].bytes != self.blocks[new[0]].bytes:
            return None
        return storage, new[0], old[0]

    def resized(self, storage: Any, size: int) -> None:
        """A storage was given another size: its block goes and another comes."""
        found = self._live.pop(storage._cdata, None)
        if found is None:
            return
        self.segments[-1].events.append(~found[0])
        before = self.blocks[found[0]]
        origin = origin_of(sys._getframe(1))
        self._add(storage, size, before.operation, Origin("buffers", origin.source or before.origin.source, False))

    def tag(self, tensors: Iterable[Any], part: str) -> None:
        """Says what these tensors are: weights, gradients, optimizer state."""
        for tensor in tensors:
            storage = _storage(tensor)
            found = self._live.get(storage._cdata) if storage is not None else None
            if found is not None:
                self.blocks[found[0]].part = part

    def block_of(self, tensor: Any) -> int:
        """The number of the block that a tensor lies in; -1 where it is none of the device's."""
        found = self._live.get(_storage(tensor)._cdata)
        return found[0] if found is not None else -1

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it lasts, what no operation shows is noted too, and what only looks like one is not.

        FSDP frees gathered weights by giving their storage another size. DTensor finds out shapes by carrying
        operations out on whole tensors that nobody has.
        """
        kept: Any = torch.UntypedStorage.resize_
        shapes: Any = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: Any, size: int) -> Any:
            made = kept(storage, size)
            self.resized(storage, size)
            return made

        def propagate(*args: Any, **kwargs: Any) -> Any:
            self._closed += 1
            try:
                return shapes(*args, **kwargs)
            finally:
                self._closed -= 1

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = kept  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = shapes  # type: ignore[method-assign]


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
    inner = getattr(local, "elem", local)  # an asynchronous collective's result
    return inner.untyped_storage()


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what real tensors do: what a dry run is compared with."""

    def __init__(self, ledger: AllocationLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operations on this rank's part, which come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.ledger.saw(func, args, kwargs, result)
        return result

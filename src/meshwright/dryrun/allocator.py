"""Simulates torch's CUDA caching allocator: how much memory it reserves for a sequence of allocations and frees.

Every stream has its own pools, one for blocks up to 1 MiB and one for larger ones. A pool serves a request from the
smallest free piece that is large enough, splits off the rest, and merges free neighbors. It never returns memory. With
expandable segments, which the engine turns on (engine/allocator_settings.py), a pool is one address range that grows by
pages at its end; without, it is many separate segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.dryrun.replay import ReplayedSegment, StepLog
    from meshwright.dryrun.trace import Trace

MIB = 1024**2
ROUNDING = 512  # bytes: every block size is a multiple of it
SMALL = 1 * MIB  # blocks up to this size have pools of their own
SMALL_SEGMENT = 2 * MIB  # segment or page size of the pools for small blocks
LARGE_SEGMENT = 20 * MIB  # page size of the pools for large blocks, and segment size below OWN_SEGMENT
OWN_SEGMENT = 10 * MIB  # without expandable segments, larger blocks get a segment of their own
SEGMENT_ROUNDING = 2 * MIB  # size granularity of these segments
ADDRESS_BITS = 52
ADDRESSES = (1 << ADDRESS_BITS) - 1

Event = tuple[int, int, int]  # block, bytes (0 if it is freed), stream


class Pool:
    """The memory of one stream for small or large blocks."""

    __slots__ = ("_by_end", "_by_start", "_expandable", "_free", "_least_rest", "_page", "end", "reserved")

    def __init__(self, small: bool, expandable: bool) -> None:
        self.reserved = 0
        self.end = 0  # end of the address range
        self._expandable = expandable
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._least_rest = ROUNDING if small or expandable else SMALL + 1  # a smaller rest stays with the block
        self._free: list[int] = []  # sorted: size and address of a free piece packed into one integer
        self._by_start: dict[int, int] = {}  # free pieces: start address -> size
        self._by_end: dict[int, int] = {}  # free pieces: end address -> size

    def allocate(self, size: int) -> tuple[int, int]:
        """Return address and size of a block for a request of a rounded size."""
        free = self._free
        at = bisect_left(free, size << ADDRESS_BITS)
        if at == len(free):
            start, room = self._grow(size)
        else:
            start, room = free[at] & ADDRESSES, free[at] >> ADDRESS_BITS
            if self._expandable and start + room == self.end and at + 1 < len(free):
                at += 1  # the last piece can grow, so torch treats it as the largest
                start, room = free[at] & ADDRESSES, free[at] >> ADDRESS_BITS
            del free[at], self._by_start[start], self._by_end[start + room]
        rest = room - size
        if rest < self._least_rest:
            return start, room
        self._add(start + size, rest)
        return start, size

    def free(self, start: int, size: int) -> None:
        """Free a block and merge it with free neighbors."""
        before = self._by_end.pop(start, 0)
        if before:
            start -= before
            size += before
            del self._by_start[start]
            self._remove(before, start)
        after = self._by_start.pop(start + size, 0)
        if after:
            self._remove(after, start + size)
            size += after
            del self._by_end[start + size]
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._free, size << ADDRESS_BITS | start)
        self._by_start[start] = size
        self._by_end[start + size] = size

    def _remove(self, size: int, start: int) -> None:
        del self._free[bisect_left(self._free, size << ADDRESS_BITS | start)]

    def _grow(self, size: int) -> tuple[int, int]:
        return self._grow_at_end(size) if self._expandable else self._new_segment(size)

    def _grow_at_end(self, size: int) -> tuple[int, int]:
        have = self._by_end.pop(self.end, 0)
        start = self.end - have
        if have:
            del self._by_start[start]
            self._remove(have, start)
        more = _rounded(size - have, self._page)
        self.end += more
        self.reserved += more
        return start, have + more

    def _new_segment(self, size: int) -> tuple[int, int]:
        segment = self._page if size < OWN_SEGMENT else _rounded(size, SEGMENT_ROUNDING)
        start = self.end + ROUNDING  # a gap between segments, so that their pieces are never merged
        self.end = start + segment
        self.reserved += segment
        return start, segment


class Allocator:
    """Allocates and frees blocks; `reserved` is the GPU memory it holds, which never shrinks."""

    def __init__(self, expandable: bool = True) -> None:
        self._small = defaultdict[int, Pool](lambda: Pool(True, expandable))  # by stream
        self._large = defaultdict[int, Pool](lambda: Pool(False, expandable))
        self._blocks: dict[int, tuple[Pool, int, int]] = {}

    @property
    def reserved(self) -> int:
        """Bytes of all pools."""
        return sum(pool.reserved for pools in (self._small, self._large) for pool in pools.values())

    def run(self, events: Iterable[Event]) -> None:
        """Apply a sequence of allocations and frees."""
        small, large, blocks = self._small, self._large, self._blocks
        for block, size, stream in events:
            if size:
                rounded = _rounded(size, ROUNDING)
                pool = small[stream] if rounded <= SMALL else large[stream]
                blocks[block] = pool, *pool.allocate(rounded)
            else:
                pool, start, size = blocks.pop(block)
                pool.free(start, size)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def peak(events: Iterable[Event]) -> int:
    """Return the maximum that torch would report as allocated for these allocations and frees."""
    live: dict[int, int] = {}
    most = now = 0
    for block, size, _ in events:
        if size:
            live[block] = _rounded(size, ROUNDING)
            now += live[block]
            most = max(most, now)
        else:
            now -= live.pop(block)
    return most


def reserved(events: Iterable[Event], expandable: bool = True) -> int:
    """Return the maximum that torch would report as reserved for these allocations and frees.

    Cached memory is never released in between, as long as memory does not run out.
    """
    allocator = Allocator(expandable)
    allocator.run(events)
    return allocator.reserved


def events_of(step: StepLog, trace: Trace) -> Iterator[Event]:
    """Yield the allocations and frees of a replayed step, each on the stream of the code that allocated."""
    sizes = [(block.bytes, block.stream) for block in trace.log.blocks]
    names: dict[int, int] = {}  # renamed block -> the block whose memory it has
    for segment in step.segments:
        events = (
            _without_renamed(segment, step.traced_block, sizes, names)
            if segment.key.phase == "filled"
            else segment.events
        )
        for event in events:
            if event >= 0:
                size, stream = sizes[step.traced_block[event]]
                if size:  # torch allocates nothing for empty tensors
                    yield event, size, stream
            else:
                size, stream = sizes[step.traced_block[~event]]
                if size:
                    yield names.pop(~event, ~event), 0, stream


def _without_renamed(
    segment: ReplayedSegment, traced_block: list[int], sizes: list[tuple[int, int]], names: dict[int, int]
) -> Iterator[int]:
    """Yield the events of a consistency segment; a block freed there and an equal one allocated are the same block."""
    freed: dict[tuple[int, int], list[int]] = defaultdict(list)
    allocated: list[int] = []
    for event in segment.events:
        if event >= 0:
            allocated.append(event)
        else:
            freed[sizes[traced_block[~event]]].append(~event)
    new = []
    for block in allocated:
        candidates = freed[sizes[traced_block[block]]]
        if candidates:
            old = candidates.pop()
            names[block] = names.pop(old, old)
        else:
            new.append(block)
    for left in freed.values():
        yield from (~block for block in left)
    yield from new

"""What torch's caching allocator would keep of a GPU's memory for blocks that come and go.

Every stream has its own pools, one for blocks up to 1 MiB and one for larger ones. A pool serves a request from the
smallest free piece that is large enough, cuts off what is left over, and joins neighbours again when they are free.
What it once has it keeps. With expandable segments, which our launch sets, a pool is one range of addresses that grows
by whole pages at its end; without, it is many separate segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.dryrun.replay import StepLog, Stretch
    from meshwright.dryrun.trace import Trace

MIB = 1024**2
ROUNDING = 512  # bytes: every block is a multiple of it
SMALL = 1 * MIB  # blocks up to this size have pools of their own
SMALL_SEGMENT = 2 * MIB  # segment, or page, of the pools of small blocks
LARGE_SEGMENT = 20 * MIB  # page of the pools of large blocks, and segment of those below OWN_SEGMENT
OWN_SEGMENT = 10 * MIB  # without expandable segments, blocks from this size on get a segment of their own size
SEGMENT_ROUNDING = 2 * MIB  # of these segments
ADDRESS_BITS = 52
ADDRESSES = (1 << ADDRESS_BITS) - 1

Event = tuple[int, int, int]  # a block, its bytes where it comes and 0 where it goes, the stream it is made on


class Pool:
    """The memory of one stream for small or for large blocks."""

    __slots__ = ("_by_end", "_by_start", "_expandable", "_free", "_least_rest", "_page", "end", "reserved")

    def __init__(self, small: bool, expandable: bool) -> None:
        self.reserved = 0
        self.end = 0  # of the addresses in use
        self._expandable = expandable
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._least_rest = ROUNDING if small or expandable else SMALL + 1  # smaller ones stay with the block
        self._free: list[int] = []  # size and address of free pieces as one number, in order
        self._by_start: dict[int, int] = {}  # of free pieces: address -> size
        self._by_end: dict[int, int] = {}  # of free pieces: address behind it -> size

    def take(self, size: int) -> tuple[int, int]:
        """Address and size of a block for a request of a rounded size."""
        free = self._free
        at = bisect_left(free, size << ADDRESS_BITS)
        if at == len(free):
            start, room = self._grow(size)
        else:
            start, room = free[at] & ADDRESSES, free[at] >> ADDRESS_BITS
            if self._expandable and start + room == self.end and at + 1 < len(free):
                at += 1  # the piece at the end can grow, so it counts as the largest of all
                start, room = free[at] & ADDRESSES, free[at] >> ADDRESS_BITS
            del free[at], self._by_start[start], self._by_end[start + room]
        rest = room - size
        if rest < self._least_rest:
            return start, room
        self._add(start + size, rest)
        return start, size

    def give(self, start: int, size: int) -> None:
        """A block is free again, together with its free neighbours."""
        before = self._by_end.pop(start, 0)
        if before:
            start -= before
            size += before
            del self._by_start[start]
            self._drop(before, start)
        after = self._by_start.pop(start + size, 0)
        if after:
            self._drop(after, start + size)
            size += after
            del self._by_end[start + size]
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._free, size << ADDRESS_BITS | start)
        self._by_start[start] = size
        self._by_end[start + size] = size

    def _drop(self, size: int, start: int) -> None:
        del self._free[bisect_left(self._free, size << ADDRESS_BITS | start)]

    def _grow(self, size: int) -> tuple[int, int]:
        return self._grow_at_end(size) if self._expandable else self._new_segment(size)

    def _grow_at_end(self, size: int) -> tuple[int, int]:
        have = self._by_end.pop(self.end, 0)
        start = self.end - have
        if have:
            del self._by_start[start]
            self._drop(have, start)
        more = _rounded(size - have, self._page)
        self.end += more
        self.reserved += more
        return start, have + more

    def _new_segment(self, size: int) -> tuple[int, int]:
        whole = self._page if size < OWN_SEGMENT else _rounded(size, SEGMENT_ROUNDING)
        start = self.end + ROUNDING  # neighbouring segments do not touch, so their pieces are never joined
        self.end = start + whole
        self.reserved += whole
        return start, whole


class Allocator:
    """Takes blocks and gives them back; `reserved` is what it holds of the GPU, which never becomes less."""

    def __init__(self, expandable: bool = True) -> None:
        self._small = defaultdict[int, Pool](lambda: Pool(True, expandable))  # by stream
        self._large = defaultdict[int, Pool](lambda: Pool(False, expandable))
        self._blocks: dict[int, tuple[Pool, int, int]] = {}

    @property
    def reserved(self) -> int:
        """Bytes of all pools."""
        return sum(pool.reserved for pools in (self._small, self._large) for pool in pools.values())

    def follow(self, events: Iterable[Event]) -> None:
        """Blocks come and go."""
        small, large, blocks = self._small, self._large, self._blocks
        for block, size, stream in events:
            if size:
                rounded = _rounded(size, ROUNDING)
                pool = small[stream] if rounded <= SMALL else large[stream]
                blocks[block] = pool, *pool.take(rounded)
            else:
                pool, start, held = blocks.pop(block)
                pool.give(start, held)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def reserved(events: Iterable[Event], expandable: bool = True) -> int:
    """The most that torch would report as reserved when these blocks come and go.

    Nothing is given back in between, as it is where memory never runs out.
    """
    allocator = Allocator(expandable)
    allocator.follow(events)
    return allocator.reserved


def events_of(whole: StepLog, trace: Trace) -> Iterator[Event]:
    """What comes and goes in the book of a whole step, each block on the stream of the code that made it."""
    kinds = [(block.bytes, block.stream) for block in trace.ledger.blocks]
    names: dict[int, int] = {}  # of blocks that took over another's place: that one's number
    for stretch in whole.stretches:
        events = _without_renamed(stretch, whole.of, kinds, names) if stretch.key.phase == "filled" else stretch.events
        for event in events:
            if event >= 0:
                size, stream = kinds[whole.of[event]]
                if size:  # torch asks for no memory where there is nothing to hold
                    yield event, size, stream
            else:
                size, stream = kinds[whole.of[~event]]
                if size:
                    yield names.pop(~event, ~event), 0, stream


def _without_renamed(
    stretch: Stretch, of: list[int], kinds: list[tuple[int, int]], names: dict[int, int]
) -> Iterator[int]:
    """The events of a stretch where the book was compared: equal blocks that go and come there are the same ones."""
    gone: dict[tuple[int, int], list[int]] = defaultdict(list)
    come: list[int] = []
    for event in stretch.events:
        if event >= 0:
            come.append(event)
        else:
            gone[kinds[of[~event]]].append(~event)
    new = []
    for block in come:
        alike = gone[kinds[of[block]]]
        if alike:
            old = alike.pop()
            names[block] = names.pop(old, old)
        else:
            new.append(block)
    for left in gone.values():
        yield from (~block for block in left)
    yield from new

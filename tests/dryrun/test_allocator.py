"""Torch's reserved memory: hand-computed cases, invariants, and what a GPU really reserved."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from benchmarks.dryrun_cases import CASES, recipe_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.each import each

from meshwright.dryrun.allocation_log import AllocationLog, SegmentKey
from meshwright.dryrun.allocator import (
    LARGE_SEGMENT,
    MIB,
    OWN_SEGMENT,
    ROUNDING,
    SEGMENT_ROUNDING,
    SMALL,
    SMALL_SEGMENT,
    Event,
    events_of,
    peak,
    reserved,
)
from meshwright.dryrun.fake_device import fake_rank
from meshwright.dryrun.replay import ReplayedSegment, StepLog, replay_step
from meshwright.dryrun.trace import Trace, trace
from meshwright.engine import allocator_settings
from meshwright.engine.kernels.device_caps import DRY
from meshwright.engine.model_families import family_of
from meshwright.engine.parallelize import fsdp

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "dryrun_h200_2026-11-15.json"
KIB = 1024

# --- rules by hand -----------------------------------------------------------------------------------------------

Steps = list[tuple[str, float]]  # a block's name, and its MiB (0 if it is freed)
HOLES: Steps = [("a", 60), ("b", 2), ("c", 40), ("d", 38), ("a", 0), ("c", 0)]
BY_HAND: list[tuple[str, Steps, int, int]] = [  # MiB reserved with expandable segments, and without
    ("a small block", [("a", 0.1)], 2, 2),
    ("small blocks share", [("a", 1), ("b", 1)], 2, 2),
    ("a third does not fit", [("a", 1), ("b", 1), ("c", 0.01)], 4, 4),
    ("a large block", [("a", 1.5)], 20, 20),
    ("small and large apart", [("a", 1.5), ("b", 0.5)], 22, 22),
    ("just below a segment of its own", [("a", 9), ("b", 9)], 20, 20),
    ("a segment of its own", [("a", 10)], 20, 10),
    ("segments are even", [("a", 15), ("b", 15)], 40, 32),
    ("a hole is used again", [("a", 40), ("b", 40), ("a", 0), ("c", 40)], 80, 80),
    ("a hole is too small", [("a", 30), ("b", 30), ("a", 0), ("c", 40)], 100, 100),
    ("only a range grows at its end", [("a", 30), ("b", 30), ("b", 0), ("c", 40)], 80, 100),
    ("holes join", [("a", 20), ("b", 20), ("c", 20), ("a", 0), ("b", 0), ("d", 40)], 60, 100),
    ("the smallest hole that fits", [*HOLES, ("e", 40), ("f", 60)], 140, 158),
    ("the end is left for later", [("a", 60), ("b", 15), ("a", 0), ("c", 5), ("d", 60)], 140, 136),
    ("a rest of 1 MiB stays with its block", [("a", 21), ("a", 0), ("b", 21), ("c", 0.9), ("d", 1.1)], 42, 44),
    ("a rest above is cut off", [("a", 22), ("a", 0), ("b", 20), ("c", 1.5)], 40, 22),
]


def _by_hand(steps: Steps) -> list[Event]:
    return [(ord(name), int(mib * MIB), 0) for name, mib in steps]


@pytest.mark.parametrize(
    ("steps", "expandable", "plain"), [row[1:] for row in BY_HAND], ids=[row[0] for row in BY_HAND]
)
def test_rules(steps: Steps, expandable: int, plain: int) -> None:
    """Small sequences, worked out by hand from the allocator's rules."""
    assert reserved(_by_hand(steps), True) / MIB == expandable
    assert reserved(_by_hand(steps), False) / MIB == plain


# --- laws --------------------------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * SMALL),
    st.integers(SMALL, 3 * OWN_SEGMENT),
    st.sampled_from([ROUNDING, SMALL, SMALL + 1, OWN_SEGMENT - 1, OWN_SEGMENT, LARGE_SEGMENT, 5 * LARGE_SEGMENT]),
)


def sequences(streams: int = 3, sizes: st.SearchStrategy[int] = SIZES) -> st.SearchStrategy[list[Event]]:
    """Return a strategy for allocations and frees; some blocks stay."""
    gone = st.lists(st.integers(0, 63), max_size=3)
    return st.lists(st.tuples(sizes, st.integers(0, streams - 1), gone), min_size=1, max_size=30).map(_sequence)


def _sequence(made: list[tuple[int, int, list[int]]]) -> list[Event]:
    """Turn (size, stream, indices of live blocks to free) into events."""
    events: list[Event] = []
    live: list[tuple[int, int]] = []
    for block, (size, stream, gone) in enumerate(made):
        events.append((block, size, stream))
        live.append((block, stream))
        for place in gone[: len(live)]:
            old, its = live.pop(place % len(live))
            events.append((old, 0, its))
    return events


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _all_freed(events: list[Event]) -> list[Event]:
    gone = {block for block, size, _ in events if not size}
    return [*events, *((block, 0, stream) for block, size, stream in events if size and block not in gone)]


@settings(max_examples=25)
@given(sequences(), st.booleans())
def test_reserved_is_at_least_allocated(events: list[Event], expandable: bool) -> None:
    """Allocated memory is part of reserved memory."""
    assert reserved(events, expandable) >= peak(events)


@settings(max_examples=25)
@given(sequences(), st.booleans(), st.data())
def test_reserved_never_shrinks(events: list[Event], expandable: bool, data: st.DataObject) -> None:
    """A prefix of a sequence reserves no more than all of it."""
    part = data.draw(st.integers(0, len(events)))
    assert reserved(events[:part], expandable) <= reserved(events, expandable)


@settings(max_examples=25)
@given(sequences(), st.booleans())
def test_streams_and_pools_share_nothing(events: list[Event], expandable: bool) -> None:
    """Each stream's small and large blocks reserve what they reserve on their own."""
    pool = {block: (stream, size > SMALL) for block, size, stream in events if size}
    apart = [[event for event in events if pool[event[0]] == one] for one in set(pool.values())]
    assert reserved(events, expandable) == sum(reserved(some, expandable) for some in apart)


@settings(max_examples=25)
@given(st.data(), SIZES)
def test_equal_sizes_waste_nothing(data: st.DataObject, size: int) -> None:
    """Blocks of one size leave no unusable holes: only the last page is not full."""
    events = data.draw(sequences(1, st.just(size)))
    page = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT
    assert reserved(events) == _rounded(peak(events), page)


@settings(max_examples=25)
@given(st.data(), st.integers(OWN_SEGMENT // SEGMENT_ROUNDING, 100))
def test_equal_segments_waste_nothing(data: st.DataObject, units: int) -> None:
    """Without expandable segments, blocks that fill theirs are reserved to the byte."""
    events = data.draw(sequences(1, st.just(units * SEGMENT_ROUNDING)))
    assert reserved(events, False) == peak(events)


@settings(max_examples=25)
@given(sequences(), st.booleans(), st.randoms(use_true_random=False))
def test_order_of_frees_does_not_matter(events: list[Event], expandable: bool, random: Random) -> None:
    """Consecutive frees may happen in any order."""
    mixed: list[Event] = []
    for comes, run in groupby(events, lambda event: event[1] > 0):
        some = list(run)
        if not comes:
            random.shuffle(some)
        mixed += some
    assert reserved(mixed, expandable) == reserved(events, expandable)


@settings(max_examples=25)
@given(sequences())
def test_repeating_a_sequence_reserves_nothing_more(events: list[Event]) -> None:
    """A range that is empty again serves the same blocks from the same addresses."""
    once = _all_freed(events)
    again = [(block + len(events), size, stream) for block, size, stream in once]
    assert reserved([*once, *again]) == reserved(once)


FREE, WALL = -1, -2  # owners of pieces without a block; a wall marks the start of a segment


class Piece(NamedTuple):
    """A range of addresses."""

    owner: int
    size: int


class ReferencePool:
    """A pool written as simply as possible: all its pieces in address order."""

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small, self.expandable = small, expandable
        self.pieces: list[Piece] = []
        self.reserved = 0

    def take(self, block: int, size: int) -> None:
        fitting = [(room, at) for at, (owner, room) in enumerate(self.pieces) if owner == FREE and room >= size]
        inner = [one for one in fitting if not self.expandable or one[1] < len(self.pieces) - 1]
        if not fitting:
            self.grow(size)
            self.take(block, size)
            return
        room, at = min(inner or fitting)
        rest = room - size
        cut = rest >= ROUNDING and (self.small or self.expandable or rest > SMALL)
        self.pieces[at : at + 1] = [Piece(block, size), Piece(FREE, rest)] if cut else [Piece(block, room)]

    def grow(self, size: int) -> None:
        page = SMALL_SEGMENT if self.small else LARGE_SEGMENT
        if self.expandable:
            at_end = self.pieces[-1].size if self.pieces and self.pieces[-1].owner == FREE else 0
            more = _rounded(size - at_end, page)
        else:
            more = page if size < OWN_SEGMENT else _rounded(size, SEGMENT_ROUNDING)
            self.pieces.append(Piece(WALL, 0))
        self.reserved += more
        self.pieces = joined([*self.pieces, Piece(FREE, more)])

    def give(self, block: int) -> None:
        self.pieces = joined(
            [Piece(FREE, size) if owner == block else Piece(owner, size) for owner, size in self.pieces]
        )


def joined(pieces: list[Piece]) -> list[Piece]:
    """Merge free neighbors."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.owner == found[-1].owner == FREE:
            found[-1] = Piece(FREE, found[-1].size + piece.size)
        else:
            found.append(piece)
    return found


@settings(max_examples=25)
@given(sequences(1), st.booleans())
def test_matches_the_reference_pool(events: list[Event], expandable: bool) -> None:
    """A linear search over a list of pieces reserves the same."""
    pools = {small: ReferencePool(small, expandable) for small in (True, False)}
    pool_of: dict[int, ReferencePool] = {}
    for block, size, _ in events:
        if size:
            pool_of[block] = pools[_rounded(size, ROUNDING) <= SMALL]
            pool_of[block].take(block, _rounded(size, ROUNDING))
        else:
            pool_of[block].give(block)
    assert reserved(events, expandable) == sum(pool.reserved for pool in pools.values())


# --- from the log -----------------------------------------------------------------------------------------------


def test_the_log_records_streams() -> None:
    """A block belongs to the stream that is current when it is allocated; equal streams have equal numbers."""
    log = AllocationLog()
    with fake_rank(1, 0, log.record) as device:
        backend = torch.get_device_module(DRY)
        other = backend.Stream()
        kept = [torch.empty(8, device=device)]
        with backend.stream(other):
            kept.append(torch.empty(8, device=device))
            with backend.stream(None):
                kept.append(torch.empty(8, device=device))
        kept.append(torch.empty(8, device=device))
        with backend.stream(other):
            kept.append(kept[0] + 1)
    assert [block.stream for block in log.blocks] == [0, 1, 1, 0, 1]


def test_gradient_sums_and_silu_allocate_as_real_ones_do() -> None:
    """Autograd accumulates in place if nothing else holds the gradient, and SiLU's gradient is one kernel."""
    log = AllocationLog()
    with fake_rank(1, 0, log.record) as device:
        x = torch.empty(MIB, device=device, requires_grad=True)
        loss = (torch.nn.functional.silu(x) + x.sin()).sum()
        log.begin(SegmentKey(0, "backward"))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        made = [log.blocks[event].operation for event in log.segments[-1].events if event >= 0]
        assert log.blocks[log.block_of(x.grad)].operation in made
    large = [operation for operation in made if "ones_like" not in operation]
    assert "aten.add.Tensor" not in large  # the second gradient was accumulated into the first
    assert large.count("aten.silu_backward.default") == 1
    assert not any("sigmoid" in operation for operation in large)


def test_equal_blocks_keep_their_address() -> None:
    """Where the log is reconciled with the rank, equal blocks are freed and allocated: nothing moves."""
    log = AllocationLog()
    with fake_rank(1, 0, log.record) as device:
        kept = [torch.empty(mib * MIB, dtype=torch.uint8, device=device) for mib in (30, 40, 0)]
    assert len(kept) == 3
    step, filled = SegmentKey(1, "backward"), SegmentKey(1, "filled")
    step = StepLog(
        [
            ReplayedSegment(step, log.segments[0], [0, 1, 2]),
            ReplayedSegment(filled, log.segments[0], [~1, ~0, ~2, 3, 4, 5]),
            ReplayedSegment(step, log.segments[0], [~3, ~5]),
        ],
        traced_block=[0, 1, 2, 0, 1, 1],
    )
    traced = cast(Trace, SimpleNamespace(log=log))  # all that events_of reads
    assert list(events_of(step, traced)) == [
        (0, 30 * MIB, 0),
        (1, 40 * MIB, 0),
        (5, 40 * MIB, 0),  # one more than before
        (0, 0, 0),  # block 3 has its memory
        (5, 0, 0),
    ]


def traced_events(name: str, state_first: bool = True) -> list[Any]:
    recipe = recipe_of(next(case for case in CASES if case.name == name))
    kind = family_of(recipe)
    found = trace(recipe, kind, kind.config_for(recipe), 1, 0, (9, 0), state_first=state_first)
    return list(events_of(replay_step(found), found))


@pytest.mark.parametrize("name", ["llama masters", pytest.param("llama full", marks=pytest.mark.slow)])
def test_reserved_matches_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of Llama on an H200: fp32 gradients on FSDP's stream, and holes left by recomputation."""
    monkeypatch.setattr(fsdp, "use_one_stream", lambda stage: None)  # as when it was measured
    monkeypatch.setattr(fsdp, "reduce_in_place", lambda *_: None)
    events = traced_events(name, state_first=False)
    rows = [row for row in json.loads(MEASURED.read_text())["rows"] if row["name"] == name]
    assert len(rows) == 2
    for row in rows:
        expandable = row["allocator"] == "expandable_segments:True"
        assert row["reserved"] > 1.05 * row["allocated"]  # the test needs fragmentation
        assert reserved(events, expandable) == pytest.approx(row["reserved"], rel=0.01)


# Reserved over allocated with expandable segments; cases above 5 % are in docs/limits.md. Simulated, not measured: the
# simulation matches what was measured before FSDP used one stream and one buffer (the test above).
AT_MOST = {
    "llama masters": 1.05,
    "llama full": 1.05,
    "lora": 1.05,
    "qwen3 experts masters": 1.09,  # gradients of experts do not fit where smaller activations were
}
AT_MOST_SLOW = {"llama compiled masters": 1.05, "llama masters, 3 micro batches": 1.05, "lora full": 1.05,
                "qwen3 experts": 1.05}  # fmt: skip


def reserved_share(name: str) -> float:
    """Return the reserved memory of a traced step over its peak."""
    events = traced_events(name)
    assert {stream for _, _, stream in events} == {0}
    return reserved(events) / peak(events)


def least_share(limit: float) -> float:
    """Return what the reserved share exceeds where it is at most `limit`: larger limits are near their measurements."""
    return limit - 0.04 if limit > 1.05 else 1


@pytest.mark.slow
@each(("name", "limit"), AT_MOST.items())
def test_little_memory_is_lost_on_one_gpu(name: str, limit: float) -> None:
    assert least_share(limit) < reserved_share(name) <= limit


@pytest.mark.slow
@each(("name", "limit"), AT_MOST_SLOW.items())
def test_little_memory_is_lost_on_one_gpu_in_more_cases(name: str, limit: float) -> None:
    assert least_share(limit) < reserved_share(name) <= limit


@each(
    ("env", "amd", "expected"),
    [
        ({}, False, True),
        ({}, True, False),  # ROCm
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, False, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}, False, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, False, True),
    ],
)
def test_expandable_segments_unless_the_user_chose(env: dict[str, str], amd: bool, expected: bool) -> None:
    assert allocator_settings.is_expandable(amd, env) is expected


def test_the_engine_turns_expandable_segments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    for name in allocator_settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    allocator_settings.use_expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    allocator_settings.use_expandable_segments()
    assert found == ["expandable_segments:True"]

"""Ranks rehearsed side by side on one device: a collective starts when the last member of its group has its data.

Without it every rank would run through its step alone: two ranks on one GPU would fall out of step, each computing
while the other waits for its network, and neither would feel that the GPU is shared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

LANES = 64  # process groups, and directions of sends
KEPT = 64  # arrivals of a rank on a lane whose times are kept: more than it can be ahead of another
TIMEOUT_S = 300.0


def group_of(place: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return the group of a rank that corresponds to rank 0's; all groups of a mesh axis have its size and stride."""
    if len(members) < 2:
        return (place,)
    stride = members[1] - members[0]
    first = place - (place // stride) % len(members) * stride
    return tuple(first + stride * number for number in range(len(members)))


class Peers:
    """One of the ranks that share a device: counts of arrivals by lane and rank are in shared memory."""

    def __init__(self, context: Any, world: int, timeout_s: float = TIMEOUT_S) -> None:
        self.world, self.place, self.timeout_s = world, 0, timeout_s
        self.barrier = context.Barrier(world, timeout=timeout_s)
        self.arrivals = context.RawArray("q", LANES * world)  # each entry is written by one rank only
        self.times = context.RawArray("d", LANES * world * KEPT)  # by the clock that all processes share

    def at(self, place: int) -> Peers:
        """Return the same ranks as seen from one of them."""
        found = object.__new__(Peers)
        found.__dict__.update(self.__dict__, place=place)
        return found

    def meet(self, lane: int, number: int, members: Sequence[int]) -> float:
        """Wait until every member of the group has arrived at its collective of this number on a lane.

        Return when the last of them arrived, by the performance counter: waiting processes notice it later.
        """
        if lane >= LANES:
            raise RuntimeError(f"a rank has more than {LANES} process groups")
        row, end_s = lane * self.world, time.monotonic() + self.timeout_s
        self.times[(row + self.place) * KEPT + number % KEPT] = time.perf_counter()
        self.arrivals[row + self.place] += 1
        group = [row + one for one in group_of(self.place, members)]
        while min(self.arrivals[one] for one in group) <= number:
            if time.monotonic() > end_s:
                raise RuntimeError(f"a rank that shares the device did not arrive within {self.timeout_s:.0f} s")
            time.sleep(0)  # only yields: sleeps of 20 µs last three times as long
        return float(max(self.times[one * KEPT + number % KEPT] for one in group))

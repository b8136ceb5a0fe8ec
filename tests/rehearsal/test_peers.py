"""Ranks rehearsed side by side: they wait for each other, and gloo is timed as their step uses it."""

from __future__ import annotations

import json
import multiprocessing as mp
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from benchmarks.gloo_times import points

from meshwright.rehearsal.delays import Collective, HostDelays
from meshwright.rehearsal.peers import Peers, group_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("place", "members", "group"),
    [
        (1, (0, 1), (0, 1)),
        (3, (0, 1), (2, 3)),  # tensor parallelism of two neighbours
        (3, (0, 2), (1, 3)),  # shards over the other axis
        (2, (0, 1, 2, 3), (0, 1, 2, 3)),
        (5, (0,), (5,)),
    ],
)
def test_a_rank_has_the_group_of_its_axis(place: int, members: tuple[int, ...], group: tuple[int, ...]) -> None:
    assert group_of(place, members) == group


def collective_ends(peers: Peers, late_s: float, seconds: float, ends: dict[int, float]) -> None:
    delays = HostDelays(on_gpu=False, peers=peers)
    time.sleep(late_s)
    delays.place(("tp", ""), seconds, lambda: 0, None, False, Collective("all_gather", 8, (0, 1)))[0].wait()
    ends[peers.place] = time.perf_counter()


def test_a_collective_starts_when_its_last_member_has_arrived() -> None:
    peers = Peers(mp.get_context("spawn"), 4, timeout_s=20)
    ends: dict[int, float] = {}
    begin = time.perf_counter()
    late = {0: 0.0, 1: 0.2, 2: 0.0, 3: 0.0}  # the second group does not wait for the first
    ranks = [threading.Thread(target=collective_ends, args=(peers.at(one), s, 0.1, ends)) for one, s in late.items()]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert min(ends[0], ends[1]) - begin >= 0.3
    assert peers.arrivals[:4] == [1, 1, 1, 1]
    assert max(ends[2], ends[3]) < min(ends[0], ends[1]) - 0.05


def test_a_rank_that_never_arrives_is_an_error() -> None:
    peers = Peers(mp.get_context("spawn"), 2, timeout_s=0.05)
    work = HostDelays(on_gpu=False, peers=peers).place(
        ("tp", ""), 0.0, lambda: 0, None, False, Collective("all_gather", 8, (0, 1))
    )[0]
    with pytest.raises(RuntimeError, match="did not arrive"):
        work.wait()


def test_the_order_of_starts_and_waits_is_recorded() -> None:
    delays = HostDelays(on_gpu=False)
    delays.calls = calls = []
    gather, scatter = Collective("all_gather", 8, (0, 1)), Collective("reduce_scatter", 16, (0, 1))
    first = delays.place(("dp", ""), 0.0, lambda: 0, None, False, gather)[0]
    delays.place(("dp", ""), 0.0, lambda: 0, None, False, scatter)[0].wait()
    first.wait()
    first.wait()
    assert calls == [(0, gather), (1, scatter), (1, None), (0, None)]


def test_a_collective_lasts_from_its_last_start_to_its_last_end() -> None:
    calls = [(0, ("all_gather", 8, (0, 1))), (0, None)]
    by_rank = [[{0: (1.0, 3.0)}, {0: (0.0, 5.0)}, {0: (0.0, 9.0)}], [{0: (2.0, 2.9)}, {0: (1.0, 5.0)}, {0: (1.0, 9.0)}]]
    (found,) = points(calls, by_rank)
    assert (found["kind"], found["ranks"], found["bytes"]) == ("all_gather", 2, 8)
    assert (found["s"], found["most_s"], found["calls"]) == (4.0, 8.0, 3)  # of 1, 4 and 8


def test_gloo_is_timed_between_groups_of_real_ranks() -> None:
    whole, pairs = (0, 1, 2, 3), (0, 2)
    calls = [
        (0, ("all_gather", 1 << 16, pairs)),
        (1, ("reduce_scatter", 1 << 16, whole)),
        (1, None),
        (0, None),
        (2, ("all_reduce", 4, whole)),
        (2, None),
    ]
    words = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks/gloo_times.py"), "4", "bfloat16", "cpu", "1e-4"]
    done = subprocess.run(words, input=json.dumps(calls), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(one["kind"], one["ranks"], one["bytes"]) for one in found] == [
        ("all_gather", 2, 1 << 16),
        ("all_reduce", 4, 4),
        ("reduce_scatter", 4, 1 << 16),
    ]
    assert all(0 < one["s"] < 60 for one in found)

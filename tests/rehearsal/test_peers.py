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
from benchmarks.gloo_times import Stamp, points

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


def test_a_synchronous_collective_is_carried_out_by_its_caller() -> None:
    peers = Peers(mp.get_context("spawn"), 1, timeout_s=20)
    delays = HostDelays(on_gpu=False, peers=peers.at(0))
    threads = set(threading.enumerate())
    what = Collective("all_gather", 8, (0,), is_async=False)
    work = delays.place(("tp", ""), 0.05, lambda: 0, None, False, what)[0]
    assert not work.is_completed()
    begin = time.perf_counter()
    work.wait()
    assert 0.05 <= time.perf_counter() - begin < 0.2
    assert work.is_completed()
    assert set(threading.enumerate()) <= threads, "no thread of a pool"
    work.wait()
    assert peers.arrivals[0] == 1, "carried out once"


def test_a_rank_that_never_arrives_is_an_error() -> None:
    peers = Peers(mp.get_context("spawn"), 2, timeout_s=0.05)
    work = HostDelays(on_gpu=False, peers=peers).place(
        ("tp", ""), 0.0, lambda: 0, None, False, Collective("all_gather", 8, (0, 1))
    )[0]
    with pytest.raises(RuntimeError, match="did not arrive"):
        work.wait()


def test_a_collective_lasts_from_its_last_start_to_its_last_end() -> None:
    times = [[(1.0, 3.0), (0.0, 5.0), (0.0, 9.0)], [(2.0, 2.9), (1.0, 5.0), (1.0, 9.0)]]
    (found,) = points([[Stamp("all_gather", 8, (0, 1), *one) for one in rank] for rank in times])
    assert (found["kind"], found["ranks"], found["bytes"]) == ("all_gather", 2, 8)
    assert (found["s"], found["most_s"], found["calls"]) == (pytest.approx(13 / 3), 8.0, 3)  # of 1, 4 and 8


def test_groups_are_timed_apart() -> None:
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    late = [0.0, 0.0, 5.0, 5.0]  # the second pair starts later; each pair's collective lasts 1 s
    stamps = [[Stamp("all_reduce", 4, pair, at, at + 1.0)] for pair, at in zip(pairs, late, strict=True)]
    (found,) = points(stamps)
    assert (found["s"], found["most_s"], found["calls"]) == (1.0, 1.0, 2)


def test_gloo_is_timed_in_steps_of_real_ranks() -> None:
    recipe = ["qwen3_600m_pretrain_config", "layout.tp=2", "layout.sp=true", "layout.micro_batch_size=1"]
    changes = ["train.global_batch_size=4", "data.seq_length=64", "architecture.layers=2", "kernels.compile=false"]
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.gloo_times", "2", *recipe, *changes, "--smoke"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {one["kind"] for one in found} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(0 < one["s"] < 60 and one["ranks"] == 2 for one in found)
    gathers = sum(one["calls"] for one in found if one["kind"] == "all_gather")
    scatters = sum(one["calls"] for one in found if one["kind"] == "reduce_scatter")
    assert gathers > scatters >= 2 * 4 * 2 * 4  # two steps, four micro batches, two layers, four each

"""Time gloo's collectives as a step uses them, and print them as points of a measured network.

    python benchmarks/gloo_times.py RANKS DTYPE DEVICE GAP_S < calls.json

Every rank is a process of its own and makes the collectives of one recorded step (rehearsal/delays.py: Call) in its
order, waiting where the step waits, with the same sizes and groups. Before each of them its device computes for GAP_S
seconds, as in the step. Two collectives that the step has in flight at once share the host here too, and the groups of
all ranks are busy at the same time. The first passes allocate pinned host memory, which is kept, and are dropped.

A collective lasts from the time at which the last member of its group starts it until the last member has its result on
its device. The time of a kind and size is the median of its calls; the spread is printed too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
WARM_UP, PASSES, TIMEOUT_S = 2, 4, 150.0
MOST_S = 12.0  # of timed passes: fewer are made of slow ones
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
Stamp = tuple[float, float]  # start and end of a collective on one rank


def replayed(process: Any, dtype: str, gap_s: float, calls: list[Any]) -> list[dict[str, Any]] | None:
    """Make a step's collectives on this rank some times; return the points on rank 0."""
    import torch.distributed as dist

    from meshwright.rehearsal.peers import group_of

    world = dist.get_world_size()
    groups: dict[tuple[int, ...], Any] = {}
    for members in sorted({tuple(what[2]) for _, what in calls if what}):
        for one in sorted({group_of(rank, members) for rank in range(world)}):  # every rank makes all groups
            made = dist.new_group(list(one)) if len(one) < world else dist.group.WORLD
            if process.rank in one:
                groups[members] = made
    run = Replay(process.device, dtype, groups, Work(process.device, gap_s))
    mine = [run.step(calls) for _ in range(WARM_UP)][:0]
    begin = time.monotonic()
    while len(mine) < PASSES and not _enough(time.monotonic() - begin, len(mine)):
        mine.append(run.step(calls))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    return points(calls, everyone) if process.rank == 0 else None


def _enough(seconds: float, passes: int) -> bool:
    """Return whether all ranks stop: they must decide alike."""
    import torch
    import torch.distributed as dist

    vote = torch.tensor(float(passes > 1 and seconds > MOST_S))
    dist.all_reduce(vote)
    return bool(vote > 0)


class Work:
    """Matmuls that take a given time on the device, if it is this rank's alone."""

    def __init__(self, device: Any, seconds: float) -> None:
        import torch

        number = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = 2048 if device.type == "cuda" else 64
        self.one = torch.randn(size, size, device=device).to(number)
        self.count = 16
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self.run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        self.count = max(round(seconds * self.count / min(times)), 0)

    def run(self) -> None:
        """Start them."""
        for _ in range(self.count):
            self.one @ self.one


class Replay:
    """The tensors of a step's collectives on one rank."""

    def __init__(self, device: Any, dtype: str, groups: dict[tuple[int, ...], Any], work: Work) -> None:
        self.device, self.dtype, self.groups, self.work = device, dtype, groups, work
        self.tensors: dict[tuple[str, int, int], tuple[Any, Any]] = {}

    def step(self, calls: list[Any]) -> dict[int, Stamp]:
        """Make the collectives once; return when each of them started and ended."""
        started: dict[int, tuple[float, Any]] = {}
        found: dict[int, Stamp] = {}

        def end(number: int) -> None:
            start, work = started.pop(number)
            work.wait()
            self._synchronize()
            found[number] = start, time.perf_counter()

        for number, what in calls:
            if what:
                self.work.run()
                self._synchronize()  # in the step, too, gloo starts when the device has the data
                started[number] = time.perf_counter(), self._start(*what)
            elif number in started:
                end(number)
        for number in [*started]:
            end(number)
        return found

    def _synchronize(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _start(self, kind: str, size: int, members: Sequence[int]) -> Any:
        import torch.distributed as dist

        from meshwright.engine.collectives import all_gather, reduce_scatter

        full, part = self._of(kind, size, len(members))
        group = self.groups[tuple(members)]
        if kind == "all_gather":
            return all_gather(full, part, group=group, async_op=True)
        if kind == "reduce_scatter":
            return reduce_scatter(part, full, group=group, async_op=True)
        if kind == "all_reduce":
            return dist.all_reduce(full, group=group, async_op=True)
        if kind == "all_to_all":
            return dist.all_to_all_single(full.clone(), full, group=group, async_op=True)
        raise ValueError(f"gloo is not timed for {kind}; it is for {', '.join(KINDS)}")

    def _of(self, kind: str, size: int, count: int) -> tuple[Any, Any]:
        import torch

        if (kind, size, count) not in self.tensors:
            number = torch.bfloat16 if kind == "all_gather" else getattr(torch, self.dtype)
            number = torch.float32 if size < 64 else number  # losses and norms
            elements = max(size // number.itemsize // count, 1) * count
            full = torch.randn(elements, device=self.device).to(number)
            self.tensors[kind, size, count] = full, full[: elements // count].clone()
        return self.tensors[kind, size, count]


def points(calls: list[Any], stamps: Sequence[Sequence[dict[int, Stamp]]]) -> list[dict[str, Any]]:
    """Return the median seconds by kind, ranks and bytes; `stamps`: by rank, pass and collective."""
    from meshwright.rehearsal.peers import group_of

    seconds: dict[tuple[str, int, int], list[float]] = {}
    for number, what in calls:
        if not what:
            continue
        kind, size, members = what
        for place in range(len(stamps[0])):
            for group in sorted({group_of(rank, members) for rank in range(len(stamps))}):
                of_group = [stamps[rank][place][number] for rank in group]
                start, end = max(one[0] for one in of_group), max(one[1] for one in of_group)
                seconds.setdefault((kind, len(members), size), []).append(end - start)
    return [
        {"kind": kind, "ranks": count, "bytes": size, "s": median(found), **_spread(found)}
        for (kind, count, size), found in sorted(seconds.items())
    ]


def _spread(seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "calls": len(ordered),
        "mean_s": mean(ordered),
        "p10_s": ordered[len(ordered) // 10],
        "p90_s": ordered[-1 - len(ordered) // 10],
        "most_s": ordered[-1],
    }


def main() -> None:
    """Print the points of the calls on standard input."""
    from meshwright.engine.processes import fork

    world, dtype, device, gap_s = sys.argv[1:5]
    settings: dict[str, Any] = {"timeout": TIMEOUT_S, "device_type": device, "backend": "gloo"}
    print(json.dumps(fork(int(world), replayed, dtype, float(gap_s), json.load(sys.stdin), **settings)[0]))


if __name__ == "__main__":
    main()

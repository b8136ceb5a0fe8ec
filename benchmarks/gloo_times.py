"""Time gloo's collectives inside training steps, and print them as points of a measured network (JSON).

    python -m benchmarks.gloo_times RANKS RECIPE [KEY=VALUE]...        (on a GPU: the ranks share it)
    python -m benchmarks.gloo_times RANKS RECIPE [KEY=VALUE]... --smoke      (on CPU, a tiny model)

The ranks train the recipe with the engine's own step. A collective lasts from the time at which the last member of its
group has its data until the host of the last member goes on; its device then still receives the result. The time of a
kind, number of ranks and size is the mean of its calls, of which a step is the sum; the spread is printed too.
Replayed without the step around them, the same collectives took up to twice as long on an H200 (2026-11-18): some of
4 MiB took 13 ms instead of 3.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
WARM_UP, STEPS, TIMEOUT_S = 2, 2, 150.0
KINDS = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}  # by the method of a process group; torch 2.13 renamed three


class Stamp(NamedTuple):
    """A collective on one rank."""

    kind: str
    size: int  # bytes of the larger of input and output
    ranks: tuple[int, ...]
    start: float
    end: float


def timed_steps(process: Any, recipe: Any, config: Any) -> list[dict[str, Any]] | None:
    """Train some steps on this rank; return the points on rank 0."""
    import torch.distributed as dist

    from meshwright.engine.mesh import build_mesh
    from meshwright.engine.model_families import family_of
    from meshwright.engine.worker import set_determinism

    set_determinism(recipe, process.device)
    family = family_of(recipe)
    mesh = build_mesh(recipe.layout, process.device.type)
    source = family.open_source(recipe, config, False, None)
    trainer = family.trainer()(recipe, config, mesh, process.device, source, None)
    for number in range(WARM_UP):
        trainer.step(number)
    with recorded(process.device) as stamps:
        for number in range(WARM_UP, WARM_UP + STEPS):
            trainer.step(number)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, stamps)
    trainer.close()
    return points(everyone) if process.rank == 0 else None


@contextmanager
def recorded(device: Any) -> Iterator[list[Stamp]]:
    """Record the collectives of all process groups meanwhile."""
    import torch.distributed as dist

    stamps: list[Stamp] = []
    owner: Any = dist.ProcessGroup
    before = {name: getattr(owner, name) for name in KINDS if hasattr(owner, name)}
    for name, real in before.items():
        setattr(owner, name, _recording(real, KINDS[name], device, stamps))
    try:
        yield stamps
    finally:
        for name, real in before.items():
            setattr(owner, name, real)


def _recording(real: Callable[..., Any], kind: str, device: Any, stamps: list[Stamp]) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def call(group: Any, *args: Any, **options: Any) -> Any:
        found = [
            [one] if isinstance(one, torch.Tensor) else one for one in args if isinstance(one, (torch.Tensor, list))
        ]
        tensors = [one for one in found if one and isinstance(one[0], torch.Tensor)]
        if tensors[0][0].device.type != device.type or group.size() == 1:
            return real(group, *args, **options)
        if any(getattr(one, "asyncOp", False) for one in args):
            raise RuntimeError(f"{kind} is asynchronous: it is not timed")
        size = max(sum(one.numel() * one.element_size() for one in some) for some in tensors)
        synchronize()
        start = time.perf_counter()
        work = real(group, *args, **options)
        work.wait()
        stamps.append(Stamp(kind, size, tuple(dist.get_process_group_ranks(group)), start, time.perf_counter()))
        return work

    return call


def points(by_rank: Sequence[Sequence[Stamp]]) -> list[dict[str, Any]]:
    """Return the mean seconds by kind, ranks and bytes."""
    seconds: dict[tuple[str, int, int], list[float]] = {}
    for group in sorted({one.ranks for stamps in by_rank for one in stamps}):
        of_members = ([one for one in by_rank[rank] if one.ranks == group] for rank in group)
        for calls in zip(*of_members, strict=True):
            key = (calls[0].kind, len(group), calls[0].size)
            lasted = max(one.end for one in calls) - max(one.start for one in calls)
            seconds.setdefault(key, []).append(lasted)
    return [
        {"kind": kind, "ranks": count, "bytes": size, "s": mean(found), **_spread(found)}
        for (kind, count, size), found in sorted(seconds.items())
    ]


def _spread(seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "calls": len(ordered),
        "median_s": median(ordered),
        "p10_s": ordered[len(ordered) // 10],
        "p90_s": ordered[-1 - len(ordered) // 10],
        "most_s": ordered[-1],
    }


def main() -> None:
    """Print the points of the recipe on the command line."""
    from rehearse_h200 import RanksPlan

    from meshwright.engine.processes import fork

    smoke = "--smoke" in sys.argv
    world, *words = (word for word in sys.argv[1:] if word != "--smoke")
    plan = RanksPlan(words, int(world), smoke)
    settings: dict[str, Any] = {"timeout": TIMEOUT_S, "device_type": plan.device, "backend": "gloo"}
    print(json.dumps(fork(int(world), timed_steps, plan.case.recipe, plan.config, **settings)[0]))


if __name__ == "__main__":
    main()

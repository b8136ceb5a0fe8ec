"""A profiler trace of a few stated steps, as a Chrome trace and a table of the most expensive operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError

if TYPE_CHECKING:
    from torch.profiler import profile

ROWS = 15


class Window:
    """The steps that are recorded: `step()` after each step moves on; the results are there when the window is over."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last  # steps that are recorded, counted from 1
        self.trace: Path | None = None
        self.table = ""
        self.done = 0  # steps that are over
        self._profile: profile | None = None

    def step(self) -> None:
        """Says that a step is over."""
        self.done += 1
        if self._profile is not None:
            self._profile.step()


@contextmanager
def window(
    enabled: bool,
    folder: Path,
    wait: int = 5,
    warmup: int = 2,
    active: int = 3,
    process: Process | None = None,
    all_ranks: bool = False,
) -> Iterator[Window]:
    """Records `active` steps after `wait` idle and `warmup` unrecorded ones; does nothing when off or not on rank 0."""
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
        if value < least:
            raise InputError(f"must be at least {least}", field=f"profile {name}", value=value)
    rank = process.rank if process is not None else 0
    seen = Window(wait + warmup + 1, wait + warmup + active)
    if not enabled or (rank != 0 and not all_ranks):
        yield seen
        return
    with _profiler(seen, Path(folder), rank, (wait, warmup, active)) as seen._profile:
        yield seen
    seen._profile = None
    if seen.done < seen.last:
        warn(f"the run ended after {seen.done} steps, before the profiled steps {seen.first}–{seen.last} were over")


def _profiler(seen: Window, folder: Path, rank: int, steps: tuple[int, int, int]) -> profile:
    import torch
    from torch.profiler import ProfilerActivity, schedule

    wait, warmup, active = steps
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []

    def keep(done: Any) -> None:
        last = min(seen.last, max(seen.first, seen.done))  # a run may end inside the window
        seen.table = _top_operators(done, on_gpu=bool(cuda))
        seen.trace = _saved(done, folder / f"trace_rank{rank}_steps{seen.first}-{last}.json.gz")

    return torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *cuda],
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=keep,
        record_shapes=True,
    )


def _top_operators(done: Any, on_gpu: bool) -> str:
    sort = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return str(done.key_averages().table(sort_by=sort, row_limit=ROWS, max_name_column_width=60))


def _saved(done: Any, path: Path) -> Path | None:
    """Writes the trace; a disk that refuses it does not end the training."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        warn(f"the profiler trace {path} cannot be written ({error})")
        return None
    return path

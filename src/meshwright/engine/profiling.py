"""Profiles a few steps: a Chrome trace and a table of the most expensive operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.display import plural
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError

if TYPE_CHECKING:
    from torch.profiler import profile

ROWS = 15


class Window:
    """The steps to record: call `step()` after each step; trace and table are set after the last one."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last  # recorded steps, counted from 1
        self.trace: Path | None = None
        self.table = ""
        self.done = 0  # completed steps
        self._profile: profile | None = None

    def step(self) -> None:
        """Record that a step is completed."""
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
    """Profile `active` steps after `wait` idle and `warmup` unrecorded ones; a no-op when off or not on rank 0."""
    for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
        if value < least:
            raise InputError(f"must be at least {least}", field=f"profile {name}", value=value)
    rank = process.rank if process is not None else 0
    recorded = Window(wait + warmup + 1, wait + warmup + active)
    if not enabled or (rank != 0 and not all_ranks):
        yield recorded
        return
    with _profiler(recorded, Path(folder), rank, (wait, warmup, active)) as recorded._profile:
        yield recorded
    recorded._profile = None
    if recorded.done < recorded.last:
        planned = f"{recorded.first}–{recorded.last}"
        warn(f"the run ended after {plural(recorded.done, 'step')}, before the profiled steps {planned} were completed")


def _profiler(recorded: Window, folder: Path, rank: int, steps: tuple[int, int, int]) -> profile:
    import torch
    from torch.profiler import ProfilerActivity, schedule

    wait, warmup, active = steps
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []

    def keep(done: Any) -> None:
        last = min(recorded.last, max(recorded.first, recorded.done))  # a run may end inside the window
        recorded.table = _top_operators(done, on_gpu=bool(cuda))
        recorded.trace = _save_trace(done, folder / f"trace_rank{rank}_steps{recorded.first}-{last}.json.gz")

    return torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *cuda],
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=keep,
        record_shapes=True,
    )


def _top_operators(done: Any, on_gpu: bool) -> str:
    sort = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return str(done.key_averages().table(sort_by=sort, row_limit=ROWS, max_name_column_width=60))


def _save_trace(done: Any, path: Path) -> Path | None:
    """Write the trace; a disk error does not end the training."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        warn(f"the profiler trace {path} cannot be written ({error})")
        return None
    return path

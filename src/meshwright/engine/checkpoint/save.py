"""Writes checkpoints: copies the state to host memory and writes it from there while training continues.

All ranks write their files in parallel. When every file is on the disk and its checksum was read back, rank 0 writes
the manifest, renames the checkpoint to its final name and updates `latest`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from meshwright import json_text
from meshwright.engine.checkpoint.files import (
    BLOCK,
    DamagedError,
    FileRecord,
    Manifest,
    verify,
    write,
    write_checksummed,
)
from meshwright.engine.checkpoint.folder import INDEX, MANIFEST, STATE, Folder, rank_file
from meshwright.engine.checkpoint.metadata import (
    Index,
    ShardMeta,
    State,
    assign_writers,
    build_index,
    file_order,
    safetensors_header,
    shard_meta,
)
from meshwright.engine.checkpoint.shards import Shard, group_state, local_shards
from meshwright.engine.faults import RunError
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.object_collectives import gathered
from meshwright.engine.rank_env import Process
from meshwright.recipes.types import Checkpoint

if TYPE_CHECKING:
    from meshwright.engine.trainer import Trainer

SLOWEST_WRITER_S = 7200.0  # how long ranks wait for the slowest writer


class SaveError(RunError):
    """A checkpoint could not be written (exit code 3); earlier checkpoints are untouched."""


@dataclass(frozen=True)
class _Plan:
    """Which rank writes which shards; computed once, because the layout does not change during a run."""

    shards: list[ShardMeta]  # that this rank holds
    written: list[int]  # numbers of those that this rank writes
    index: Index


class Saver:
    """Writes the checkpoints of one run, at most one at a time."""

    def __init__(self, folder: Folder, trainer: Trainer, process: Process, settings: Checkpoint) -> None:
        self.folder, self.trainer, self.settings = folder, trainer, settings
        self.rank, self.world = process.rank, process.world
        # A separate group: its messages run concurrently with the training's collectives.
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=SLOWEST_WRITER_S)) if self.world > 1 else None
        )
        self.last: int | None = None  # the step of the newest valid checkpoint
        self.figures: dict[str, float] = {}  # seconds not reported yet: save_s, save_blocked_s
        self._plan: _Plan | None = None
        self._staging: torch.Tensor | None = None
        self._copied: Any = None  # CUDA event: the copies to host memory are done
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def prepare(self) -> None:
        """Allocate the host memory for the copies, so that the first save does not wait for it."""
        if self.settings.async_save:
            self._staging_memory(self._to_write(self._shards()))

    def save(self, state: State, wait: bool = False, read_back: bool = True) -> None:
        """Save the state after a step. With `wait`, return when it is on the disk, or raise.

        Without `wait`, training may continue: call `before_update` before anything changes the state, and `poll`
        regularly.
        """
        start = time.perf_counter()
        self.settle()
        shards = self._to_write(self._shards())
        blocks = self._copies(shards) if self.settings.async_save else None
        staged = blocks is not None
        if blocks is None:
            blocks = _bytes_of(shards)
        header = safetensors_header(shards)
        groups = group_state(self.trainer)
        ready = self._copied

        def work() -> None:
            if ready is not None and staged:
                ready.synchronize()
            self._write(state, groups, _chained(header, blocks), read_back)
            self.figures["save_s"] = time.perf_counter() - start

        if staged and not wait:
            self._thread = threading.Thread(
                target=self._catch_failure, args=(work,), name="meshwright-save", daemon=True
            )
            self._thread.start()
        else:
            self.before_update()
            self._catch_failure(work)
            if wait:
                self.finish()
            else:
                self.poll()
        self.figures["save_blocked_s"] = time.perf_counter() - start

    def before_update(self) -> None:
        """Make the GPU wait until the state is copied; call it before anything changes the state."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def poll(self) -> None:
        """Check whether a save has finished. Warn about disk errors and continue; raise any other failure."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if not isinstance(failure, SaveError):
            raise failure
        if self.rank == 0:
            kept = f"the last valid one is of step {self.last}" if self.last is not None else "there is no earlier one"
            warn(f"{failure}; {kept}; training continues, and the next save tries again")

    def settle(self) -> None:
        """Wait for a save in progress."""
        if self._thread is not None:
            self._thread.join()
        self.poll()

    def finish(self) -> None:
        """Wait for a save in progress; raise its failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def busy(self) -> bool:
        """Whether a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def take_figures(self) -> dict[str, float]:
        """Return and reset the seconds of saves that finished since the last call."""
        taken, self.figures = self.figures, {}
        return taken

    def _catch_failure(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised or reported by poll(), in the training thread
            self._failure = error

    # What this rank writes

    def _shards(self) -> list[Shard]:
        return [*local_shards(self.trainer), *rng_shards(self.rank, self.trainer.device)]

    def _to_write(self, shards: list[Shard]) -> list[Shard]:
        """Return the shards that this rank writes, in file order."""
        metas = [shard_meta(shard) for shard in shards]
        if self._plan is None:
            all_ranks = gathered(metas, self.group)
            written = assign_writers(all_ranks)
            self._plan = _Plan(metas, written[self.rank], build_index(all_ranks, written))
        if metas != self._plan.shards:
            raise RuntimeError("the shards of this rank have changed since its first checkpoint")
        return file_order([shards[number] for number in self._plan.written])

    def _copies(self, shards: list[Shard]) -> Iterable[memoryview] | None:
        """Start copying the shards to host memory in file order; None if there is not enough memory."""
        staging = self._staging_memory(shards)
        if staging is None:
            return None
        on_gpu = self.trainer.device.type == "cuda"
        if on_gpu:
            stream = _side_stream(self.trainer.device)
            with torch.cuda.stream(stream):
                _copy(shards, staging)
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record(stream)
        else:
            _copy(shards, staging)
        return _blocks(staging)

    def _staging_memory(self, shards: list[Shard]) -> torch.Tensor | None:
        size = sum(_size(shard) for shard in shards)
        if self._staging is None or self._staging.numel() != size:
            try:
                self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self.trainer.device.type == "cuda")
            except (RuntimeError, MemoryError) as error:
                warn(f"no host memory for an asynchronous save ({size / 2**30:.1f} GiB: {error}); saving synchronously")
                return None
        return self._staging

    # How it is written to the disk

    def _write(
        self, state: State, groups: dict[str, dict[str, float]], blocks: Iterable[memoryview | bytes], read_back: bool
    ) -> None:
        path = self.folder.staging_path(state.step) / rank_file(self.rank)
        record, problem = None, ""
        try:
            record = self._write_rank_file(path, blocks, read_back)
        except (OSError, DamagedError) as error:
            problem = _reason(error, path)
        reports = gathered((record, problem, groups), self.group)
        problems = [one[1] for one in reports if one[1]]
        if not problems and self.rank == 0:
            try:
                self._publish(state, reports)
            except OSError as error:
                problems = [_reason(error, self.folder.staging_path(state.step))]
        if problems and self.rank == 0:
            self.folder.discard(state.step)
        problems = gathered(problems, self.group)[0]
        if problems:
            raise SaveError(
                f"the checkpoint of step {state.step} could not be written: {'; '.join(problems)}",
                fix=("free space, then restart the run: it resumes from the last checkpoint",),
            )
        self.last = state.step

    def _write_rank_file(self, path: Path, blocks: Iterable[memoryview | bytes], read_back: bool) -> FileRecord:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.unlink()  # left by an attempt that failed on another rank
        record = write(path, blocks)
        if read_back:
            verify(path, record, from_disk=True)
        return record

    def _publish(self, state: State, reports: list[Any]) -> None:
        assert self._plan is not None
        folder = self.folder.staging_path(state.step)
        groups: dict[str, dict[str, float]] = {}
        for _, _, numbers in reports:
            groups |= numbers
        complete = msgspec.structs.replace(state, groups=groups)
        files: dict[str, FileRecord] = {rank_file(rank): report[0] for rank, report in enumerate(reports)}
        for name, content in ((STATE, json_text.encode(complete)), (INDEX, msgspec.json.encode(self._plan.index))):
            (folder / name).unlink(missing_ok=True)
            files[name] = write(folder / name, [content])
        write_checksummed(folder / MANIFEST, msgspec.json.encode(Manifest(state.step, files)))
        self.folder.publish(state.step)
        if state.validation.best_step == state.step and self.settings.keep_best:
            self.folder.mark_best(state.step)
        with suppress(OSError):  # the next save tries again
            self.folder.prune(self.settings.keep, self.settings.milestone_every)


def rng_shards(rank: int, device: torch.device) -> list[Shard]:
    """Return the states of this rank's random generators as shards."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return [Shard(f"random/{rank}/{device_type}", tuple(one.shape), (0,), one) for device_type, one in states.items()]


def _copy(shards: list[Shard], staging: torch.Tensor) -> None:
    offset = 0
    for shard in shards:
        size = _size(shard)
        target = staging[offset : offset + size].view(shard.tensor.dtype).view(shard.tensor.shape)
        target.copy_(shard.tensor, non_blocking=True)
        offset += size


def _side_stream(device: torch.device) -> Any:
    """Return a stream for copies concurrent with training; it waits for the work queued so far."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _size(shard: Shard) -> int:
    return shard.tensor.numel() * shard.tensor.element_size()


def _blocks(memory: torch.Tensor) -> Iterator[memoryview]:
    view = _view(memory)
    for first in range(0, len(view), BLOCK):
        yield view[first : first + BLOCK]


def _bytes_of(shards: list[Shard]) -> Iterator[memoryview]:
    """Yield the bytes of the shards without staging memory, one block at a time."""
    for shard in shards:
        flat = shard.tensor.contiguous().reshape(-1).view(torch.uint8)
        for first in range(0, flat.numel(), BLOCK):
            yield _view(flat[first : first + BLOCK].cpu())


def _view(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]  # arrays are buffers


def _chained(header: bytes, blocks: Iterable[memoryview]) -> Iterator[memoryview | bytes]:
    yield header
    yield from blocks


def _reason(error: Exception, path: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or os.strerror(error.errno or 0)}"
    return str(error)

"""Saving: the state is copied to host memory, and written from there while training goes on.

All ranks write their files side by side. Only when every file is on the disk, and read back with its checksum, does
rank 0 write the manifest, give the checkpoint its name and move the pointer `latest` to it.
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

from meshwright.engine.checkpoint.contents import (
    Index,
    ShardMeta,
    State,
    divide,
    file_order,
    index_of,
    safetensors_header,
    shard_meta,
)
from meshwright.engine.checkpoint.files import (
    BLOCK,
    DamagedError,
    FileRecord,
    Manifest,
    verify,
    write,
    write_sealed,
)
from meshwright.engine.checkpoint.folder import INDEX, MANIFEST, STATE, Folder, rank_file
from meshwright.engine.checkpoint.parts import Part, group_numbers, held_parts
from meshwright.engine.faults import RunError
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.object_collectives import gathered
from meshwright.engine.rank_env import Process
from meshwright.recipes.types import Checkpoint

if TYPE_CHECKING:
    from meshwright.engine.trainer import Trainer

SLOWEST_WRITER_S = 7200.0  # how long ranks that have written wait for the others


class SaveError(RunError):
    """A checkpoint could not be written (exit code 3); the ones before it are untouched."""


@dataclass(frozen=True)
class _Plan:
    """Who writes what; made once, because a layout does not change while it runs."""

    held: list[ShardMeta]  # of this rank
    mine: list[int]  # those of them that this rank writes
    index: Index


class Saver:
    """Writes checkpoints of one training; at most one is on its way at a time."""

    def __init__(self, folder: Folder, trainer: Trainer, process: Process, settings: Checkpoint) -> None:
        self.folder, self.trainer, self.settings = folder, trainer, settings
        self.rank, self.world = process.rank, process.world
        # A group of its own: its messages travel while training's collectives do.
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=SLOWEST_WRITER_S)) if self.world > 1 else None
        )
        self.last: int | None = None  # the step of the newest good checkpoint
        self.figures: dict[str, float] = {}  # seconds that were not told yet: save_s, save_blocked_s
        self._plan: _Plan | None = None
        self._staging: torch.Tensor | None = None
        self._copied: Any = None  # a CUDA event: the copies to host memory are done
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def prepare(self) -> None:
        """Makes the host memory for the copies, so that the first save does not wait for it."""
        if self.settings.async_save:
            self._staged_memory(self._mine(self._parts()))

    def save(self, state: State, wait: bool = False, read_back: bool = True) -> None:
        """Saves the state after a step. With `wait` it is on the disk when this returns, or an error says why not.

        Without, the training may go on at once: call `before_update` before anything changes the state, and `poll`
        now and then.
        """
        begun = time.perf_counter()
        self.settle()
        parts = self._mine(self._parts())
        blocks = self._copies(parts) if self.settings.async_save else None
        staged = blocks is not None
        if blocks is None:
            blocks = _bytes_of(parts)
        header = safetensors_header(parts)
        report = group_numbers(self.trainer)
        ready = self._copied

        def work() -> None:
            if ready is not None and staged:
                ready.synchronize()
            self._write(state, report, _chained(header, blocks), read_back)
            self.figures["save_s"] = time.perf_counter() - begun

        if staged and not wait:
            self._thread = threading.Thread(target=self._guarded, args=(work,), name="meshwright-save", daemon=True)
            self._thread.start()
        else:
            self.before_update()
            self._guarded(work)
            if wait:
                self.finish()
            else:
                self.poll()
        self.figures["save_blocked_s"] = time.perf_counter() - begun

    def before_update(self) -> None:
        """Makes the device wait until the state is copied; call it before anything changes the state."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def poll(self) -> None:
        """Looks whether a save has ended. A disk that failed is told and the training goes on; anything else raises."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if not isinstance(failure, SaveError):
            raise failure
        if self.rank == 0:
            kept = f"the last good one is of step {self.last}" if self.last is not None else "there is none before it"
            warn(f"{failure}; {kept}; training goes on, and the next save tries again")

    def settle(self) -> None:
        """Waits for a save that is on its way."""
        if self._thread is not None:
            self._thread.join()
        self.poll()

    def finish(self) -> None:
        """Waits for a save that is on its way; its failure is an error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def busy(self) -> bool:
        """Whether a save is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def take_figures(self) -> dict[str, float]:
        """Seconds of saves that ended since this was last asked."""
        taken, self.figures = self.figures, {}
        return taken

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # told by the training's own thread
            self._failure = error

    # What is written

    def _parts(self) -> list[Part]:
        return [*held_parts(self.trainer), *random_parts(self.rank, self.trainer.device)]

    def _mine(self, parts: list[Part]) -> list[Part]:
        """The parts that this rank writes, in the order of its file."""
        held = [shard_meta(part) for part in parts]
        if self._plan is None:
            everybody = gathered(held, self.group)
            written = divide(everybody)
            self._plan = _Plan(held, written[self.rank], index_of(everybody, written))
        if held != self._plan.held:
            raise RuntimeError("what this rank holds has changed since its first checkpoint")
        return file_order([parts[number] for number in self._plan.mine])

    def _copies(self, parts: list[Part]) -> Iterable[memoryview] | None:
        """Starts to copy the parts to host memory laid out like their file; None where there is no memory for it."""
        staging = self._staged_memory(parts)
        if staging is None:
            return None
        on_gpu = self.trainer.device.type == "cuda"
        if on_gpu:
            stream = _side_stream(self.trainer.device)
            with torch.cuda.stream(stream):
                _copy(parts, staging)
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record(stream)
        else:
            _copy(parts, staging)
        return _blocks(staging)

    def _staged_memory(self, parts: list[Part]) -> torch.Tensor | None:
        size = sum(_size(part) for part in parts)
        if self._staging is None or self._staging.numel() != size:
            try:
                self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self.trainer.device.type == "cuda")
            except (RuntimeError, MemoryError) as error:
                warn(f"no host memory for an asynchronous save ({size / 2**30:.1f} GiB: {error}); this one waits")
                return None
        return self._staging

    # How it is written

    def _write(
        self, state: State, groups: dict[str, dict[str, float]], blocks: Iterable[memoryview | bytes], read_back: bool
    ) -> None:
        path = self.folder.unfinished(state.step) / rank_file(self.rank)
        record, problem = None, ""
        try:
            record = self._own_file(path, blocks, read_back)
        except (OSError, DamagedError) as error:
            problem = _reason(error, path)
        reports = gathered((record, problem, groups), self.group)
        problems = [one[1] for one in reports if one[1]]
        if not problems and self.rank == 0:
            try:
                self._publish(state, reports)
            except OSError as error:
                problems = [_reason(error, self.folder.unfinished(state.step))]
        if problems and self.rank == 0:
            self.folder.drop(state.step)
        problems = gathered(problems, self.group)[0]
        if problems:
            raise SaveError(
                f"the checkpoint of step {state.step} could not be written: {'; '.join(problems)}",
                fix=("free space, then start the run again: it goes on from the last checkpoint",),
            )
        self.last = state.step

    def _own_file(self, path: Path, blocks: Iterable[memoryview | bytes], read_back: bool) -> FileRecord:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.unlink()  # of an attempt that another rank's failure ended
        record = write(path, blocks)
        if read_back:
            verify(path, record, from_disk=True)
        return record

    def _publish(self, state: State, reports: list[Any]) -> None:
        assert self._plan is not None
        folder = self.folder.unfinished(state.step)
        groups: dict[str, dict[str, float]] = {}
        for _, _, numbers in reports:
            groups |= numbers
        whole = msgspec.structs.replace(state, groups=groups)
        files: dict[str, FileRecord] = {rank_file(rank): report[0] for rank, report in enumerate(reports)}
        for name, content in ((STATE, whole), (INDEX, self._plan.index)):
            (folder / name).unlink(missing_ok=True)
            files[name] = write(folder / name, [msgspec.json.encode(content)])
        write_sealed(folder / MANIFEST, msgspec.json.encode(Manifest(state.step, files)))
        self.folder.publish(state.step)
        with suppress(OSError):  # what could not be removed is removed next time
            self.folder.prune(self.settings.keep, self.settings.milestone_every)


def random_parts(rank: int, device: torch.device) -> list[Part]:
    """The states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return [Part(f"random/{rank}/{kind}", tuple(one.shape), (0,), one) for kind, one in states.items()]


def _copy(parts: list[Part], staging: torch.Tensor) -> None:
    place = 0
    for part in parts:
        size = _size(part)
        target = staging[place : place + size].view(part.tensor.dtype).view(part.tensor.shape)
        target.copy_(part.tensor, non_blocking=True)
        place += size


def _side_stream(device: torch.device) -> Any:
    """A stream on which copies run beside the training; it begins where the training's own stream is now."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _size(part: Part) -> int:
    return part.tensor.numel() * part.tensor.element_size()


def _blocks(memory: torch.Tensor) -> Iterator[memoryview]:
    view = _view(memory)
    for first in range(0, len(view), BLOCK):
        yield view[first : first + BLOCK]


def _bytes_of(parts: list[Part]) -> Iterator[memoryview]:
    """The bytes of the parts straight from where they are, a block at a time."""
    for part in parts:
        flat = part.tensor.contiguous().reshape(-1).view(torch.uint8)
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

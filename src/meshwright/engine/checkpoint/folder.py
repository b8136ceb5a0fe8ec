"""The folder of a run's checkpoints: what is in it, what is kept, and who may write to it.

    checkpoints/latest                          the newest whole checkpoint
    checkpoints/step-00000100/manifest.json     every other file with its size and checksums, written last
                             /state.json        step, counters, the contract of the recipe
                             /index.json        where each part of each tensor lies
                             /rank-00000.safetensors
    run.lock                                    held by the run that writes here

A checkpoint gets its name when everything in it is on the disk; until then its folder begins with a dot.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.engine.checkpoint.files import DamagedError, read_sealed, write_sealed
from meshwright.engine.fsync import sync_folder
from meshwright.engine.metrics.jsonl import warn
from meshwright.errors import InputError

CHECKPOINTS = "checkpoints"
LATEST = "latest"
LOCK = "run.lock"
MANIFEST, STATE, INDEX = "manifest.json", "state.json", "index.json"
STEP = re.compile(r"step-(\d{8,})")
UNFINISHED = (".saving-", ".removing-")


def rank_file(rank: int) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}.safetensors"


class Folder:
    """The checkpoints of one run."""

    def __init__(self, run: Path) -> None:
        self.path = run / CHECKPOINTS

    def of(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.path / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.path / f".saving-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, good or not, in order."""
        if not self.path.is_dir():
            return []
        found = (STEP.fullmatch(one.name) for one in self.path.iterdir() if one.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """The step that the pointer names; None where there is no pointer."""
        pointer = self.path / LATEST
        if not pointer.exists():
            return None
        named = STEP.fullmatch(read_sealed(pointer).decode(errors="replace"))
        if named is None:
            raise DamagedError(f"{pointer} names no checkpoint")
        return int(named[1])

    def publish(self, step: int) -> Path:
        """Gives a checkpoint that is whole on the disk its name, then moves the pointer to it."""
        saved, final = self.unfinished(step), self.of(step)
        sync_folder(saved)
        if final.exists():
            self._remove(final)
        saved.rename(final)
        sync_folder(self.path)
        write_sealed(self.path / LATEST, final.name.encode())
        return final

    def prune(self, keep: int, milestone_every: int) -> None:
        """Removes all but the newest checkpoints and the milestones."""
        steps = self.steps()
        for step in steps[:-keep]:
            if not (milestone_every and step % milestone_every == 0):
                self._remove(self.of(step))

    def set_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint, so that it is neither used nor counted; its new place."""
        number, place = 0, self.path / f"damaged-{step:08d}"
        while place.exists():
            number += 1
            place = self.path / f"damaged-{step:08d}-{number}"
        self.of(step).rename(place)
        return place

    def clean(self) -> None:
        """Removes what interrupted saves and removals left behind."""
        for one in self.path.iterdir() if self.path.is_dir() else ():
            if one.name.startswith(UNFINISHED):
                shutil.rmtree(one, ignore_errors=True)

    def drop(self, step: int) -> None:
        """Removes what there is of a save that failed."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Takes the name away first: a removal that is interrupted must not leave half a checkpoint."""
        hidden = path.with_name(f".removing-{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


class Holder(msgspec.Struct, frozen=True):
    """Who writes to a run's folder."""

    pid: int
    host: str


class Lock:
    """Keeps a second run out of a run's folder; the system itself frees it when the holder dies."""

    def __init__(self, run: Path) -> None:
        self.path = run / LOCK
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", field="--out", value=str(run)) from None
        before = self._holder()
        if not self._take(before):
            os.close(self._file)
            raise InputError(
                f"another run writes here{_named(before)}",
                field="--out",
                value=str(run),
                fix=("another --out", "wait for that run, or end it"),
            )
        if before is not None:
            warn(f"the last run in {run}{_named(before)} did not end by itself; its lock is taken over")
        self._write(msgspec.json.encode(Holder(os.getpid(), socket.gethostname())))

    def release(self) -> None:
        """Lets other runs in."""
        if self._file < 0:
            return
        self._write(b"")
        os.close(self._file)
        self._file = -1

    def _take(self, before: Holder | None) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            # A file system without locks: what the file says is all there is to go by.
            return before is None or (before.host == socket.gethostname() and not _alive(before.pid))
        return True

    def _holder(self) -> Holder | None:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(os.pread(self._file, 4096, 0), type=Holder)
        return None

    def _write(self, text: bytes) -> None:
        with suppress(OSError):  # a full disk must not keep a run from going on
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)


def _named(holder: Holder | None) -> str:
    return f" (process {holder.pid} on {holder.host})" if holder else ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

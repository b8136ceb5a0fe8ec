"""The checkpoint folder of a run: its layout on disk, retention, and the lock against a second run.

    checkpoints/latest                          name of the newest complete checkpoint
    checkpoints/best                            name of the one with the lowest validation loss
    checkpoints/step-00000100/manifest.json     all other files with size and checksums; written last
                             /state.json        step, counters, the contract of the recipe
                             /index.json        where each chunk of each tensor is stored
                             /rank-00000.safetensors
    run.lock                                    locked by the run that writes here

A checkpoint is renamed to its final name when all its files are on the disk; until then its name starts with a dot.
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

from meshwright.engine.checkpoint.files import DamagedError, read_checksummed, write_checksummed
from meshwright.engine.fsync import sync_folder
from meshwright.engine.metrics.jsonl import warn
from meshwright.errors import InputError

CHECKPOINTS = "checkpoints"
LATEST, BEST = "latest", "best"
LOCK = "run.lock"
TINY_WEIGHTS = "start"  # in the run folder: the random weights that --tiny fine-tunes from
MANIFEST, STATE, INDEX = "manifest.json", "state.json", "index.json"
STEP = re.compile(r"step-(\d{8,})")
UNFINISHED = (".saving-", ".removing-")


def rank_file(rank: int) -> str:
    """Return the file name of one rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


class Folder:
    """The checkpoints of one run."""

    def __init__(self, run: Path) -> None:
        self.path = run / CHECKPOINTS

    def step_path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.path / f"step-{step:08d}"

    def staging_path(self, step: int) -> Path:
        """Return the folder in which a step's checkpoint is written before it is published."""
        return self.path / f".saving-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, valid or not, in order."""
        if not self.path.is_dir():
            return []
        found = (STEP.fullmatch(one.name) for one in self.path.iterdir() if one.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """Return the step that `latest` points to; None if the file does not exist."""
        return self._pointed(LATEST)

    def best(self) -> int | None:
        """Return the step that `best` points to; None if the file does not exist."""
        return self._pointed(BEST)

    def mark_best(self, step: int) -> None:
        """Make `best` point to a step's checkpoint."""
        write_checksummed(self.path / BEST, self.step_path(step).name.encode())

    def _pointed(self, name: str) -> int | None:
        pointer = self.path / name
        if not pointer.exists():
            return None
        named = STEP.fullmatch(read_checksummed(pointer).decode(errors="replace"))
        if named is None:
            raise DamagedError(f"{pointer} does not contain the name of a checkpoint")
        return int(named[1])

    def publish(self, step: int) -> Path:
        """Rename a complete checkpoint to its final name, then update `latest`."""
        saved, final = self.staging_path(step), self.step_path(step)
        sync_folder(saved)
        if final.exists():
            self._remove(final)
        saved.rename(final)
        sync_folder(self.path)
        write_checksummed(self.path / LATEST, final.name.encode())
        return final

    def prune(self, keep: int, milestone_every: int) -> None:
        """Remove all but the newest `keep` checkpoints, the milestones and the best one."""
        steps = self.steps()
        with suppress(DamagedError):  # a damaged pointer protects nothing; the next best one replaces it
            steps = [step for step in steps[:-keep] if step != self.best()] + steps[-keep:]
        for step in steps[:-keep]:
            if not (milestone_every and step % milestone_every == 0):
                self._remove(self.step_path(step))

    def quarantine(self, step: int) -> Path:
        """Rename a damaged checkpoint so that it is neither used nor counted; return its new path."""
        number, path = 0, self.path / f"damaged-{step:08d}"
        while path.exists():
            number += 1
            path = self.path / f"damaged-{step:08d}-{number}"
        self.step_path(step).rename(path)
        return path

    def clean(self) -> None:
        """Remove what interrupted saves and removals left behind."""
        for one in self.path.iterdir() if self.path.is_dir() else ():
            if one.name.startswith(UNFINISHED):
                shutil.rmtree(one, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Remove the files of a failed save."""
        shutil.rmtree(self.staging_path(step), ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint; renames it first, so that an interrupted removal leaves no partial checkpoint."""
        hidden = path.with_name(f".removing-{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


class LockOwner(msgspec.Struct, frozen=True):
    """The process that writes to a run folder."""

    pid: int
    host: str


class Lock:
    """Locks a run folder against a second run; the operating system releases it when the owner dies."""

    def __init__(self, run: Path) -> None:
        self.path = run / LOCK
        self._made = [one for one in (run, *run.parents) if not one.exists()]
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            reason = "is a file, not a folder" if run.is_file() else f"cannot be written: {error.strerror}"
            raise InputError(reason, field="--out", value=str(run), fix=("--out another folder",)) from None
        before = self._owner()
        if not self._take(before):
            os.close(self._file)
            raise InputError(
                f"another run is writing to this folder{_named(before)}",
                field="--out",
                value=str(run),
                fix=("another --out", "wait for that run, or stop it"),
            )
        if before is not None:
            warn(f"the last run in {run}{_named(before)} did not shut down cleanly; taking over its lock")
        self._write(msgspec.json.encode(LockOwner(os.getpid(), socket.gethostname())))

    def release(self) -> None:
        """Release the lock; a folder that it made goes with it if nothing was trained, as with refused data."""
        if self._file < 0:
            return
        self._write(b"")
        self._remove_unused()
        os.close(self._file)
        self._file = -1

    def _remove_unused(self) -> None:
        run = self.path.parent
        if not self._made or {one.name for one in run.iterdir()} - {LOCK, TINY_WEIGHTS}:
            return
        with suppress(OSError):
            shutil.rmtree(run)
            for folder in self._made[1:]:
                folder.rmdir()

    def _take(self, before: LockOwner | None) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            # A file system without locks: the owner recorded in the file decides.
            return before is None or (before.host == socket.gethostname() and not _alive(before.pid))
        return True

    def _owner(self) -> LockOwner | None:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(os.pread(self._file, 4096, 0), type=LockOwner)
        return None

    def _write(self, text: bytes) -> None:
        with suppress(OSError):  # a full disk must not stop the run
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)


def _named(owner: LockOwner | None) -> str:
    return f" (process {owner.pid} on {owner.host})" if owner else ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

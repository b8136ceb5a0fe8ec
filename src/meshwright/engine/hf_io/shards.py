"""Writing safetensors files piece by piece: the header first, then every tensor at its place, in any order.

A file has a name of its own until it is whole and on the disk; only then does it get the name that readers look for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.fsync import sync_file, sync_folder
from meshwright.engine.safetensors_header import header
from meshwright.errors import OutputError

GIB = 1 << 30


@dataclass(frozen=True)
class Entry:
    """A tensor of a file that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def cut_into_files(entries: Iterable[Entry], limit: float) -> list[list[Entry]]:
    """Entries in their order, in files of no more bytes than the limit; a larger tensor has a file to itself."""
    files: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not files or (size + entry.nbytes > limit and size > 0):
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def file_names(count: int, stem: str = "model") -> list[str]:
    """The names of so many files, as the hub spells them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


@dataclass
class Plan:
    """All files of a folder and what is in each; the same on every rank."""

    files: list[tuple[str, list[Entry]]]
    writer: dict[str, int] = field(default_factory=dict)  # file -> pipeline rank; empty where one process writes all

    @property
    def bytes(self) -> int:
        return sum(entry.nbytes for _, entries in self.files for entry in entries)

    @property
    def where(self) -> dict[str, str]:
        return {entry.name: file for file, entries in self.files for entry in entries}


class File:
    """A safetensors file in the making. Several processes may write their tensors, one after the other."""

    def __init__(self, path: Path, entries: Sequence[Entry], create: bool = True) -> None:
        self.path, self.unfinished = path, path.with_name(f".{path.name}.unfinished")
        # Wider formats first: readers map tensors into memory and need them aligned.
        ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        first, self._offsets = _header(ordered)
        self.size = len(first) + sum(entry.nbytes for entry in ordered)
        self._descriptor = -1
        try:
            self._descriptor = os.open(self.unfinished, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0), 0o644)
            if create:
                _reserve(self._descriptor, self.size)
                self._write(first, 0)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from None

    def put(self, name: str, first_byte: int, tensor: torch.Tensor) -> None:
        """Writes the bytes of a tensor, or of some rows of it, that begin so far into it."""
        raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            self._write(memoryview(raw), self._offsets[name] + first_byte)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from None

    def close(self) -> None:
        """Puts what was written onto the disk; the file keeps its unfinished name."""
        if self._descriptor >= 0:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self.abandon()
                raise self._failed(error) from None
            os.close(self._descriptor)
            self._descriptor = -1

    def finish(self) -> None:
        """Puts the file onto the disk and gives it its name."""
        self.close()
        try:
            os.replace(self.unfinished, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._failed(error) from None

    def abandon(self) -> None:
        """Removes what there is of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with suppress(OSError):
            self.unfinished.unlink()

    def _write(self, data: bytes | memoryview, at: int) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._descriptor, left[: 1 << 30], at)
            left, at = left[written:], at + written

    def _failed(self, error: OSError) -> OutputError:
        return failed_to_write(self.path, self.size, error)


def failed_to_write(path: Path, size: int, error: OSError) -> OutputError:
    """The error of a file that could not be written."""
    return OutputError(
        f"{path} needs {size:,} bytes ({size / GIB:.2f} GiB) and could not be written: {error.strerror or error}",
        field="folder",
        value=str(path.parent),
        fix=("free space on this disk", "name a folder on another disk"),
    )


def require_space(folder: Path, size: int) -> None:
    """Refuses to begin where the disk has less room than all files need together."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OutputError(
            f"{folder} needs {size:,} bytes ({size / GIB:.2f} GiB), and its disk has {free:,} left",
            field="folder",
            value=str(folder),
            fix=("free space on this disk", "name a folder on another disk"),
        )


def make_folder(folder: Path, size: int = 0) -> None:
    """Makes a folder that is to hold so many bytes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise failed_to_write(folder / "config.json", size, error) from None


def write_index(path: Path, plan: Plan) -> None:
    """Writes which file holds which tensor, where there are several."""
    if len(plan.files) > 1:
        index = {"metadata": {"total_size": plan.bytes}, "weight_map": dict(sorted(plan.where.items()))}
        write_text(path, json.dumps(index, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a small file; under its name there is never half of it."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            sync_file(file)
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise failed_to_write(path, len(text), error) from None


def _header(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int]]:
    return header(((entry.name, entry.dtype, entry.shape) for entry in entries), {"format": "pt"})


def _reserve(descriptor: int, size: int) -> None:
    """Takes the room on the disk at once, so that a full disk is known before the work."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:  # no such call on this system
        os.truncate(descriptor, size)

"""Writes safetensors files in chunks: the header first, then tensors at their offsets, in any order.

A file has a temporary name until it is complete and synced to disk.
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
    """A tensor to be written to a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def split_into_files(entries: Iterable[Entry], limit: float) -> list[list[Entry]]:
    """Split entries, in order, into files of at most `limit` bytes; a larger tensor gets its own file."""
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
    """Return the names of `count` files in hub format."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


@dataclass
class ShardPlan:
    """All files of a folder and their tensors; the same on every rank."""

    files: list[tuple[str, list[Entry]]]
    writer: dict[str, int] = field(default_factory=dict)  # file -> pipeline rank; empty if one process writes all

    @property
    def bytes(self) -> int:
        return sum(entry.nbytes for _, entries in self.files for entry in entries)

    @property
    def file_of(self) -> dict[str, str]:
        return {entry.name: file for file, entries in self.files for entry in entries}


class SafetensorsWriter:
    """Writes one safetensors file. Several processes may write their tensors in turn."""

    def __init__(self, path: Path, entries: Sequence[Entry], create: bool = True) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.unfinished")
        # Wider dtypes first: readers memory-map tensors and need them aligned.
        ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        first, self._offsets = _header(ordered)
        self.size = len(first) + sum(entry.nbytes for entry in ordered)
        self._descriptor = -1
        try:
            self._descriptor = os.open(self.partial, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0), 0o644)
            if create:
                _reserve(self._descriptor, self.size)
                self._write(first, 0)
        except OSError as error:
            self.abandon()
            raise self._write_error(error) from None

    def put(self, name: str, first_byte: int, tensor: torch.Tensor) -> None:
        """Write a tensor, or some rows of it, at a byte offset within the tensor."""
        raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            self._write(memoryview(raw), self._offsets[name] + first_byte)
        except OSError as error:
            self.abandon()
            raise self._write_error(error) from None

    def close(self) -> None:
        """Sync the file to disk; it keeps its temporary name."""
        if self._descriptor >= 0:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self.abandon()
                raise self._write_error(error) from None
            os.close(self._descriptor)
            self._descriptor = -1

    def finish(self) -> None:
        """Sync the file to disk and rename it to its final name."""
        self.close()
        try:
            os.replace(self.partial, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._write_error(error) from None

    def abandon(self) -> None:
        """Remove the partial file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with suppress(OSError):
            self.partial.unlink()

    def _write(self, data: bytes | memoryview, at: int) -> None:
        remaining = memoryview(data)
        while remaining:
            written = os.pwrite(self._descriptor, remaining[: 1 << 30], at)
            remaining, at = remaining[written:], at + written

    def _write_error(self, error: OSError) -> OutputError:
        return write_error(self.path, self.size, error)


def write_error(path: Path, size: int, error: OSError) -> OutputError:
    """Return the error for a file that could not be written."""
    return OutputError(
        f"{path} needs {size:,} bytes ({size / GIB:.2f} GiB) and could not be written: {error.strerror or error}",
        field="folder",
        value=str(path.parent),
        fix=("free space on this disk", "use a folder on another disk"),
    )


def require_space(folder: Path, size: int) -> None:
    """Raise if the disk has less free space than all files need."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OutputError(
            f"{folder} needs {size:,} bytes ({size / GIB:.2f} GiB), but its disk has {free:,} free",
            field="folder",
            value=str(folder),
            fix=("free space on this disk", "use a folder on another disk"),
        )


def make_folder(folder: Path, size: int = 0) -> None:
    """Create an output folder; `size` is used in the error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder / "config.json", size, error) from None


def write_index(path: Path, plan: ShardPlan) -> None:
    """Write the index of tensors to files if there are several files."""
    if len(plan.files) > 1:
        index = {"metadata": {"total_size": plan.bytes}, "weight_map": dict(sorted(plan.file_of.items()))}
        write_text(path, json.dumps(index, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically."""
    partial = path.with_name(f".{path.name}.unfinished")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            sync_file(file)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise write_error(path, len(text), error) from None


def _header(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int]]:
    return header(((entry.name, entry.dtype, entry.shape) for entry in entries), {"format": "pt"})


def _reserve(descriptor: int, size: int) -> None:
    """Reserve disk space up front, so that a full disk fails before the work."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:  # no such call on this system
        os.truncate(descriptor, size)

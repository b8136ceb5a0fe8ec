"""Unpickles checkpoints without executing what they name: every class outside a short list becomes an inert object."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.faults import RunError

STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Inert:
    """An object of a class that is not read: it accepts any construction and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...

    def append(self, _: Any) -> None:
        """Accept an item of a list-like class."""

    def extend(self, _: Any) -> None:
        """Accept the items of a list-like class."""


class Arguments:
    """The values of an argparse.Namespace, as attributes."""


@dataclass(frozen=True)
class Storage:
    """The bytes of a tensor in a file, read when they are needed."""

    read: Callable[[], bytes]
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a pickled file, whose data is still in the file."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def load(self) -> torch.Tensor:
        """Return the tensor."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.storage.dtype)
        flat = torch.frombuffer(bytearray(self.storage.read()), dtype=self.storage.dtype)
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        if min(self.offset, *self.stride, 0) < 0 or last >= flat.numel():
            raise RunError("a tensor of the checkpoint lies outside its file")
        return flat.as_strided(self.shape, self.stride, self.offset).clone()


def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> Any:
    if not isinstance(storage, Storage):
        return Inert()
    return StoredTensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _parameter(data: Any, *_: Any) -> Any:
    return data


ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): Arguments,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): tuple,
}


class InertUnpickler(pickle.Unpickler):
    """An unpickler that builds only allowed classes, and inert objects in place of all others."""

    def __init__(
        self, data: bytes, allowed: dict[tuple[str, str], Any] = ALLOWED, storage: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.allowed, self.storage = allowed, storage

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, a dtype, or the inert class."""
        if (module, name) in self.allowed:
            return self.allowed[module, name]
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return Inert

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that a tensor of a torch file refers to."""
        return self.storage(pid) if self.storage is not None else Inert()


def unpickled(data: bytes, where: Path, **settings: Any) -> Any:
    """Return the contents of a pickle; a damaged one raises RunError."""
    try:
        return InertUnpickler(data, **settings).load()
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise RunError(f"{where} cannot be read: {error}", fix=("copy the checkpoint again",)) from None


def read_torch_file(path: Path) -> Any:
    """Return the contents of a file of torch.save, with tensors that are still in the file."""
    try:
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
        pickled = next(name for name in names if name.endswith("/data.pkl"))
    except (OSError, zipfile.BadZipFile, StopIteration):
        raise RunError(
            f"{path} is not a file of torch.save since torch 1.6", fix=("save the checkpoint again with a newer torch",)
        ) from None
    folder = pickled.removesuffix("data.pkl")

    def storage(pid: Any) -> Any:
        _, dtype, key, *_ = pid
        if not isinstance(dtype, torch.dtype):
            return Inert()
        return Storage(lambda: archive.read(f"{folder}data/{key}"), dtype)

    return unpickled(archive.read(pickled), path, storage=storage)

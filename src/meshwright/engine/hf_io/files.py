"""The safetensors files of a folder: which holds a tensor, its shape, and parts of it. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.find import FIELD, INDEX, PICKLED, WEIGHTS, read_json
from meshwright.engine.safetensors_header import FLOATS
from meshwright.errors import InputError

AGAIN = ("download the file again",)


class Files:
    """The tensors in a folder's safetensors files; files are opened when a tensor of theirs is first asked for."""

    def __init__(self, folder: Path, single: str = WEIGHTS, index: str = INDEX) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._opened: dict[str, Any] = {}
        self._slices: dict[str, Any] = {}
        self.where = self._named_by_index(folder / index) if (folder / index).is_file() else self._in_one(single)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it lies in its file."""
        return tuple(self._slice(name).get_shape())

    def require_floats(self, name: str) -> None:
        """Refuses a tensor of integers or of fewer bits: it would need scales beside it."""
        kind = self._slice(name).get_dtype()
        if kind not in FLOATS:
            raise InputError(
                f"{name} in {self.folder / self.where[name]} is stored as {kind}: quantized weights are not read",
                field=FIELD,
                fix=("start from a folder with bf16, fp16 or fp32 weights",),
            )

    def read(self, name: str, box: Sequence[slice] = ()) -> torch.Tensor:
        """A part of a tensor: one slice for each dimension; the whole tensor without."""
        try:
            found = self._slice(name)[tuple(box)] if box else self._file(self.where[name]).get_tensor(name)
        except (OSError, RuntimeError) as error:
            raise self._broken(self.where[name], error) from None
        self.bytes_read += found.nbytes
        tensor: torch.Tensor = found
        return tensor

    def open_all(self) -> None:
        """Opens every file, which finds those that are damaged or cut short."""
        for file in sorted(set(self.where.values())):
            self._file(file)

    def close(self) -> None:
        """Lets go of all files."""
        self._slices.clear()
        self._opened.clear()

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            file = self.where[name]
            try:
                self._slices[name] = self._file(file).get_slice(name)
            except Exception as error:  # the library has one kind of error for all: an index that names a wrong file
                raise InputError(
                    f"{self.folder / file} does not hold {name}, and the index says it does: {error}",
                    field=FIELD,
                    fix=("download the folder again",),
                ) from None
        return self._slices[name]

    def _file(self, file: str) -> Any:
        if file not in self._opened:
            from safetensors import SafetensorError, safe_open

            try:
                self._opened[file] = safe_open(str(self.folder / file), framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise self._broken(file, error) from None
        return self._opened[file]

    def _broken(self, file: str, error: Exception) -> InputError:
        return InputError(f"{self.folder / file} is damaged or cut short: {error}", field=FIELD, fix=AGAIN)

    def _named_by_index(self, path: Path) -> dict[str, str]:
        where = read_json(path).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise InputError(f"{path} has no weight_map from tensors to files", field=FIELD, fix=AGAIN)
        for file in sorted(set(where.values())):
            if Path(file).name != file or file in ("", ".", ".."):
                raise InputError(
                    f"{path} names the file {file!r}, which lies outside its folder",
                    field=FIELD,
                    fix=("do not use this folder: an index names only files beside it",),
                )
            if not file.endswith(".safetensors"):
                raise InputError(f"{path} names {file!r}, which is no safetensors file", field=FIELD, fix=_CONVERT)
            if not (path.parent / file).is_file():
                raise InputError(
                    f"{path.parent / file} is missing, and {path.name} names it",
                    field=FIELD,
                    fix=("download the folder again: a file of it is missing",),
                )
        return where

    def _in_one(self, single: str) -> dict[str, str]:
        if (self.folder / single).is_file():
            return dict.fromkeys(self._file(single).keys(), single)
        pickled = sorted(file.name for pattern in PICKLED for file in self.folder.glob(pattern))
        if pickled:
            raise InputError(
                f"{self.folder} holds its weights in {pickled[0]} only, a file whose reading can run code: it is never "
                "opened",
                field=FIELD,
                fix=_CONVERT,
            )
        others = sorted(file.name for file in self.folder.glob("*.safetensors"))
        found = f"; it has {', '.join(others[:3])} without an index" if others else ""
        raise InputError(
            f"{self.folder} has neither {single} nor {INDEX}{found}",
            field=FIELD,
            fix=("download the whole folder", f"rename the one file that holds all weights to {single}"),
        )


_CONVERT = ("convert the folder to safetensors, for example with the hub's safetensors/convert space",)

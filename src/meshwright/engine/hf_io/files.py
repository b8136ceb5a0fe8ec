"""Reads tensors and slices from the safetensors files of a folder. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.find import FIELD, INDEX, PICKLED, WEIGHTS, read_json
from meshwright.engine.safetensors_header import FLOATS
from meshwright.errors import InputError

DOWNLOAD_AGAIN = ("download the file again",)


class SafetensorsFolder:
    """The tensors in a folder's safetensors files, which are opened on first use."""

    slice_bytes = 1 << 26  # to read at once: bounds the memory besides the weights

    def __init__(self, folder: Path, single: str = WEIGHTS, index: str = INDEX) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._opened: dict[str, Any] = {}
        self._slices: dict[str, Any] = {}
        self.stored_in = self._read_index(folder / index) if (folder / index).is_file() else self._single_file(single)
        self.file_of: dict[str, str] = self.stored_in  # by name in the model's files; see QuantizedFolder

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in its file."""
        return tuple(self._slice(name).get_shape())

    def require_floats(self, name: str) -> None:
        """Raise if a tensor is not floating point: integers and low-bit formats would need scales."""
        dtype = self._slice(name).get_dtype()
        if dtype not in FLOATS:
            raise InputError(
                f"{name} in {self.folder / self.stored_in[name]} is {dtype}: quantized weights are not supported",
                field=FIELD,
                fix=("start from a folder with bf16, fp16 or fp32 weights",),
            )

    def read(self, name: str, box: Sequence[slice] = ()) -> torch.Tensor:
        """Read a tensor, or the part of it given by one slice per dimension."""
        try:
            found = self._slice(name)[tuple(box)] if box else self._file(self.stored_in[name]).get_tensor(name)
        except (OSError, RuntimeError) as error:
            raise self._corrupt(self.stored_in[name], error) from None
        self.bytes_read += found.nbytes
        tensor: torch.Tensor = found
        return tensor

    def open_all(self) -> None:
        """Open every file, to find corrupt or truncated ones."""
        for file in sorted(set(self.stored_in.values())):
            self._file(file)

    def close(self) -> None:
        """Close all files."""
        self._slices.clear()
        self._opened.clear()

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            file = self.stored_in[name]
            try:
                self._slices[name] = self._file(file).get_slice(name)
            except Exception as error:  # safetensors has one error type: here the index names the wrong file
                raise InputError(
                    f"{self.folder / file} does not contain {name}, although the index says so: {error}",
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
                raise self._corrupt(file, error) from None
        return self._opened[file]

    def _corrupt(self, file: str, error: Exception) -> InputError:
        return InputError(f"{self.folder / file} is corrupt or truncated: {error}", field=FIELD, fix=DOWNLOAD_AGAIN)

    def _read_index(self, path: Path) -> dict[str, str]:
        file_of = read_json(path).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise InputError(f"{path} has no weight_map from tensors to files", field=FIELD, fix=DOWNLOAD_AGAIN)
        for file in sorted(set(file_of.values())):
            if Path(file).name != file or file in ("", ".", ".."):
                raise InputError(
                    f"{path} references the file {file!r}, which is outside its folder",
                    field=FIELD,
                    fix=("do not use this folder: an index references only files in its own folder",),
                )
            if not file.endswith(".safetensors"):
                raise InputError(
                    f"{path} references {file!r}, which is not a safetensors file", field=FIELD, fix=CONVERT_FIX
                )
            if not (path.parent / file).is_file():
                raise InputError(
                    f"{path.parent / file} is missing, but {path.name} references it",
                    field=FIELD,
                    fix=("download the folder again: the file is missing",),
                )
        return file_of

    def _single_file(self, single: str) -> dict[str, str]:
        if (self.folder / single).is_file():
            return dict.fromkeys(self._file(single).keys(), single)
        pickled = sorted(file.name for pattern in PICKLED for file in self.folder.glob(pattern))
        if pickled:
            raise InputError(
                f"{self.folder} has weights only as {pickled[0]}; pickle files can run code and are never opened",
                field=FIELD,
                fix=CONVERT_FIX,
            )
        others = sorted(file.name for file in self.folder.glob("*.safetensors"))
        found = f"; it has {', '.join(others[:3])} without an index" if others else ""
        raise InputError(
            f"{self.folder} has neither {single} nor {INDEX}{found}",
            field=FIELD,
            fix=("download the whole folder", f"rename the file with all weights to {single}"),
        )


CONVERT_FIX = ("convert the folder to safetensors, for example with the hub's safetensors/convert space",)

"""Megatron's torch_dist format: torch.distributed.checkpoint files, whose index is a pickle."""

from __future__ import annotations

import io
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.faults import RunError
from meshwright.engine.megatron_io.inert_pickle import ALLOWED, Arguments, read_torch_file, unpickled

METADATA, COMMON = ".metadata", "common.pt"


class _Record:
    """A record of the index: its fields become attributes."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        fields = state[1] if isinstance(state, tuple) else state
        self.__dict__.update(fields if isinstance(fields, dict) else {})


class _Index(_Record):
    """The place of a chunk: name and offset; it is a key of the index."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


_CLASSES = {
    **ALLOWED,
    **{
        ("torch.distributed.checkpoint.metadata", name): _Record
        for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata")
    },
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
}


@dataclass(frozen=True)
class _Chunk:
    """A rectangular chunk of a tensor and where it is stored."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    first: int
    length: int


class TorchDist:
    """The tensors of a torch_dist checkpoint by name, and the run's arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = unpickled((folder / METADATA).read_bytes(), folder / METADATA, allowed=_CLASSES)
        if not all(isinstance(getattr(index, name, None), dict) for name in ("storage_data", "state_dict_metadata")):
            raise RunError(f"{folder / METADATA} is not the index of a checkpoint", fix=("copy the checkpoint again",))
        common = read_torch_file(folder / COMMON) if (folder / COMMON).is_file() else {}
        self.args = common.get("args", Arguments()) if isinstance(common, dict) else Arguments()
        places: dict[tuple[str, tuple[int, ...]], Any] = {}
        for key, place in index.storage_data.items():
            if getattr(key, "offset", None) is not None:
                places[key.fqn, tuple(key.offset)] = place
        self._tensors = {
            name: (tuple(tensor.size), [self._chunk(name, chunk, places) for chunk in tensor.chunks])
            for name, tensor in index.state_dict_metadata.items()
            if hasattr(tensor, "chunks") and not name.startswith("optimizer")
        }

    def _chunk(self, name: str, chunk: Any, places: dict[Any, Any]) -> _Chunk:
        place = places.get((name, tuple(chunk.offsets)))
        if place is None or getattr(place, "transform_descriptors", None):
            problem = "has no place in the index" if place is None else "is compressed, which is not supported"
            raise RunError(f"{self.folder}: a chunk of {name} {problem}")
        file = str(place.relative_path)
        if Path(file).name != file:  # it could point outside the folder
            raise RunError(f"{self.folder}: {name} is in {file!r}, outside the checkpoint")
        return _Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, int(place.offset), int(place.length))

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensors[name][0]

    def read(self, name: str, *index: int) -> torch.Tensor:
        """Return a tensor, or its part at leading indices: the layer and the expert of a stacked one."""
        shape, chunks = self._tensors[name]
        lead, rest = len(index), shape[len(index) :]
        found: torch.Tensor | None = None
        filled = 0
        for chunk in chunks:
            inside = [i - o for i, o in zip(index, chunk.offset, strict=False)]
            if not all(0 <= i < size for i, size in zip(inside, chunk.shape, strict=False)):
                continue
            value = self._load(chunk, name)[tuple(inside)]
            found = torch.empty(rest, dtype=value.dtype) if found is None else found
            where = tuple(slice(o, o + n) for o, n in zip(chunk.offset[lead:], chunk.shape[lead:], strict=True))
            found[where] = value
            filled += value.numel()
        if found is None or filled != prod(rest):
            raise RunError(f"{self.folder} contains only a part of {name}", fix=("copy the checkpoint again",))
        return found

    def _load(self, chunk: _Chunk, name: str) -> torch.Tensor:
        with (self.folder / chunk.file).open("rb") as file:
            file.seek(chunk.first)
            data = file.read(chunk.length)
        try:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError and others for damaged data
            raise RunError(f"{self.folder / chunk.file}: {name} cannot be read: {type(error).__name__}") from None
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != chunk.shape:
            raise RunError(f"{self.folder / chunk.file}: {name} has another shape than the index says")
        return value.detach()

"""The metadata of a checkpoint: the index of all tensor chunks, and the state that is not tensors.

Plain JSON and safetensors: reading a checkpoint executes no code from it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright import json_text
from meshwright.engine.checkpoint.files import DamagedError, Manifest, read_checksummed
from meshwright.engine.checkpoint.folder import INDEX, MANIFEST, STATE, rank_file
from meshwright.engine.checkpoint.shards import Shard
from meshwright.engine.data.fingerprint import Fingerprint
from meshwright.engine.evaluation import ValidationState
from meshwright.engine.safetensors_header import FORMATS, header

T = TypeVar("T")
FILE_NAME = re.compile(r"[A-Za-z0-9_]+(-\d+)?\.(json|safetensors)")


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A rectangular chunk of a tensor and the rank that wrote it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TensorMeta(msgspec.Struct, frozen=True):
    """A tensor of the training state and the chunks it was written in."""

    format: str
    shape: tuple[int, ...]
    pieces: list[Chunk]


class Index(msgspec.Struct, frozen=True):
    """All tensors of a checkpoint by name."""

    tensors: dict[str, TensorMeta]


class State(msgspec.Struct, frozen=True):
    """The training state that is not tensors."""

    step: int  # completed optimizer steps
    samples: int  # consumed samples: the number of the next one
    world: int
    layout: dict[str, Any]  # it was saved in; informational
    contract: dict[str, Any]  # the fields that determine the trained weights
    base: dict[str, Any] | None  # where the frozen base weights of adapters come from
    groups: dict[str, dict[str, float]]  # numeric state of the optimizer's groups
    loss_scale: dict[str, float] | None
    skipped_in_a_row: int
    versions: dict[str, str]
    data: dict[str, Fingerprint] = {}  # of datasets and weights, by name; older versions have none
    recipe: str = ""  # name
    validation: ValidationState = ValidationState()


class ShardMeta(msgspec.Struct, frozen=True, array_like=True):
    """A shard of a rank without its data, as the ranks exchange it."""

    name: str
    format: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    size: int  # bytes


def shard_meta(shard: Shard) -> ShardMeta:
    """Return a shard without its data."""
    tensor = shard.tensor
    size = tensor.numel() * tensor.element_size()
    return ShardMeta(shard.name, FORMATS[tensor.dtype], shard.full_shape, shard.offset, shard.shape, size)


def assign_writers(shards: Sequence[Sequence[ShardMeta]]) -> list[list[int]]:
    """Return which of its shards each rank writes: replicated shards once, by the rank with the least to write."""
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for rank, of_rank in enumerate(shards):
        for number, shard in enumerate(of_rank):
            holders[shard.name, shard.offset, shard.shape].append((rank, number))
    load = [0] * len(shards)
    written: list[list[int]] = [[] for _ in shards]
    for owners in holders.values():
        rank, number = min(owners, key=lambda owner: (load[owner[0]], owner))
        load[rank] += shards[rank][number].size
        written[rank].append(number)
    return written


def build_index(shards: Sequence[Sequence[ShardMeta]], written: Sequence[Sequence[int]]) -> Index:
    """Return the index of all written shards; raise RuntimeError if they do not cover their tensors."""
    tensors: dict[str, TensorMeta] = {}
    for rank, numbers in enumerate(written):
        for shard in (shards[rank][number] for number in numbers):
            tensor = tensors.setdefault(shard.name, TensorMeta(shard.format, shard.full_shape, []))
            if (tensor.format, tensor.shape) != (shard.format, shard.full_shape):
                raise RuntimeError(f"ranks disagree about {shard.name}: {tensor.format} {tensor.shape} and {shard}")
            tensor.pieces.append(Chunk(rank, shard.offset, shard.shape))
    for name, tensor in tensors.items():
        if sum(prod(chunk.shape) for chunk in tensor.pieces) != prod(tensor.shape):
            raise RuntimeError(f"the shards of {name} do not cover its shape {tensor.shape}")
    return Index(tensors)


def chunk_key(name: str, offset: Sequence[int]) -> str:
    """Return the name of a chunk in its safetensors file."""
    return f"{name}@{','.join(map(str, offset))}"


def file_order(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards in file order: wide dtypes first, so that all are aligned."""
    return sorted(shards, key=lambda shard: -shard.tensor.element_size())


def safetensors_header(shards: Sequence[Shard]) -> bytes:
    """Return the header of a safetensors file with these shards."""
    return header((chunk_key(one.name, one.offset), one.tensor.dtype, one.shape) for one in shards)[0]


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; raise DamagedError if it is incomplete."""
    path = folder / MANIFEST
    manifest = _decoded(path, read_checksummed(path), Manifest)
    for name in manifest.files:
        if not FILE_NAME.fullmatch(name):  # such a name could point outside the folder
            raise DamagedError(f"{path} lists an invalid file name: {name!r}")
    missing = {STATE, INDEX} - set(manifest.files)
    if missing:
        raise DamagedError(f"{path} does not list {', '.join(sorted(missing))}")
    return manifest


def read_state(folder: Path) -> State:
    """Read the state of a checkpoint whose files are verified."""
    return _decoded(folder / STATE, (folder / STATE).read_bytes(), State, json_text.decode_exact)


def read_index(folder: Path, manifest: Manifest) -> Index:
    """Read the index of a checkpoint whose files are verified."""
    index = _decoded(folder / INDEX, (folder / INDEX).read_bytes(), Index)
    ranks = {chunk.rank for tensor in index.tensors.values() for chunk in tensor.pieces}
    if missing := [name for name in map(rank_file, sorted(ranks)) if name not in manifest.files]:
        raise DamagedError(f"{folder / INDEX} refers to files that the manifest does not list: {', '.join(missing)}")
    return index


def _decoded(path: Path, text: bytes, type_: type[T], decode: Callable[..., Any] = json_text.decode) -> T:
    try:
        found: T = decode(text, type_)
        return found
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{path} is not valid: {error}") from None

"""What a checkpoint says in words and numbers: where every part of every tensor lies, and the state beside them.

Plain JSON and safetensors: reading a checkpoint runs no code that is in it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright.engine.checkpoint.files import DamagedError, Manifest, read_sealed
from meshwright.engine.checkpoint.folder import INDEX, MANIFEST, STATE, rank_file
from meshwright.engine.checkpoint.parts import Part
from meshwright.engine.safetensors_header import FORMATS, header

Kind = TypeVar("Kind")
FILE_NAME = re.compile(r"[A-Za-z0-9_]+(-\d+)?\.(json|safetensors)")


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor and the rank that wrote it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TensorMeta(msgspec.Struct, frozen=True):
    """A tensor of the training's state: the boxes it was written in."""

    format: str
    shape: tuple[int, ...]
    pieces: list[Chunk]


class Index(msgspec.Struct, frozen=True):
    """All tensors of a checkpoint by name."""

    tensors: dict[str, TensorMeta]


class State(msgspec.Struct, frozen=True):
    """Everything that is no tensor."""

    step: int  # optimizer steps that are behind
    samples: int  # samples that are behind: the next step begins with this number
    world: int
    layout: dict[str, Any]  # that it was written in, for people to read
    contract: dict[str, Any]  # what the recipe says about the training itself
    base: dict[str, Any] | None  # where the frozen weights come from that adapters belong to
    groups: dict[str, dict[str, float]]  # numbers of the optimizer's groups
    loss_scale: dict[str, float] | None
    skipped_in_a_row: int
    versions: dict[str, str]
    recipe: str = ""  # its name


class ShardMeta(msgspec.Struct, frozen=True, array_like=True):
    """A part that a rank holds, as the ranks tell each other."""

    name: str
    format: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    size: int  # bytes


def shard_meta(part: Part) -> ShardMeta:
    """A part without its memory."""
    tensor = part.tensor
    size = tensor.numel() * tensor.element_size()
    return ShardMeta(part.name, FORMATS[tensor.dtype], part.whole, part.offset, part.shape, size)


def divide(held: Sequence[Sequence[ShardMeta]]) -> list[list[int]]:
    """Which of its parts each rank writes: every box once, by that of its holders which has least to write so far."""
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for rank, parts in enumerate(held):
        for number, part in enumerate(parts):
            holders[part.name, part.offset, part.shape].append((rank, number))
    load = [0] * len(held)
    written: list[list[int]] = [[] for _ in held]
    for owners in holders.values():
        rank, number = min(owners, key=lambda owner: (load[owner[0]], owner))
        load[rank] += held[rank][number].size
        written[rank].append(number)
    return written


def index_of(held: Sequence[Sequence[ShardMeta]], written: Sequence[Sequence[int]]) -> Index:
    """Where everything will lie; an error where the boxes of a tensor do not make it up."""
    tensors: dict[str, TensorMeta] = {}
    for rank, numbers in enumerate(written):
        for part in (held[rank][number] for number in numbers):
            whole = tensors.setdefault(part.name, TensorMeta(part.format, part.whole, []))
            if (whole.format, whole.shape) != (part.format, part.whole):
                raise RuntimeError(f"ranks disagree about {part.name}: {whole.format} {whole.shape} and {part}")
            whole.pieces.append(Chunk(rank, part.offset, part.shape))
    for name, whole in tensors.items():
        if sum(prod(piece.shape) for piece in whole.pieces) != prod(whole.shape):
            raise RuntimeError(f"the parts of {name} that ranks hold do not make up {whole.shape}")
    return Index(tensors)


def key(name: str, offset: Sequence[int]) -> str:
    """The name of a box in its file."""
    return f"{name}@{','.join(map(str, offset))}"


def file_order(parts: Sequence[Part]) -> list[Part]:
    """Parts as they lie in a file: wide formats first, so that all are aligned."""
    return sorted(parts, key=lambda part: -part.tensor.element_size())


def safetensors_header(parts: Sequence[Part]) -> bytes:
    """What a safetensors file says before the bytes of its tensors."""
    return header((key(part.name, part.offset), part.tensor.dtype, part.shape) for part in parts)[0]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, when it is whole."""
    path = folder / MANIFEST
    manifest = _decoded(path, read_sealed(path), Manifest)
    for name in manifest.files:
        if not FILE_NAME.fullmatch(name):  # a name that could lead out of the folder
            raise DamagedError(f"{path} names a file that no checkpoint has: {name!r}")
    missing = {STATE, INDEX} - set(manifest.files)
    if missing:
        raise DamagedError(f"{path} does not name {', '.join(sorted(missing))}")
    return manifest


def read_state(folder: Path) -> State:
    """The state of a checkpoint whose files are verified."""
    return _decoded(folder / STATE, (folder / STATE).read_bytes(), State)


def read_index(folder: Path, manifest: Manifest) -> Index:
    """The index of a checkpoint whose files are verified."""
    index = _decoded(folder / INDEX, (folder / INDEX).read_bytes(), Index)
    ranks = {piece.rank for whole in index.tensors.values() for piece in whole.pieces}
    if lost := [name for name in map(rank_file, sorted(ranks)) if name not in manifest.files]:
        raise DamagedError(f"{folder / INDEX} names files that the manifest does not: {', '.join(lost)}")
    return index


def _decoded(path: Path, text: bytes, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{path} is not what a checkpoint has there: {error}") from None

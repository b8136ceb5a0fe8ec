"""Coordinates ranks that write files: work on rank zero, errors on all ranks, pipeline stages in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.shards import Entry, SafetensorsWriter
from meshwright.engine.mesh import Mesh
from meshwright.engine.object_collectives import gathered
from meshwright.errors import MeshwrightError, OutputError

TensorChunks = Iterator[tuple[str, int, torch.Tensor | None]]  # tensor name, byte offset within it, data


def gather_from_stages(mesh: Mesh, local: Any) -> list[Any]:
    """Return the value of each pipeline stage's writing rank, in stage order, on every rank."""
    gathered_values = gathered((mesh.pp.rank, local) if mesh.stage.rank == 0 else None)
    return [
        value for _, value in sorted((one for one in gathered_values if one is not None), key=lambda one: int(one[0]))
    ]


def on_rank_zero(mesh: Mesh, work: Callable[[], object]) -> None:
    """Run `work` on rank zero; raise its error on every rank."""
    failure: MeshwrightError | None = None
    if mesh.world.rank == 0:
        try:
            work()
        except MeshwrightError as error:
            failure = error
    raise_on_all_ranks(failure)


def raise_on_all_ranks(failure: MeshwrightError | None) -> None:
    """Raise the first rank's error on all ranks, so that no rank waits in a collective forever."""
    local = (type(failure), failure.reason, failure.field, failure.value, tuple(failure.fix)) if failure else None
    first = next((one for one in gathered(local) if one is not None), None)
    if first is not None:
        error_type, *rest = first
        raise error_type(*rest)


def write_stages_in_turn(entries: Sequence[Entry], chunks: Callable[[], TensorChunks], path: Path, mesh: Mesh) -> None:
    """Write one file from all stages: each stage adds its tensors after the previous one is done."""
    writes = mesh.stage.rank == 0
    for turn in range(mesh.pp.size):
        failure: OutputError | None = None
        if turn == mesh.pp.rank:
            failure = _write_stage(entries, chunks, path, writes, first=turn == 0, last=turn == mesh.pp.size - 1)
        raise_on_all_ranks(failure)  # also the barrier before the next stage


def _write_stage(
    entries: Sequence[Entry], chunks: Callable[[], TensorChunks], path: Path, writes: bool, first: bool, last: bool
) -> OutputError | None:
    """Add a stage's tensors to the file; keep gathering even if the disk is full, as other ranks take part."""
    file: SafetensorsWriter | None = None
    failure: OutputError | None = None
    try:
        file = SafetensorsWriter(path, entries, create=first) if writes else None
    except OutputError as error:
        failure = error
    for name, first_byte, chunk in chunks():
        if file is None or chunk is None or failure is not None:
            continue
        try:
            file.put(name, first_byte, chunk)
        except OutputError as error:
            failure = error
    if file is not None and failure is None:
        try:
            file.finish() if last else file.close()
        except OutputError as error:
            failure = error
    return failure

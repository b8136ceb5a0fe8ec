"""What ranks do together when they write: one does something for all, all fail alike, stages take turns at one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.shards import Entry, File
from meshwright.engine.mesh import Mesh
from meshwright.engine.object_collectives import gathered
from meshwright.errors import MeshwrightError, OutputError

Emitted = Iterator[tuple[str, int, torch.Tensor | None]]  # a tensor's name, how far into it, its next numbers


def of_stages(mesh: Mesh, mine: Any) -> list[Any]:
    """What the writing rank of each pipeline stage has, in the order of the stages; the same on every rank."""
    told = gathered((mesh.pp.rank, mine) if mesh.stage.rank == 0 else None)
    return [value for _, value in sorted((one for one in told if one is not None), key=lambda one: int(one[0]))]


def on_first(mesh: Mesh, work: Callable[[], object]) -> None:
    """Does something on the first rank; if it fails, it fails on every rank."""
    failure: MeshwrightError | None = None
    if mesh.world.rank == 0:
        try:
            work()
        except MeshwrightError as error:
            failure = error
    raise_everywhere(failure)


def raise_everywhere(failure: MeshwrightError | None) -> None:
    """Raises the first error that a rank has on all ranks, so that none waits for another."""
    mine = (type(failure), failure.reason, failure.field, failure.value, tuple(failure.fix)) if failure else None
    first = next((one for one in gathered(mine) if one is not None), None)
    if first is not None:
        kind, *rest = first
        raise kind(*rest)


def write_in_turns(entries: Sequence[Entry], emitted: Callable[[], Emitted], path: Path, mesh: Mesh) -> None:
    """One file of all stages: each stage adds its tensors when the one before it is done."""
    writes = mesh.stage.rank == 0
    for turn in range(mesh.pp.size):
        failure: OutputError | None = None
        if turn == mesh.pp.rank:
            failure = _take_turn(entries, emitted, path, writes, first=turn == 0, last=turn == mesh.pp.size - 1)
        raise_everywhere(failure)  # also where the next stage waits for this one


def _take_turn(
    entries: Sequence[Entry], emitted: Callable[[], Emitted], path: Path, writes: bool, first: bool, last: bool
) -> OutputError | None:
    """Adds a stage's tensors to the file; gathering goes on to the end even if the disk is full."""
    file: File | None = None
    failure: OutputError | None = None
    try:
        file = File(path, entries, create=first) if writes else None
    except OutputError as error:
        failure = error
    for name, first_byte, part in emitted():
        if file is None or part is None or failure is not None:
            continue
        try:
            file.put(name, first_byte, part)
        except OutputError as error:
            failure = error
    if file is not None and failure is None:
        try:
            file.finish() if last else file.close()
        except OutputError as error:
            failure = error
    return failure

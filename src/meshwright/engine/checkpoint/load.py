"""Finds the newest valid checkpoint and loads it into a trainer of any layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshwright.engine.checkpoint.files import DamagedError, Manifest, verify
from meshwright.engine.checkpoint.folder import Folder, rank_file
from meshwright.engine.checkpoint.metadata import (
    Index,
    State,
    TensorMeta,
    chunk_key,
    read_index,
    read_manifest,
    read_state,
)
from meshwright.engine.checkpoint.shards import Shard, load_group_state, local_shards
from meshwright.engine.faults import RunError
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.object_collectives import gathered, rank, world
from meshwright.engine.safetensors_header import FORMATS

if TYPE_CHECKING:
    from meshwright.engine.trainer import Trainer

MODEL = "model/"  # prefix of weights and buffers
OTHER_RUN = "another --out starts a new run: a checkpoint resumes only with the tensors that it was saved with"


def find_latest_valid(folder: Folder, group: Any = None) -> Path | None:
    """Return the newest checkpoint whose files all match their checksums; None if there are no checkpoints.

    A collective: the ranks verify different files. Damaged checkpoints are reported and renamed. Raise RunError if
    there are checkpoints but none is valid.
    """
    steps = _from_rank_0(lambda: _list_steps(folder), group)
    for step in reversed(steps):
        problems = _problems(folder.step_path(step), group)
        if not problems:
            return folder.step_path(step)
        if rank() == 0:
            for problem in problems:
                warn(f"checkpoint of step {step} is damaged: {problem}")
            warn(f"checkpoint of step {step} is not used; renamed to {folder.quarantine(step)}")
    if steps:
        raise RunError(
            f"none of the {len(steps)} checkpoints in {folder.path} is valid",
            fix=("another --out, to start from scratch", "restore a valid checkpoint"),
        )
    return None


def find_problems(checkpoint: Path, rank: int = 0, world: int = 1) -> list[str]:
    """Verify one rank's share of a checkpoint's files; return the problems found."""
    try:
        manifest = read_manifest(checkpoint)
    except DamagedError as error:
        return [str(error)]
    found = []
    for name in sorted(manifest.files)[rank::world]:
        try:
            verify(checkpoint / name, manifest.files[name])
        except DamagedError as error:
            found.append(str(error))
    return found


def load(trainer: Trainer, checkpoint: Path, shards: list[Shard] | None = None) -> State:
    """Load weights, optimizer and loss scale of a verified checkpoint into a trainer; return the other state."""
    manifest = read_manifest(checkpoint)
    state, index = read_state(checkpoint), read_index(checkpoint, manifest)
    load_tensors(local_shards(trainer) if shards is None else shards, checkpoint, index, manifest)
    try:
        load_group_state(trainer, state.groups)
    except KeyError as unknown:
        reason = f"{checkpoint} has no optimizer state for the parameter group {unknown}"
        raise RunError(reason, fix=(OTHER_RUN,)) from None
    if trainer.scale is not None and state.loss_scale is not None:
        trainer.scale.load_state_dict(state.loss_scale)
    return state


def load_model_only(trainer: Trainer, checkpoint: Path) -> None:
    """Load only the weights of a verified checkpoint into a trainer."""
    manifest = read_manifest(checkpoint)
    shards = [shard for shard in local_shards(trainer) if shard.name.startswith(MODEL)]
    load_tensors(shards, checkpoint, read_index(checkpoint, manifest), manifest)


def full_tensor(checkpoint: Path, index: Index, name: str) -> torch.Tensor:
    """Return a full tensor of a verified checkpoint, assembled from its chunks."""
    meta = index.tensors[name]
    dtype = next(dtype for dtype, format in FORMATS.items() if format == meta.format)
    full = Shard(name, meta.shape, (0,) * len(meta.shape), torch.empty(meta.shape, dtype=dtype))
    load_tensors([full], checkpoint, index, read_manifest(checkpoint))
    return full.tensor


def load_tensors(shards: list[Shard], checkpoint: Path, index: Index, manifest: Manifest) -> None:
    """Fill shards in place with their values in a checkpoint."""
    from safetensors import safe_open

    with ExitStack() as opened:
        files: dict[int, Any] = {}

        def file(rank: int) -> Any:
            if rank not in files:
                path = str(checkpoint / rank_file(rank))
                files[rank] = opened.enter_context(safe_open(path, framework="pt"))
            return files[rank]

        for shard in shards:
            meta = index.tensors.get(shard.name)
            if meta is None:
                raise RunError(f"{checkpoint} has no {shard.name}", fix=(OTHER_RUN,))
            _fill(shard, meta, file, checkpoint)


@torch.no_grad()
def _fill(shard: Shard, meta: TensorMeta, file: Callable[[int], Any], checkpoint: Path) -> None:
    """Copy the overlap of a shard with every chunk of its tensor: the saved layout may shard it differently."""
    if meta.shape != shard.full_shape:
        reason = f"{shard.name} has shape {meta.shape} in {checkpoint}, and {shard.full_shape} in this run"
        raise RunError(reason, fix=(OTHER_RUN,))
    if meta.format != FORMATS[shard.tensor.dtype]:
        warn(f"{shard.name} is {meta.format} in {checkpoint} and is converted to {FORMATS[shard.tensor.dtype]}")
    filled = 0
    for chunk in meta.pieces:
        first = [max(a, b) for a, b in zip(shard.offset, chunk.offset, strict=True)]
        extents = zip(shard.offset, shard.shape, chunk.offset, chunk.shape, strict=True)
        end = [min(a + n, b + m) for a, n, b, m in extents]
        if any(a >= b for a, b in zip(first, end, strict=True)):
            continue
        inside = tuple(slice(a - o, b - o) for a, b, o in zip(first, end, chunk.offset, strict=True))
        target = shard.tensor[tuple(slice(a - o, b - o) for a, b, o in zip(first, end, shard.offset, strict=True))]
        name = chunk_key(shard.name, chunk.offset)
        value = file(chunk.rank).get_slice(name)[inside] if inside else file(chunk.rank).get_tensor(name)
        target.copy_(value)
        filled += target.numel()
    if filled != prod(shard.shape):
        raise RunError(f"{checkpoint} contains only a part of {shard.name}")


def _list_steps(folder: Folder) -> list[int]:
    """Return the steps with a checkpoint; warn if `latest` is damaged or points to a missing one."""
    steps = folder.steps()
    try:
        latest = folder.latest()
    except DamagedError as error:
        warn(f"{error}; searching for the newest valid checkpoint")
        return steps
    if latest is not None and latest not in steps:
        warn(f"the latest checkpoint of {folder.path}, step {latest}, is missing")
    return steps


def _problems(checkpoint: Path, group: Any) -> list[str]:
    found = gathered(find_problems(checkpoint, rank(), world()), group)
    return list(dict.fromkeys(problem for some in found for problem in some))


def _from_rank_0(read: Callable[[], Any], group: Any) -> Any:
    """Return what rank 0 reads: network file systems may show machines different states."""
    return gathered(read() if rank() == 0 else None, group)[0]

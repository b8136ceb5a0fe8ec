"""Finding the newest good checkpoint and putting its state into a training of any layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshwright.engine.checkpoint.contents import Index, State, TensorMeta, key, read_index, read_manifest, read_state
from meshwright.engine.checkpoint.files import DamagedError, Manifest, verify
from meshwright.engine.checkpoint.folder import Folder, rank_file
from meshwright.engine.checkpoint.parts import Part, held_parts, load_group_numbers
from meshwright.engine.faults import RunError
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.object_collectives import gathered, rank, world
from meshwright.engine.safetensors_header import FORMATS

if TYPE_CHECKING:
    from meshwright.engine.trainer import Trainer

MODEL = "model/"  # begins the names of weights and buffers


def newest_good(folder: Folder, group: Any = None) -> Path | None:
    """The newest checkpoint whose every file is what was written; None where there is none at all.

    Every rank calls it: the files are shared out among them. Damaged ones are told and set aside. When no good one is
    left, that is an error.
    """
    steps = _agreed(lambda: _listed(folder), group)
    for step in reversed(steps):
        problems = _problems(folder.of(step), group)
        if not problems:
            return folder.of(step)
        if rank() == 0:
            for problem in problems:
                warn(f"checkpoint of step {step} is damaged: {problem}")
            warn(f"checkpoint of step {step} is not used; it is now {folder.set_aside(step)}")
    if steps:
        raise RunError(
            f"none of the {len(steps)} checkpoints in {folder.path} is good",
            fix=("another --out, to start anew", "put a good checkpoint back"),
        )
    return None


def problems_of(checkpoint: Path, rank: int = 0, world: int = 1) -> list[str]:
    """What is wrong with one rank's share of a checkpoint's files; nothing when they are what was written."""
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


def load(trainer: Trainer, checkpoint: Path, parts: list[Part] | None = None) -> State:
    """Puts a verified checkpoint into a trainer of any layout: weights, optimizer, loss scale; what is no tensor."""
    manifest = read_manifest(checkpoint)
    state, index = read_state(checkpoint), read_index(checkpoint, manifest)
    load_tensors(held_parts(trainer) if parts is None else parts, checkpoint, index, manifest)
    try:
        load_group_numbers(trainer, state.groups)
    except KeyError as unknown:
        raise RunError(f"{checkpoint} has no optimizer state of the parameters of {unknown}") from None
    if trainer.scale is not None and state.loss_scale is not None:
        trainer.scale.load_state_dict(state.loss_scale)
    return state


def load_model_only(trainer: Trainer, checkpoint: Path) -> None:
    """Puts the weights of a verified checkpoint into a trainer, and nothing else."""
    manifest = read_manifest(checkpoint)
    parts = [part for part in held_parts(trainer) if part.name.startswith(MODEL)]
    load_tensors(parts, checkpoint, read_index(checkpoint, manifest), manifest)


def whole_tensor(checkpoint: Path, index: Index, name: str) -> torch.Tensor:
    """One tensor of a verified checkpoint, put together from its parts."""
    whole = index.tensors[name]
    dtype = next(dtype for dtype, format in FORMATS.items() if format == whole.format)
    part = Part(name, whole.shape, (0,) * len(whole.shape), torch.empty(whole.shape, dtype=dtype))
    load_tensors([part], checkpoint, index, read_manifest(checkpoint))
    return part.tensor


def load_tensors(parts: list[Part], checkpoint: Path, index: Index, manifest: Manifest) -> None:
    """Fills parts with what a checkpoint has at their places."""
    from safetensors import safe_open

    with ExitStack() as opened:
        files: dict[int, Any] = {}

        def file(rank: int) -> Any:
            if rank not in files:
                path = str(checkpoint / rank_file(rank))
                files[rank] = opened.enter_context(safe_open(path, framework="pt"))
            return files[rank]

        for part in parts:
            whole = index.tensors.get(part.name)
            if whole is None:
                raise RunError(f"{checkpoint} has no {part.name}")
            _fill(part, whole, file, checkpoint)


@torch.no_grad()
def _fill(part: Part, whole: TensorMeta, file: Callable[[int], Any], checkpoint: Path) -> None:
    if whole.shape != part.whole:
        raise RunError(f"{part.name} has shape {whole.shape} in {checkpoint}, and {part.whole} in this run")
    if whole.format != FORMATS[part.tensor.dtype]:
        warn(f"{part.name} is {whole.format} in {checkpoint} and is converted to {FORMATS[part.tensor.dtype]}")
    filled = 0
    for piece in whole.pieces:
        first = [max(a, b) for a, b in zip(part.offset, piece.offset, strict=True)]
        end = [min(a + n, b + m) for a, n, b, m in zip(part.offset, part.shape, piece.offset, piece.shape, strict=True)]
        if any(a >= b for a, b in zip(first, end, strict=True)):
            continue
        inside = tuple(slice(a - o, b - o) for a, b, o in zip(first, end, piece.offset, strict=True))
        target = part.tensor[tuple(slice(a - o, b - o) for a, b, o in zip(first, end, part.offset, strict=True))]
        name = key(part.name, piece.offset)
        value = file(piece.rank).get_slice(name)[inside] if inside else file(piece.rank).get_tensor(name)
        target.copy_(value)
        filled += target.numel()
    if filled != prod(part.shape):
        raise RunError(f"{checkpoint} has only a part of {part.name}")


def _listed(folder: Folder) -> list[int]:
    """The checkpoints there are; says what is wrong with the pointer, without which they are found as well."""
    steps = folder.steps()
    try:
        latest = folder.latest()
    except DamagedError as error:
        warn(f"{error}; the newest good checkpoint is looked for")
        return steps
    if latest is not None and latest not in steps:
        warn(f"{folder.path} names step {latest} as its latest checkpoint, which is missing")
    return steps


def _problems(checkpoint: Path, group: Any) -> list[str]:
    found = gathered(problems_of(checkpoint, rank(), world()), group)
    return list(dict.fromkeys(problem for some in found for problem in some))


def _agreed(ask: Callable[[], Any], group: Any) -> Any:
    """What rank 0 finds: file systems do not show all machines the same at once."""
    return gathered(ask() if rank() == 0 else None, group)[0]

"""Diffusers folders in and out: config.json and diffusion_pytorch_model.safetensors, one file or several with an index.

Names are diffusers' own, so a folder that is written here is one that `from_pretrained` reads, and the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.diffusion.build import diffusers_model
from meshwright.engine.diffusion.config import CLASS, DenoiserConfig, denoiser_config
from meshwright.engine.diffusion.denoiser import Denoiser
from meshwright.engine.fsync import sync_folder
from meshwright.engine.hf_io.barriers import TensorChunks, on_rank_zero, write_stages_in_turn
from meshwright.engine.hf_io.files import SafetensorsFolder
from meshwright.engine.hf_io.find import CONFIG, FIELD, read_json, transformer_folder
from meshwright.engine.hf_io.gather import ShardedTensors
from meshwright.engine.hf_io.layout_map import Shape, TensorLocation, local_views, locate_tensors
from meshwright.engine.hf_io.shards import (
    Entry,
    ShardPlan,
    file_names,
    make_folder,
    split_into_files,
    write_index,
    write_text,
)
from meshwright.engine.mesh import Mesh
from meshwright.errors import InputError, some

NAME = "diffusion_pytorch_model"
WEIGHTS, INDEX = f"{NAME}.safetensors", f"{NAME}.safetensors.index.json"
FILE_BYTES = 5 * 10**9  # of one file at most
SHOWN = 3


def model_shapes(config: DenoiserConfig) -> dict[str, Shape]:
    """The tensors of a model, by their names in diffusers."""
    with torch.device("meta"):
        model = diffusers_model(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: Denoiser, folder: Path) -> None:
    """Fills what this rank holds of a model from a diffusers folder, of the transformer or of a whole pipeline."""
    folder = transformer_folder(folder)
    _refuse_other_config(folder, model.config)
    files = SafetensorsFolder(folder, WEIGHTS, INDEX)
    shapes = model_shapes(model.config)
    _refuse_other_tensors(files, shapes, folder)
    stored = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    where = locate_tensors(stored, shapes, {})
    for name, parameter in model.named_parameters():
        for view, box in local_views(parameter, where[name]):
            view.copy_(files.read(where[name].name, box))
    files.close()


def _refuse_other_config(folder: Path, config: DenoiserConfig) -> None:
    theirs = denoiser_config(read_json(folder / CONFIG))
    differ = [key for key, value in config.values.items() if _plain(theirs.values.get(key)) != _plain(value)]
    if differ:
        told = ", ".join(f"{key} is {theirs.values.get(key)}, not {config.values[key]}" for key in differ[:SHOWN])
        raise InputError(
            f"the folder holds another model than the recipe: {told}",
            field=FIELD,
            value=str(folder),
            fix=(f"model={folder / CONFIG}",) if CLASS in theirs.values else (),
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _refuse_other_tensors(files: SafetensorsFolder, shapes: Mapping[str, Shape], folder: Path) -> None:
    missing, more = sorted(set(shapes) - set(files.file_of)), sorted(set(files.file_of) - set(shapes))
    for names, what in ((missing, "lacks"), (more, "has, unlike the recipe's model,")):
        if names:
            raise InputError(
                f"the folder {what} {some(names)}",
                field=FIELD,
                value=str(folder),
                fix=("download the whole folder again",),
            )
    for name, shape in shapes.items():
        files.require_floats(name)
        if files.shape(name) != shape:
            raise InputError(f"{name} is {files.shape(name)}, not {shape}", field=FIELD, value=str(folder))


def save_model(
    model: Denoiser, folder: Path, mesh: Mesh, dtype: torch.dtype | None = None, file_bytes: float = FILE_BYTES
) -> None:
    """Writes a diffusers folder; every rank must call it, rank 0 writes. Weights are gathered one tensor at a time."""
    held = ShardedTensors([model], mesh)
    shapes = model_shapes(model.config)
    parts = _parts(model, shapes)
    kind = dtype or next(model.parameters()).dtype
    files = split_into_files((Entry(name, kind, shape) for name, shape in shapes.items()), file_bytes)
    plan = ShardPlan(list(zip(file_names(len(files), NAME), files, strict=True)))
    on_rank_zero(mesh, lambda: make_folder(folder, plan.bytes))

    def emitted(entries: Sequence[Entry]) -> TensorChunks:
        for entry in entries:
            yield entry.name, 0, full_tensor(held, parts[entry.name], kind)

    for file, entries in plan.files:
        write_stages_in_turn(entries, partial(emitted, entries), folder / file, mesh)
    on_rank_zero(mesh, lambda: _finish(folder, plan, model.config))


def _finish(folder: Path, plan: ShardPlan, config: DenoiserConfig) -> None:
    write_index(folder / INDEX, plan)
    write_text(folder / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")
    sync_folder(folder)


def _parts(model: Denoiser, shapes: Mapping[str, Shape]) -> dict[str, list[tuple[TensorLocation, str]]]:
    """The stored tensors of every tensor of the model, in their order in it."""
    where = locate_tensors({name: tuple(p.shape) for name, p in model.named_parameters()}, shapes, {})
    found: dict[str, list[tuple[TensorLocation, str]]] = {}
    for name, place in where.items():
        found.setdefault(place.name, []).append((place, name))
    return {name: sorted(parts, key=lambda part: part[0].start) for name, parts in found.items()}


def full_tensor(
    held: ShardedTensors, parts: list[tuple[TensorLocation, str]], dtype: torch.dtype
) -> torch.Tensor | None:
    """A tensor of the model on the rank that writes; None on the others."""
    gathered = [held.rows(name, 0, held.shapes[name][0], dtype) for _, name in parts]
    mine = [part for part in gathered if part is not None]
    if not mine:
        return None
    return mine[0].contiguous() if len(mine) == 1 else torch.cat(mine, parts[0][0].dim)

"""Loads and saves diffusers folders: config.json and diffusion_pytorch_model.safetensors, one file or several.

Tensor names are those of diffusers, so `from_pretrained` loads folders written here, and vice versa.
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
from meshwright.engine.hf_io.find import FIELD, read_json, transformer_folder
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
from meshwright.hub import CONFIG

NAME = "diffusion_pytorch_model"
WEIGHTS, INDEX = f"{NAME}.safetensors", f"{NAME}.safetensors.index.json"
FILE_BYTES = 5 * 10**9  # maximum per file
MAX_DIFFERENCES_SHOWN = 3


def model_shapes(config: DenoiserConfig) -> dict[str, Shape]:
    """Return the tensor shapes of a model by diffusers name."""
    with torch.device("meta"):
        model = diffusers_model(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: Denoiser, folder: Path) -> None:
    """Load this rank's part of a model from a diffusers folder, of the transformer or of a pipeline."""
    folder = transformer_folder(folder)
    _check_config(folder, model.config)
    files = SafetensorsFolder(folder, WEIGHTS, INDEX)
    shapes = model_shapes(model.config)
    _check_tensors(files, shapes, folder)
    stored = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    locations = locate_tensors(stored, shapes, {})
    for name, parameter in model.named_parameters():
        for view, box in local_views(parameter, locations[name]):
            view.copy_(files.read(locations[name].name, box))
    files.close()


def _check_config(folder: Path, config: DenoiserConfig) -> None:
    theirs = denoiser_config(read_json(folder / CONFIG))
    keys = [key for key, value in config.values.items() if _as_list(theirs.values.get(key)) != _as_list(value)]
    if keys:
        differences = ", ".join(
            f"{key} is {theirs.values.get(key)}, not {config.values[key]}" for key in keys[:MAX_DIFFERENCES_SHOWN]
        )
        raise InputError(
            f"the folder's model differs from the recipe's: {differences}",
            field=FIELD,
            value=str(folder),
            fix=(f"model={folder / CONFIG}",) if CLASS in theirs.values else (),
        )


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check_tensors(files: SafetensorsFolder, shapes: Mapping[str, Shape], folder: Path) -> None:
    missing, unexpected = sorted(set(shapes) - set(files.file_of)), sorted(set(files.file_of) - set(shapes))
    for names, what in ((missing, "lacks"), (unexpected, "has tensors that the recipe's model does not:")):
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
    """Save a diffusers folder; every rank must call it, rank 0 writes. Weights are gathered one tensor at a time."""
    tensors = ShardedTensors([model], mesh)
    shapes = model_shapes(model.config)
    parts = _stored_parts(model, shapes)
    file_dtype = dtype or next(model.parameters()).dtype
    files = split_into_files((Entry(name, file_dtype, shape) for name, shape in shapes.items()), file_bytes)
    plan = ShardPlan(list(zip(file_names(len(files), NAME), files, strict=True)))
    on_rank_zero(mesh, lambda: make_folder(folder, plan.bytes))

    def chunks(entries: Sequence[Entry]) -> TensorChunks:
        for entry in entries:
            yield entry.name, 0, full_tensor(tensors, parts[entry.name], file_dtype)

    for file, entries in plan.files:
        write_stages_in_turn(entries, partial(chunks, entries), folder / file, mesh)
    on_rank_zero(mesh, lambda: _finish(folder, plan, model.config))


def _finish(folder: Path, plan: ShardPlan, config: DenoiserConfig) -> None:
    write_index(folder / INDEX, plan)
    write_text(folder / CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")
    sync_folder(folder)


def _stored_parts(model: Denoiser, shapes: Mapping[str, Shape]) -> dict[str, list[tuple[TensorLocation, str]]]:
    """Return the stored tensors of every model tensor, in order."""
    locations = locate_tensors({name: tuple(p.shape) for name, p in model.named_parameters()}, shapes, {})
    found: dict[str, list[tuple[TensorLocation, str]]] = {}
    for name, location in locations.items():
        found.setdefault(location.name, []).append((location, name))
    return {name: sorted(parts, key=lambda part: part[0].start) for name, parts in found.items()}


def full_tensor(
    tensors: ShardedTensors, parts: list[tuple[TensorLocation, str]], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return a full model tensor on the writing rank; None on the others."""
    gathered = [tensors.rows(name, 0, tensors.shapes[name][0], dtype) for _, name in parts]
    local = [part for part in gathered if part is not None]
    if not local:
        return None
    return local[0].contiguous() if len(local) == 1 else torch.cat(local, parts[0][0].dim)

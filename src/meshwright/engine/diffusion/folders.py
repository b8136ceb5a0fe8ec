"""Diffusers folders in and out: config.json and diffusion_pytorch_model.safetensors, one file or several with an index.

Names are diffusers' own, so a folder that is written here is one that `from_pretrained` reads, and the other way round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.engine.diffusion.build import diffusers_model
from meshwright.engine.diffusion.config import CLASS, DenoiserConfig, denoiser_config
from meshwright.engine.diffusion.denoiser import Denoiser
from meshwright.engine.folders.files import Files
from meshwright.engine.folders.find import CONFIG, FIELD, read_json
from meshwright.engine.folders.gather import Held
from meshwright.engine.folders.places import Place, Shape, pieces, places
from meshwright.engine.mesh import Mesh
from meshwright.errors import InputError

NAME = "diffusion_pytorch_model"
WEIGHTS, INDEX = f"{NAME}.safetensors", f"{NAME}.safetensors.index.json"
INNER = "transformer"  # where a pipeline's folder has its transformer
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
    files = Files(folder, WEIGHTS, INDEX)
    shapes = model_shapes(model.config)
    _refuse_other_tensors(files, shapes, folder)
    stored = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    where = places(stored, shapes, {})
    for name, parameter in model.named_parameters():
        for view, box in pieces(parameter, where[name]):
            view.copy_(files.read(where[name].name, box))
    files.close()


def transformer_folder(folder: Path) -> Path:
    """The folder of the transformer: this one, or the one inside a pipeline's."""
    inner = folder / INNER
    return inner if not (folder / CONFIG).is_file() and (inner / CONFIG).is_file() else folder


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


def _refuse_other_tensors(files: Files, shapes: Mapping[str, Shape], folder: Path) -> None:
    missing, more = sorted(set(shapes) - set(files.where)), sorted(set(files.where) - set(shapes))
    for names, what in ((missing, "lacks"), (more, "has, unlike the recipe's model,")):
        if names:
            rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise InputError(
                f"the folder {what} {', '.join(names[:SHOWN])}{rest}",
                field=FIELD,
                value=str(folder),
                fix=("download the whole folder again",),
            )
    for name, shape in shapes.items():
        files.require_floats(name)
        if files.shape(name) != shape:
            raise InputError(f"{name} is {files.shape(name)}, not {shape}", field=FIELD, value=str(folder))


def save_model(
    model: Denoiser, folder: Path, mesh: Mesh, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> None:
    """Writes a diffusers folder; every rank must call it, rank 0 writes. Weights are gathered one file at a time."""
    held = Held([model], mesh)
    shapes = model_shapes(model.config)
    parts = _parts(model, shapes)
    plan = _files(shapes, _width(model, dtype), file_bytes)
    if held.writes:
        folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for number, names in enumerate(plan, 1):
        file = WEIGHTS if len(plan) == 1 else f"{NAME}-{number:05}-of-{len(plan):05}.safetensors"
        where |= dict.fromkeys(names, file)
        found = {name: _whole(held, parts[name], dtype) for name in names}
        if held.writes:
            _write_tensors(folder / file, {name: whole for name, whole in found.items() if whole is not None})
    if held.writes:
        if len(plan) > 1:
            total = sum(_size(shape) for shape in shapes.values()) * _width(model, dtype)
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(folder / CONFIG, model.config.to_dict())
    if mesh.world.size > 1:
        dist.barrier()


def _parts(model: Denoiser, shapes: Mapping[str, Shape]) -> dict[str, list[tuple[Place, str]]]:
    """The stored tensors of every tensor of the model, in their order in it."""
    where = places({name: tuple(p.shape) for name, p in model.named_parameters()}, shapes, {})
    found: dict[str, list[tuple[Place, str]]] = {}
    for name, place in where.items():
        found.setdefault(place.name, []).append((place, name))
    return {name: sorted(parts, key=lambda part: part[0].start) for name, parts in found.items()}


def _whole(held: Held, parts: list[tuple[Place, str]], dtype: torch.dtype | None) -> torch.Tensor | None:
    """A tensor of the model on the rank that writes; None on the others."""
    gathered = [held.rows(name, 0, held.shapes[name][0], dtype) for _, name in parts]
    mine = [part for part in gathered if part is not None]
    if not mine:
        return None
    return mine[0].contiguous() if len(mine) == 1 else torch.cat(mine, parts[0][0].dim)


def _files(shapes: Mapping[str, Shape], width: int, most: int) -> list[list[str]]:
    """Which tensors go into which file: in order, none larger than allowed unless one tensor is."""
    plan: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = _size(shape) * width
        if plan[-1] and held + size > most:
            plan.append([])
            held = 0
        plan[-1].append(name)
        held += size
    return plan


def _size(shape: Iterable[int]) -> int:
    return int(torch.Size(shape).numel())


def _width(model: Denoiser, dtype: torch.dtype | None) -> int:
    return (dtype or next(model.parameters()).dtype).itemsize


def _write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    unfinished = file.with_name(f".{file.name}.unfinished")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, file)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, file)

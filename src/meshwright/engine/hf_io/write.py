"""A model written as a Hugging Face folder, in the hub's names; a few rows of one tensor at a time.

Every pipeline stage has one rank that writes, so stages write their files at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.fsync import sync_folder
from meshwright.engine.hf_io.barriers import of_stages, on_first, raise_everywhere, write_in_turns
from meshwright.engine.hf_io.find import CONFIG, INDEX
from meshwright.engine.hf_io.gather import LocalTensors, Read, Source
from meshwright.engine.hf_io.layout_map import Shape
from meshwright.engine.hf_io.merge import adapters_in
from meshwright.engine.hf_io.name_map import Described, describe
from meshwright.engine.hf_io.serialize import TensorMeta, all_emitted, emitted, wholes_in
from meshwright.engine.hf_io.shards import (
    GIB,
    File,
    Plan,
    cut_into_files,
    file_names,
    make_folder,
    require_space,
    write_index,
    write_text,
)
from meshwright.engine.hf_io.tokenizer_files import GENERATION, copy_tokenizer, generation, published_config
from meshwright.engine.mesh import Mesh
from meshwright.errors import InputError, MeshwrightError, OutputError


@dataclass(frozen=True)
class Saved:
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int


def save_model(
    stages: Sequence[Any],
    mesh: Mesh,
    config: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_gib: float = 5.0,
    consolidated: bool = False,
    tokenizer: Path | None = None,
    merged: bool = False,
    overwrite: bool = False,
) -> Saved:
    """Writes the model that all ranks hold together; every rank calls it. `merged` puts adapters into the weights."""
    _require_plain(stages)
    described = describe(config, mtp=any(stage.embedding_at_end for stage in stages))
    source = LocalTensors(stages, mesh)
    scale = next((m.lora_scale for stage in stages for m in stage.modules() if hasattr(m, "lora_scale")), None)
    if scale is not None and not merged:
        raise InputError(
            "this model has adapters, which a model folder cannot hold beside the weights",
            field="merged",
            value=False,
            fix=("merged=True puts them into the weights", "save_adapters writes them alone"),
        )
    wholes = wholes_in(source, described, dtype, scale)
    plan = _common_plan(wholes, mesh, _limit(max_shard_gib, consolidated))
    on_first(mesh, lambda: _prepare(folder, plan, overwrite))
    _require_complete(described, plan)
    if consolidated:
        name, entries = plan.files[0]
        write_in_turns(entries, lambda: all_emitted(wholes, source, scale), folder / name, mesh)
    else:
        failure = _write_files(wholes, source, plan, folder, scale, mesh.pp.rank if source.writes else None)
        raise_everywhere(failure)
    on_first(mesh, lambda: _finish(folder, plan, described, dtype, tokenizer))
    return _saved(folder, plan)


def write_folder(
    shapes: Mapping[str, Shape],
    read: Callable[[str], torch.Tensor],
    config: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_gib: float = 5.0,
    consolidated: bool = False,
    tokenizer: Path | None = None,
    adapter_scale: float | None = None,
    overwrite: bool = False,
) -> Saved:
    """Writes stored tensors, whole ones that `read` gives by name, as a model folder; one process, no mesh.

    Names and shapes are those of a stage (or of the model itself). Adapters among them are merged with their scale.
    """
    described = describe(config, mtp=any(name.startswith("mtp.") for name in shapes))
    if adapters_in(shapes) and adapter_scale is None:
        raise InputError("these tensors include adapters, and nothing says their scale", field="adapter_scale")
    source = Read(shapes, read)
    wholes = wholes_in(source, described, dtype, adapter_scale)
    entries = (whole.entry(block) for whole in wholes for block in whole.blocks)
    files = cut_into_files(entries, _limit(max_shard_gib, consolidated))
    plan = Plan(list(zip(file_names(len(files)), files, strict=True)))
    _require_complete(described, plan)
    _prepare(folder, plan, overwrite)
    failure = _write_files(wholes, source, plan, folder, adapter_scale, None, alone=True)
    if failure is not None:
        raise failure
    _finish(folder, plan, described, dtype, tokenizer)
    return _saved(folder, plan)


def _limit(max_shard_gib: float, consolidated: bool) -> float:
    if max_shard_gib <= 0:
        raise InputError("a file holds more than nothing", field="max_shard_gib", value=max_shard_gib, fix=("5",))
    return float("inf") if consolidated else max_shard_gib * GIB


def _require_complete(described: Described, plan: Plan) -> None:
    """Every tensor of the model is in some file: a folder that lacks one is never begun."""
    has = plan.where
    missing = [name for name in described.shapes if any(block.name not in has for block in described.spread(name))]
    if missing:
        raise MeshwrightError(f"nobody holds {', '.join(missing[:3])} ({len(missing)} tensors of the model)")


def _require_plain(stages: Sequence[Any]) -> None:
    if any("megatron_fsdp" in stage.__dict__ for stage in stages):
        raise InputError(
            "a model that Megatron-FSDP shards is not written as a folder",
            field="layout.strategy",
            value="megatron_fsdp",
            fix=("save a checkpoint and convert that", "layout.strategy=fsdp2"),
        )
    names = (name for stage in stages for name, _ in stage.named_parameters())
    if any("_codes" in name.rpartition(".")[2] for name in names):
        raise InputError(
            "the weights that these adapters adapt are held in 4 bits, and a folder of those would be a worse model",
            field="peft.method",
            value="qlora",
            fix=("save_adapters, then merge them into the model's own weights (peft.method=lora)",),
        )


def _common_plan(wholes: Sequence[TensorMeta], mesh: Mesh, limit: float) -> Plan:
    """The files of all pipeline stages, numbered through; each stage's tensors in files of its own."""
    own = [whole.entry(block) for whole in wholes for block in whole.blocks]
    by_stage = dict(enumerate(of_stages(mesh, own)))
    if limit == float("inf"):
        together = [entry for own in by_stage.values() for entry in own]
        return Plan([(file_names(1)[0], together)])
    files = [(rank, file) for rank, own in by_stage.items() for file in cut_into_files(own, limit)]
    names = file_names(len(files))
    plan = Plan([(name, file) for name, (_, file) in zip(names, files, strict=True)])
    plan.writer = {name: rank for name, (rank, _) in zip(names, files, strict=True)}
    return plan


def _write_files(
    wholes: Sequence[TensorMeta],
    source: Source,
    plan: Plan,
    folder: Path,
    scale: float | None,
    pp_rank: int | None,
    alone: bool = False,
) -> OutputError | None:
    """Writes this rank's files one after the other; takes part in gathering to the end even if its disk is full."""
    writes = alone or pp_rank is not None
    own = [(file, entries) for file, entries in plan.files if alone or plan.writer.get(file, pp_rank) == pp_rank]
    file_of = {entry.name: i for i, (_, entries) in enumerate(own) for entry in entries} if writes else {}
    left = [len(entries) for _, entries in own]
    opened: dict[int, File] = {}
    failure: OutputError | None = None
    for whole in wholes:
        for name, first_byte, part, is_last in emitted(whole, source, scale):
            if failure is not None or not writes or part is None:
                continue
            number = file_of[name]
            try:
                if number not in opened:
                    opened[number] = File(folder / own[number][0], own[number][1])
                opened[number].put(name, first_byte, part)
                left[number] -= int(is_last)
                if not left[number]:
                    opened.pop(number).finish()
            except OutputError as error:
                failure = error
    for file in opened.values():
        file.abandon()
    return failure


def _prepare(folder: Path, plan: Plan, overwrite: bool) -> None:
    """Makes the folder, or clears it of an older model's files where that was asked for."""
    make_folder(folder, plan.bytes)
    old = [path for pattern in ("model*.safetensors", INDEX, ".*.unfinished") for path in folder.glob(pattern)]
    if any(path.suffix == ".safetensors" for path in old) and not overwrite:
        raise InputError(
            f"{folder} holds a model already",
            field="folder",
            value=str(folder),
            fix=("name another folder", "overwrite=True replaces the model in it"),
        )
    for path in (*old, *(folder / name for name in (CONFIG, GENERATION))):
        with suppress(FileNotFoundError):
            path.unlink()
    require_space(folder, plan.bytes)


def _finish(folder: Path, plan: Plan, described: Described, dtype: torch.dtype, tokenizer: Path | None) -> None:
    """The small files; config.json comes last, so that a folder without it is known to be unfinished."""
    write_index(folder / INDEX, plan)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    config = published_config(described, dtype, tokenizer)
    if tokenizer is not None and (tokenizer / GENERATION).is_file():
        write_text(folder / GENERATION, (tokenizer / GENERATION).read_text(encoding="utf-8"))
    else:
        write_text(folder / GENERATION, generation(config))
    write_text(folder / CONFIG, config.to_json_string(use_diff=True))
    sync_folder(folder)


def _saved(folder: Path, plan: Plan) -> Saved:
    return Saved(folder, tuple(name for name, _ in plan.files), len(plan.where), plan.bytes)

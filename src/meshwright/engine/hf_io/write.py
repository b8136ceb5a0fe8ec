"""Saves a model as a Hugging Face folder with hub names, a few rows of one tensor at a time.

Every pipeline stage has one writing rank, so stages write their files in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.fsync import sync_folder
from meshwright.engine.hf_io.barriers import gather_from_stages, on_rank_zero, raise_on_all_ranks, write_stages_in_turn
from meshwright.engine.hf_io.config_json import write_config
from meshwright.engine.hf_io.find import INDEX
from meshwright.engine.hf_io.gather import FullTensorSource, ShardedTensors, TensorSource
from meshwright.engine.hf_io.layout_map import Shape
from meshwright.engine.hf_io.merge import find_adapters
from meshwright.engine.hf_io.name_map import NameMap, build_name_map
from meshwright.engine.hf_io.serialize import TensorMeta, all_chunks, model_tensors, tensor_chunks
from meshwright.engine.hf_io.shards import (
    GIB,
    SafetensorsWriter,
    ShardPlan,
    file_names,
    make_folder,
    require_space,
    split_into_files,
    write_index,
    write_text,
)
from meshwright.engine.hf_io.tokenizer_files import GENERATION, copy_tokenizer, export_config, generation_config
from meshwright.engine.mesh import Mesh
from meshwright.errors import InputError, MeshwrightError, OutputError
from meshwright.hub import CONFIG


@dataclass(frozen=True)
class SaveReport:
    """What was saved."""

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
) -> SaveReport:
    """Save the sharded model; every rank must call it. `merged` merges adapters into the weights."""
    _require_plain(stages)
    names = build_name_map(config, mtp=any(stage.embedding_on_last_stage for stage in stages))
    source = ShardedTensors(stages, mesh)
    scale = next((m.lora_scale for stage in stages for m in stage.modules() if hasattr(m, "lora_scale")), None)
    if scale is not None and not merged:
        raise InputError(
            "this model has adapters, which a model folder cannot store next to the weights",
            field="merged",
            value=False,
            fix=("merged=True merges them into the weights", "save_adapters saves them separately"),
        )
    tensors = model_tensors(source, names, dtype, scale)
    plan = _plan_all_stages(tensors, mesh, _max_file_bytes(max_shard_gib, consolidated))
    on_rank_zero(mesh, lambda: _prepare(folder, plan, overwrite))
    _require_complete(names, plan)
    if consolidated:
        name, entries = plan.files[0]
        write_stages_in_turn(entries, lambda: all_chunks(tensors, source, scale), folder / name, mesh)
    else:
        failure = _write_files(tensors, source, plan, folder, scale, mesh.pp.rank if source.writes else None)
        raise_on_all_ranks(failure)
    on_rank_zero(mesh, lambda: _finish(folder, plan, names, dtype, tokenizer))
    return _report(folder, plan)


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
) -> SaveReport:
    """Save stored tensors as a model folder from one process; `read` returns full tensors by name.

    Names and shapes are those of a stage (or of the model itself). Adapters among them are merged with their scale.
    """
    names = build_name_map(config, mtp=any(name.startswith("mtp.") for name in shapes))
    if find_adapters(shapes) and adapter_scale is None:
        raise InputError("the tensors include adapters, but adapter_scale is not set", field="adapter_scale")
    source = FullTensorSource(shapes, read)
    tensors = model_tensors(source, names, dtype, adapter_scale)
    entries = (tensor.entry(file_tensor) for tensor in tensors for file_tensor in tensor.file_tensors)
    files = split_into_files(entries, _max_file_bytes(max_shard_gib, consolidated))
    plan = ShardPlan(list(zip(file_names(len(files)), files, strict=True)))
    _require_complete(names, plan)
    _prepare(folder, plan, overwrite)
    failure = _write_files(tensors, source, plan, folder, adapter_scale, None, single_process=True)
    if failure is not None:
        raise failure
    _finish(folder, plan, names, dtype, tokenizer)
    return _report(folder, plan)


def _max_file_bytes(max_shard_gib: float, consolidated: bool) -> float:
    if max_shard_gib <= 0:
        raise InputError("must be above 0", field="max_shard_gib", value=max_shard_gib, fix=("5",))
    return float("inf") if consolidated else max_shard_gib * GIB


def _require_complete(names: NameMap, plan: ShardPlan) -> None:
    """Raise if a model tensor is in no file, before anything is written."""
    file_of = plan.file_of
    missing = [
        name
        for name in names.shapes
        if any(file_tensor.name not in file_of for file_tensor in names.file_tensors(name))
    ]
    if missing:
        raise MeshwrightError(f"no rank has {', '.join(missing[:3])} ({len(missing)} tensors of the model)")


def _require_plain(stages: Sequence[Any]) -> None:
    if any("megatron_fsdp" in stage.__dict__ for stage in stages):
        raise InputError(
            "a model sharded by Megatron-FSDP cannot be saved as a folder",
            field="layout.strategy",
            value="megatron_fsdp",
            fix=("save a checkpoint and convert it", "layout.strategy=fsdp2"),
        )
    names = (name for stage in stages for name, _ in stage.named_parameters())
    if any("_codes" in name.rpartition(".")[2] for name in names):
        raise InputError(
            "the base weights are quantized to 4 bits; a folder of them would be a worse model",
            field="peft.method",
            value="qlora",
            fix=("save_adapters, then merge them into the original weights (peft.method=lora)",),
        )


def _plan_all_stages(tensors: Sequence[TensorMeta], mesh: Mesh, limit: float) -> ShardPlan:
    """Return the files of all pipeline stages, numbered consecutively; each stage has its own files."""
    local_files = [tensor.entry(file_tensor) for tensor in tensors for file_tensor in tensor.file_tensors]
    by_stage = dict(enumerate(gather_from_stages(mesh, local_files)))
    if limit == float("inf"):
        all_entries = [entry for local_files in by_stage.values() for entry in local_files]
        return ShardPlan([(file_names(1)[0], all_entries)])
    files = [(rank, file) for rank, local_files in by_stage.items() for file in split_into_files(local_files, limit)]
    names = file_names(len(files))
    plan = ShardPlan([(name, file) for name, (_, file) in zip(names, files, strict=True)])
    plan.writer = {name: rank for name, (rank, _) in zip(names, files, strict=True)}
    return plan


def _write_files(
    tensors: Sequence[TensorMeta],
    source: TensorSource,
    plan: ShardPlan,
    folder: Path,
    scale: float | None,
    pp_rank: int | None,
    single_process: bool = False,
) -> OutputError | None:
    """Write this rank's files; keep gathering to the end even if the disk is full, as other ranks take part."""
    writes = single_process or pp_rank is not None
    local_files = [
        (file, entries) for file, entries in plan.files if single_process or plan.writer.get(file, pp_rank) == pp_rank
    ]
    file_of = {entry.name: i for i, (_, entries) in enumerate(local_files) for entry in entries} if writes else {}
    pending = [len(entries) for _, entries in local_files]
    opened: dict[int, SafetensorsWriter] = {}
    failure: OutputError | None = None
    for tensor in tensors:
        for name, first_byte, chunk, is_last in tensor_chunks(tensor, source, scale):
            if failure is not None or not writes or chunk is None:
                continue
            number = file_of[name]
            try:
                if number not in opened:
                    opened[number] = SafetensorsWriter(folder / local_files[number][0], local_files[number][1])
                opened[number].put(name, first_byte, chunk)
                pending[number] -= int(is_last)
                if not pending[number]:
                    opened.pop(number).finish()
            except OutputError as error:
                failure = error
    for file in opened.values():
        file.abandon()
    return failure


def _prepare(folder: Path, plan: ShardPlan, overwrite: bool) -> None:
    """Create the folder, or with `overwrite` remove an older model's files from it."""
    make_folder(folder, plan.bytes)
    stale = [path for pattern in ("model*.safetensors", INDEX, ".*.unfinished") for path in folder.glob(pattern)]
    if any(path.suffix == ".safetensors" for path in stale) and not overwrite:
        raise InputError(
            f"{folder} already contains a model",
            field="folder",
            value=str(folder),
            fix=("use another folder", "overwrite=True replaces the model in it"),
        )
    for path in (*stale, *(folder / name for name in (CONFIG, GENERATION))):
        with suppress(FileNotFoundError):
            path.unlink()
    require_space(folder, plan.bytes)


def _finish(folder: Path, plan: ShardPlan, names: NameMap, dtype: torch.dtype, tokenizer: Path | None) -> None:
    """Write the small files; config.json last, so that a folder without it is known to be incomplete."""
    write_index(folder / INDEX, plan)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    config = export_config(names, dtype, tokenizer)
    write_text(folder / GENERATION, generation_config(config, tokenizer))
    write_config(folder, config)
    sync_folder(folder)


def _report(folder: Path, plan: ShardPlan) -> SaveReport:
    return SaveReport(folder, tuple(name for name, _ in plan.files), len(plan.file_of), plan.bytes)

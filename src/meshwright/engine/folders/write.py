"""A model written as a Hugging Face folder, in the hub's names; a few rows of one tensor at a time.

Every pipeline stage has one rank that writes, so stages write their files at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.engine.durable import sync_folder
from meshwright.engine.folders.beside import GENERATION, copy_tokenizer, generation, published_config
from meshwright.engine.folders.find import CONFIG, INDEX
from meshwright.engine.folders.gather import Held, Read, Source
from meshwright.engine.folders.merge import Adapter, AdapterNames, adapters_in, joined, merge_rows
from meshwright.engine.folders.names import Block, Described, describe
from meshwright.engine.folders.places import Place, Shape, places
from meshwright.engine.folders.shards import (
    GIB,
    Entry,
    File,
    cut_into_files,
    failed_to_write,
    file_names,
    require_space,
    write_text,
)
from meshwright.engine.folders.together import Emitted, of_stages, on_first, raise_everywhere, write_in_turns
from meshwright.engine.mesh import Mesh
from meshwright.errors import InputError, MeshwrightError, OutputError

CHUNK = 1 << 27  # bytes gathered at once


@dataclass(frozen=True)
class Saved:
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Whole:
    """A tensor of the model: the stored tensors that make it, and the tensors of the files that it becomes."""

    name: str
    shape: Shape
    dtype: torch.dtype  # in the files
    parts: tuple[tuple[str, Place], ...]
    blocks: tuple[Block, ...]
    adapter: AdapterNames | None = None
    inputs_first: bool = False  # a matrix that is stored [in, out]

    @property
    def stacked(self) -> bool:
        return self.blocks[0].index is not None

    def entry(self, block: Block) -> Entry:
        """A tensor of the files."""
        shape = list(self.shape)
        if block.sources > 1:
            shape[block.dim] //= block.sources
        return Entry(block.name, self.dtype, tuple(shape[1:] if self.stacked else shape))


@dataclass
class Plan:
    """All files of a folder and what is in each; the same on every rank."""

    files: list[tuple[str, list[Entry]]]
    writer: dict[str, int] = field(default_factory=dict)  # file -> pipeline rank; empty where one process writes all

    @property
    def bytes(self) -> int:
        return sum(entry.nbytes for _, entries in self.files for entry in entries)

    @property
    def where(self) -> dict[str, str]:
        return {entry.name: file for file, entries in self.files for entry in entries}


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
    source = Held(stages, mesh)
    scale = next((m.lora_scale for stage in stages for m in stage.modules() if hasattr(m, "lora_scale")), None)
    if scale is not None and not merged:
        raise InputError(
            "this model has adapters, which a model folder cannot hold beside the weights",
            field="merged",
            value=False,
            fix=("merged=True puts them into the weights", "save_adapters writes them alone"),
        )
    wholes = _wholes(source, described, dtype, scale)
    plan = _common_plan(wholes, mesh, _limit(max_shard_gib, consolidated))
    on_first(mesh, lambda: _prepare(folder, plan, overwrite))
    _require_complete(described, plan)
    if consolidated:
        name, entries = plan.files[0]
        write_in_turns(entries, lambda: _all_emitted(wholes, source, scale), folder / name, mesh)
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
    wholes = _wholes(source, described, dtype, adapter_scale)
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


def _wholes(source: Source, described: Described, dtype: torch.dtype, scale: float | None) -> list[Whole]:
    """The model's tensors that a source holds, in its order."""
    grouped: dict[str, list[tuple[str, Place]]] = {}
    found = places(source.shapes, described.shapes, described.tied)
    for stored, place in found.items():
        if stored not in described.tied:
            grouped.setdefault(place.name, []).append((stored, place))
    adapters = adapters_in(source.shapes) if scale is not None else {}
    return [
        Whole(
            name,
            described.shapes[name],
            described.kept.get(name, dtype),
            tuple(parts),
            tuple(described.spread(name)),
            adapters.get(name),
            _inputs_first(described.model, name),
        )
        for name, parts in grouped.items()
    ]


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


def _common_plan(wholes: Sequence[Whole], mesh: Mesh, limit: float) -> Plan:
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
    wholes: Sequence[Whole],
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
        for name, first_byte, part, is_last in _emitted(whole, source, scale):
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


def _all_emitted(wholes: Sequence[Whole], source: Source, scale: float | None) -> Emitted:
    for whole in wholes:
        for name, first_byte, part, _ in _emitted(whole, source, scale):
            yield name, first_byte, part


def _emitted(whole: Whole, source: Source, scale: float | None) -> Iterator[tuple[str, int, torch.Tensor | None, bool]]:
    """What of which tensor of the files comes next: its name, how far into it, the numbers, and whether it is done."""
    adapter = _adapter(whole, source, scale)
    count = whole.shape[0] if whole.shape else 1
    split = whole.blocks[0].sources > 1 and not whole.stacked
    row = max(1, (whole.entry(whole.blocks[0]).nbytes * len(whole.blocks)) // max(1, count))
    # A row of a matrix [in, out] is a part of every output: an adapter needs them all.
    together = split or (whole.adapter is not None and whole.inputs_first and len(whole.shape) == 2)
    step = count if together else max(1, CHUNK // row)
    for first in range(0, count, step):
        last = min(first + step, count)
        rows = _rows(whole, source, first, last, keep=whole.adapter is not None)
        if rows is not None and adapter is not None:
            rows = merge_rows(rows, first, adapter)
        rows = rows.to(whole.dtype) if rows is not None else None
        for block in whole.blocks:
            if whole.stacked and not first <= (block.index or 0) < last:
                continue
            at = 0 if whole.stacked or split else first * row
            yield block.name, at, _part(rows, whole, block, first), whole.stacked or split or last == count


def _part(rows: torch.Tensor | None, whole: Whole, block: Block, first: int) -> torch.Tensor | None:
    """What a tensor of the files has of some rows."""
    if rows is None:
        return None
    if whole.stacked:
        rows = rows[(block.index or 0) - first]
    if block.sources > 1:
        width = whole.shape[block.dim] // block.sources
        rows = rows.narrow(block.dim - int(whole.stacked), block.source * width, width)
    return rows


def _rows(whole: Whole, source: Source, first: int, last: int, keep: bool) -> torch.Tensor | None:
    """Some rows of a tensor of the model, put together from what is stored; `keep`: in the stored format."""
    kind = None if keep else whole.dtype
    found: list[torch.Tensor | None] = []
    along = whole.parts[0][1].dim
    for stored, place in whole.parts:
        start, stop = first, last
        if along == 0 and len(whole.parts) > 1:
            size = source.shapes[stored][0]
            start, stop = max(first - place.start, 0), min(last - place.start, size)
            if start >= stop:
                continue
        found.append(source.rows(stored, start, stop, kind))
    have = [part for part in found if part is not None]
    if len(have) != len(found):
        return None
    rows = have[0] if len(have) == 1 else torch.cat(have, along)
    return rows.reshape(last - first, *whole.shape[1:]) if whole.shape else rows


def _adapter(whole: Whole, source: Source, scale: float | None) -> Adapter | None:
    """The adapter of a tensor, gathered whole: it is small. On ranks that do not write, an empty one."""
    if whole.adapter is None or scale is None:
        return None
    stacked = not whole.name.endswith(".weight")
    parts = {part: [_all_rows(source, name) for name in names] for part, names in whole.adapter.parts.items()}
    if any(one is None for those in parts.values() for one in those):
        return None
    told: Any = parts
    a, b = (joined(told, part, stacked) for part in "AB")
    magnitude = joined(told, "magnitude", stacked) if "magnitude" in parts else None
    return Adapter(a, b, scale, magnitude, whole.inputs_first)


def _all_rows(source: Source, name: str) -> torch.Tensor | None:
    return source.rows(name, 0, source.shapes[name][0])


def _inputs_first(model: nn.Module, name: str) -> bool:
    """Whether a matrix is stored [in, out]: GPT-2's linear layers, and the experts of some families."""
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    return bool(getattr(owner, "is_transposed", False)) or type(owner).__name__ == "Conv1D"


def _prepare(folder: Path, plan: Plan, overwrite: bool) -> None:
    """Makes the folder, or clears it of an older model's files where that was asked for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise failed_to_write(folder / CONFIG, plan.bytes, error) from None
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
    if len(plan.files) > 1:
        index = {"metadata": {"total_size": plan.bytes}, "weight_map": dict(sorted(plan.where.items()))}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
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

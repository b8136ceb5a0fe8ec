"""From a checkpoint, or from a Hugging Face folder, to a Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from meshwright.engine.faults import RunError
from meshwright.engine.fsync import require_empty
from meshwright.engine.post_training.open_checkpoint import (
    Found,
    has_adapters,
    inspect,
    load_model,
    newest,
    recipe_of,
    start_of,
    tokenizer_of,
)
from meshwright.engine.rank_env import Process
from meshwright.engine.warning_filters import no_progress
from meshwright.errors import InputError
from meshwright.recipes.types import Kernels, Layout, Recipe

ENDLESS = 1 << 62  # bytes


class Converted(msgspec.Struct, frozen=True):
    """What was written."""

    folder: Path
    files: int
    bytes: int
    dtype: str


class Wanted(msgspec.Struct, frozen=True):
    """How the folder is to be."""

    dtype: str | None = None  # bf16, fp16 or fp32; None: that of the source
    shard_gib: float = 5.0
    consolidated: bool = False
    merge: bool = False  # adapters into the model


def convert(
    path: str,
    out: str,
    *,
    dtype: str | None = None,
    shard_gib: float = 5.0,
    consolidated: bool = False,
    merge: bool = False,
) -> Converted:
    """Writes the model of a run, a checkpoint, a model folder or adapters as a Hugging Face folder."""
    found, folder = inspect(path), Path(out).expanduser()
    require_empty(folder)
    if merge and not has_adapters(found):
        raise InputError("there are no adapters to merge", field="--merge", value=path, fix=("leave out --merge",))
    wanted = Wanted(dtype, shard_gib, consolidated, merge)
    with _whole_or_not_at_all(folder):
        if found.kind in ("run", "checkpoint"):
            _from_checkpoint(found, folder, wanted)
        else:
            _from_folder(found, folder, wanted)
    return _read_converted(folder)


@contextmanager
def as_model_folder(path: str, merged: bool = False) -> Iterator[Path]:
    """Yield a Hugging Face folder with the model of a path: the path itself, or a temporary conversion.

    With `merged`, adapters are merged into the model.
    """
    found = inspect(path)
    if found.kind == "model" or (found.kind == "adapters" and not merged):
        yield found.path
        return
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        yield convert(path, str(Path(scratch) / "model"), merge=merged and has_adapters(found)).folder


@contextmanager
def _whole_or_not_at_all(folder: Path) -> Iterator[None]:
    """A folder that could not be written to its end is taken away again."""
    from safetensors import SafetensorError

    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise RunError(
                f"the folder {folder} cannot be written: {error}", fix=("a folder with space that can be written to",)
            ) from None
        raise


def _read_converted(folder: Path) -> Converted:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    with safe_open(str(files[0]), framework="pt") as first:
        dtype = str(first.get_tensor(next(iter(first.keys()))).dtype).removeprefix("torch.")
    return Converted(folder, len(files), sum(file.stat().st_size for file in files), dtype)


def _from_checkpoint(found: Found, folder: Path, wanted: Wanted) -> None:
    from meshwright.engine.diffusion.config import is_diffusion
    from meshwright.engine.post_training.model_card import write_card

    checkpoint = newest(found)
    recipe, config = recipe_of(checkpoint)
    if recipe.goal == "peft" or is_diffusion(recipe):
        _through_the_engine(checkpoint, recipe, config, folder, wanted)
    else:
        _tensor_by_tensor(checkpoint, recipe, config, folder, wanted)
    write_card(folder, recipe, recipe.checkpoint.pretrained, checkpoint.parent.parent)


def _tensor_by_tensor(checkpoint: Path, recipe: Recipe, config: dict[str, Any], folder: Path, wanted: Wanted) -> None:
    """Writes a model whose every tensor is in the checkpoint; one of them is in memory at a time."""
    from meshwright.engine import hf_io
    from meshwright.engine.checkpoint.load import MODEL, full_tensor
    from meshwright.engine.checkpoint.metadata import read_index, read_manifest
    from meshwright.engine.model.build import transformers_config
    from meshwright.engine.model_families import tokenizer_folder
    from meshwright.engine.parallelize.fsdp import DTYPES

    index = read_index(checkpoint, read_manifest(checkpoint))
    shapes = {name.removeprefix(MODEL): one.shape for name, one in index.tensors.items() if name.startswith(MODEL)}
    hf_io.write_folder(
        shapes,
        lambda name: full_tensor(checkpoint, index, f"{MODEL}{name}"),
        transformers_config(config),
        folder,
        dtype=DTYPES[wanted.dtype or recipe.precision.compute],
        max_shard_gib=wanted.shard_gib,
        consolidated=wanted.consolidated,
        tokenizer=tokenizer_folder(recipe, _start_if_there(checkpoint, recipe)),
    )


def _start_if_there(checkpoint: Path, recipe: Recipe) -> Path | None:
    """The folder that training started from; here it is only asked for its tokenizer, and may be gone."""
    from meshwright.engine.metrics.jsonl import warn

    try:
        return start_of(checkpoint, recipe)
    except InputError as error:
        warn(f"no tokenizer goes along: {error.reason}")
        return None


def _through_the_engine(checkpoint: Path, recipe: Recipe, config: dict[str, Any], folder: Path, wanted: Wanted) -> None:
    """Builds the model on one rank, puts the checkpoint's tensors into it and writes it as a training does."""
    from meshwright.engine import processes
    from meshwright.engine.model_families import family_of
    from meshwright.engine.train import preloaded

    alone = msgspec.structs.replace(
        recipe,
        layout=Layout(),
        kernels=Kernels(),
        train=msgspec.structs.replace(recipe.train, global_batch_size=1),
        data=msgspec.structs.replace(recipe.data, dataset="mock", blend={}, anneal_blend={}, anneal_steps=0),
        precision=msgspec.structs.replace(recipe.precision, compute=wanted.dtype or recipe.precision.compute),
    )
    if wanted.merge and recipe.peft.method == "qlora":  # into the weights before they were cut down to four bits
        alone = msgspec.structs.replace(alone, peft=msgspec.structs.replace(recipe.peft, method="lora"))
    start = _frozen_weights(checkpoint, recipe) if recipe.goal == "peft" else None
    kind = family_of(recipe)
    preload = preloaded(kind, kind.read_config(config))
    processes.fork(1, _work, alone, config, str(checkpoint), start, str(folder), wanted, preload=preload)


def _frozen_weights(checkpoint: Path, recipe: Recipe) -> str:
    """The folder of the weights that a checkpoint's adapters belong to."""
    folder = start_of(checkpoint, recipe)
    if folder is None:
        raise InputError(
            "the adapters belong to random weights that were not kept", field="checkpoint", value=str(checkpoint)
        )
    return str(folder)


def _work(
    process: Process,
    recipe: Recipe,
    config: dict[str, Any],
    checkpoint: str,
    start: str | None,
    out: str,
    wanted: Wanted,
) -> None:
    from meshwright.engine import hf_io
    from meshwright.engine.checkpoint.load import load_model_only
    from meshwright.engine.mesh import build_mesh
    from meshwright.engine.model_families import family_of, tokenizer_folder
    from meshwright.engine.parallelize.fsdp import DTYPES

    kind = family_of(recipe)
    settings = kind.read_config(config)
    source = kind.open_source(recipe, settings, False, None)
    weights = Path(start) if start is not None else None
    mesh = build_mesh(recipe.layout, process.device.type)
    trainer = kind.trainer()(recipe, settings, mesh, process.device, source, weights)
    load_model_only(trainer, Path(checkpoint))
    if not (wanted.merge and recipe.goal == "peft"):
        kind.export(trainer, Path(out), wanted.consolidated)
        return
    hf_io.save_model(
        trainer.stages,
        mesh,
        settings,
        Path(out),
        dtype=DTYPES[recipe.precision.compute],
        max_shard_gib=wanted.shard_gib,
        consolidated=wanted.consolidated,
        tokenizer=tokenizer_folder(recipe, weights),
        merged=True,
    )


def _from_folder(found: Found, folder: Path, wanted: Wanted) -> None:
    """A model folder in another format or other files, or adapters merged into their model."""
    from meshwright.engine import hf_io
    from meshwright.engine.parallelize.fsdp import DTYPES

    if found.kind == "adapters" and not wanted.merge:
        raise InputError(
            "these are adapters; a model folder is made by merging them",
            field="checkpoint",
            value=str(found.path),
            fix=("--merge",),
        )
    model = load_model(found.path, DTYPES[wanted.dtype] if wanted.dtype else "auto")
    if found.kind == "adapters":
        model = model.merge_and_unload()
    largest = ENDLESS if wanted.consolidated else max(1, round(wanted.shard_gib * 1024**3))
    with no_progress():
        model.save_pretrained(folder, max_shard_size=largest)
    hf_io.copy_tokenizer(tokenizer_of(found.path), folder)

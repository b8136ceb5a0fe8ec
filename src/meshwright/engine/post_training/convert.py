"""Converts a checkpoint or a Hugging Face folder to a Hugging Face folder."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from meshwright.choices import synonym
from meshwright.engine.faults import RunError
from meshwright.engine.fsync import require_empty
from meshwright.engine.post_training.open_checkpoint import (
    FoundCheckpoint,
    base_of,
    find_checkpoint,
    has_adapters,
    initial_weights_of,
    inspect,
    load_model,
    recipe_of,
    resolve_checkpoint,
    tokenizer_of,
)
from meshwright.engine.rank_env import Process
from meshwright.engine.warning_filters import no_progress
from meshwright.errors import InputError, OutputError
from meshwright.host_memory import GIB, free_gib
from meshwright.models import load_config, quantization_of
from meshwright.notes import note
from meshwright.recipes.types import Kernels, Layout, Recipe
from meshwright.stages import stage

UNLIMITED_BYTES = 1 << 62  # bytes


class ConvertResult(msgspec.Struct, frozen=True):
    """What was written."""

    folder: Path
    files: int
    bytes: int
    dtype: str
    step: int | None = None  # of a run's checkpoint
    best_step: int | None = None  # of a run's checkpoint with a lower validation loss than the one written


class ConvertOptions(msgspec.Struct, frozen=True):
    """Format of the output folder."""

    dtype: str | None = None  # bf16, fp16 or fp32; None: as in the source
    shard_gib: float = 5.0
    consolidated: bool = False
    merge: bool = False  # merge adapters into the model


def convert(
    path: str,
    out: str,
    *,
    dtype: str | None = None,
    shard_gib: float = 5.0,
    consolidated: bool = False,
    merge: bool = False,
    which: str | None = None,
    model: str | None = None,
) -> ConvertResult:
    """Convert a run, a checkpoint, a model folder or adapters to a Hugging Face folder; `which`: of a run.

    `model` is that of a Megatron checkpoint, if its own arguments do not say enough.
    """
    found, folder = find_checkpoint(path, which, megatron=True), Path(out).expanduser()
    require_empty(folder)
    _require_folder_name(folder, path, merge, has_adapters(found))
    if merge and not has_adapters(found):
        raise InputError("there are no adapters to merge", field="--merge", value=path, fix=("remove --merge",))
    if model is not None and found.type != "megatron":
        reason = f"is for Megatron checkpoints, and {path} is none"
        raise InputError(reason, field="--model", value=model, fix=("leave out --model",))
    options = ConvertOptions(dtype, shard_gib, consolidated, merge)
    with _remove_on_failure(folder):
        if found.type == "megatron":
            _from_megatron(found.path, folder, options, which, model)
        elif found.type in ("run", "checkpoint"):
            _from_checkpoint(found, folder, options)
        else:
            _from_folder(found, folder, options)
    return msgspec.structs.replace(_inspect_result(folder), step=found.step, best_step=found.best_step)


FILE_ENDINGS = (".gguf", ".bin", ".pt", ".pth", ".safetensors", ".onnx", ".ggml", ".ckpt", ".zip", ".tar", ".gz")
"""Endings of files with weights: a folder of such a name would be taken for one."""
GGUF = (".gguf", ".ggml")


def _require_folder_name(folder: Path, source: str, merge: bool, adapted: bool) -> None:
    """Raise if the output is named like a file: what is written is a folder."""
    ending = folder.suffix.lower()
    if ending not in FILE_ENDINGS or folder.is_dir():
        return
    named = str(folder.with_suffix("")) + "-hf"
    merged = merge or (adapted and ending in (*GGUF, ".onnx"))  # neither of the two reads adapters
    command = shlex.join(["meshwright", "convert", source, named, *(["--merge"] if merged else [])])
    reason = "names a file, but convert writes a Hugging Face folder (config.json, *.safetensors, tokenizer)"
    if ending in GGUF:
        reason += "; llama.cpp's convert_hf_to_gguf.py writes GGUF from that folder"
        command += f" && python convert_hf_to_gguf.py {shlex.quote(named)} --outfile {shlex.quote(str(folder))}"
    elif ending == ".onnx":
        reason += "; optimum-cli export onnx writes ONNX from that folder"
        command += f" && optimum-cli export onnx --model {shlex.quote(named)} {shlex.quote(named)}-onnx"
    raise InputError(reason, field="out", value=str(folder), fix=(command,))


@contextmanager
def as_model_folder(path: str, merged: bool = False) -> Iterator[Path]:
    """Yield a Hugging Face folder with the model of a path: the path itself, or a temporary conversion.

    With `merged`, adapters are merged into the model.
    """
    found = inspect(path)
    if found.type == "model" or (found.type == "adapters" and not merged):
        yield found.path
        return
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        # evaluated as the run computes, whatever the base model is written in
        run = recipe_of(resolve_checkpoint(found))[0] if found.type in ("run", "checkpoint") else None
        dtype = None if run is None else run.precision.compute
        yield _converted_for_reading(path, Path(scratch) / "model", dtype, merged and has_adapters(found))


def _converted_for_reading(path: str, folder: Path, dtype: str | None, merge: bool) -> Path:
    """Return a temporary conversion; its disk is that of temporary files, which the user did not choose."""
    try:
        return convert(path, str(folder), dtype=dtype, merge=merge).folder
    except OutputError as error:
        reason = f"is the folder of temporary files, where {path} is converted before it is read: {error.reason}"
        raise OutputError(reason, field="TMPDIR", value=tempfile.gettempdir(), fix=("export TMPDIR=FOLDER",)) from None


@contextmanager
def _remove_on_failure(folder: Path) -> Iterator[None]:
    """Remove the folder if writing it fails."""
    from safetensors import SafetensorError

    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise RunError(
                f"the folder {folder} cannot be written: {error}", fix=("choose a writable folder with free space",)
            ) from None
        raise


def _inspect_result(folder: Path) -> ConvertResult:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    with safe_open(str(files[0]), framework="pt") as first:
        dtype = str(first.get_tensor(next(iter(first.keys()))).dtype).removeprefix("torch.")
    return ConvertResult(folder, len(files), sum(file.stat().st_size for file in files), dtype)


def _from_megatron(path: Path, folder: Path, options: ConvertOptions, which: str | None, model: str | None) -> None:
    """Write the model of a Megatron checkpoint, one tensor in memory at a time."""
    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.name_map import build_name_map
    from meshwright.engine.megatron_io.to_hf import MegatronModel, open_megatron
    from meshwright.engine.model.build import transformers_config
    from meshwright.engine.parallelize.fsdp import DTYPES
    from meshwright.models import is_path
    from meshwright.models.numerics import published_config

    source = MegatronModel(open_megatron(path, which), None if model is None else published_config(model))
    config = transformers_config(source.config)
    stored = source.read("model.norm.weight").dtype
    stage(f"convert: writing the tensors of {path}")
    named = Path(model).expanduser() if model is not None and is_path(model) else None
    hf_io.write_folder(
        build_name_map(config).shapes,
        source.read,
        config,
        folder,
        dtype=DTYPES[options.dtype] if options.dtype else stored,
        max_shard_gib=options.shard_gib,
        consolidated=options.consolidated,
        tokenizer=(named if named.is_dir() else named.parent) if named is not None else None,
    )
    if named is None:
        note(f"{folder} has no tokenizer: copy the one that the model was trained with")


def _from_checkpoint(found: FoundCheckpoint, folder: Path, options: ConvertOptions) -> None:
    from meshwright.engine.checkpoint.metadata import read_state
    from meshwright.engine.diffusion.config import is_diffusion
    from meshwright.engine.post_training.model_card import write_card
    from meshwright.engine.run_template import save_template

    checkpoint = resolve_checkpoint(found)
    recipe, config = recipe_of(checkpoint)
    if recipe.goal == "peft" or is_diffusion(recipe):
        _export_with_engine(checkpoint, recipe, config, folder, options)
    else:
        _stream_tensors(checkpoint, recipe, config, folder, options)
    save_template(recipe, checkpoint.parent.parent, folder)
    step, merged = read_state(checkpoint).step, options.merge and recipe.goal == "peft"
    write_card(folder, recipe, base_of(checkpoint, recipe), checkpoint.parent.parent, step, merged)


def _stream_tensors(
    checkpoint: Path, recipe: Recipe, config: dict[str, Any], folder: Path, options: ConvertOptions
) -> None:
    """Write a model from the checkpoint's tensors, one in memory at a time."""
    from meshwright.engine import hf_io
    from meshwright.engine.checkpoint.load import MODEL, full_tensor
    from meshwright.engine.checkpoint.metadata import read_index, read_manifest
    from meshwright.engine.model.build import transformers_config
    from meshwright.engine.model_families import tokenizer_folder
    from meshwright.engine.parallelize.fsdp import DTYPES

    index = read_index(checkpoint, read_manifest(checkpoint))
    shapes = {name.removeprefix(MODEL): one.shape for name, one in index.tensors.items() if name.startswith(MODEL)}
    settings = transformers_config(config)
    stage(f"convert: writing {len(shapes):,} tensors of {checkpoint}")
    hf_io.write_folder(
        shapes,
        lambda name: full_tensor(checkpoint, index, f"{MODEL}{name}"),
        settings,
        folder,
        dtype=DTYPES[options.dtype or recipe.precision.compute],
        max_shard_gib=options.shard_gib,
        consolidated=options.consolidated,
        tokenizer=tokenizer_folder(recipe, _initial_weights_if_present(checkpoint, recipe), settings),
    )


def _initial_weights_if_present(checkpoint: Path, recipe: Recipe) -> Path | None:
    """Return the folder of the initial weights, used here only for its tokenizer; None if it no longer exists."""
    from meshwright.engine.metrics.jsonl import warn

    try:
        return initial_weights_of(checkpoint, recipe)
    except InputError as error:
        warn(f"no tokenizer is copied: {error.reason}")
        return None


def _export_with_engine(
    checkpoint: Path, recipe: Recipe, config: dict[str, Any], folder: Path, options: ConvertOptions
) -> None:
    """Build the model on one rank, load the checkpoint into it and export it as training does."""
    from meshwright.engine import processes
    from meshwright.engine.model_families import family_of
    from meshwright.engine.train import preloaded

    initial_weights = _base_weights(checkpoint, recipe) if recipe.goal == "peft" else None
    if options.merge and options.dtype is None and initial_weights is not None:
        options = msgspec.structs.replace(options, dtype=_dtype_of_base(Path(initial_weights), recipe))
    single_rank = msgspec.structs.replace(
        recipe,
        layout=Layout(),
        kernels=Kernels(),
        train=msgspec.structs.replace(recipe.train, global_batch_size=1),
        data=msgspec.structs.replace(recipe.data, dataset="mock", blend={}, anneal_blend={}, anneal_steps=0),
        precision=msgspec.structs.replace(recipe.precision, compute=options.dtype or recipe.precision.compute),
    )
    if options.merge and recipe.peft.method == "qlora":  # merge into the weights before quantization to 4 bits
        single_rank = msgspec.structs.replace(single_rank, peft=msgspec.structs.replace(recipe.peft, method="lora"))
    family = family_of(recipe)
    preload = preloaded(family, family.read_config(config))
    what = "merging the adapters and writing the model" if options.merge else "writing"
    stage(f"convert: loading {checkpoint} into the model and {what}")
    if initial_weights is not None:
        _warn_of_little_memory(Path(initial_weights))
    processes.fork(
        1, _export_rank, single_rank, config, str(checkpoint), initial_weights, str(folder), options, preload=preload
    )


def _dtype_of_base(weights: Path, recipe: Recipe) -> str | None:
    """Return the dtype that the base model's config states, in which the merged model is written; None: the run's.

    A run on a CPU may compute in fp32: its merged model would be twice as large as the base.
    """
    config = load_config(weights)
    stated = next((str(config[key]) for key in ("dtype", "torch_dtype") if config.get(key)), "")
    known = synonym("dtype", stated)
    if known is None or known.value == recipe.precision.compute:
        return None
    note(
        f"the merged model is written in {known.value}, as its base model is; the run computed in "
        f"{recipe.precision.compute}: --dtype {recipe.precision.compute} keeps that"
    )
    return known.value


def _warn_of_little_memory(weights: Path) -> None:
    """Warn if the base weights are larger than the free memory of this machine, which then may kill the command."""
    from meshwright.engine.metrics.jsonl import warn

    needed, free = sum(file.stat().st_size for file in weights.glob("*.safetensors")) / GIB, free_gib()
    if free is not None and needed > free:
        warn(
            f"the base weights of the adapters take {needed:.1f} GiB of this machine's memory, and {free:.1f} GiB are "
            "free: the command may be killed; free memory, add swap, or convert on a larger machine"
        )


def _base_weights(checkpoint: Path, recipe: Recipe) -> str:
    """Return the folder of the base weights of a checkpoint's adapters."""
    folder = initial_weights_of(checkpoint, recipe)
    if folder is None:
        raise InputError("the adapters' base weights were random and not saved", field="source", value=str(checkpoint))
    return str(folder)


def _export_rank(
    process: Process,
    recipe: Recipe,
    config: dict[str, Any],
    checkpoint: str,
    initial_weights: str | None,
    out: str,
    options: ConvertOptions,
) -> None:
    from meshwright.engine import hf_io
    from meshwright.engine.checkpoint.load import load_model_only
    from meshwright.engine.mesh import build_mesh
    from meshwright.engine.model_families import family_of, tokenizer_folder
    from meshwright.engine.parallelize.fsdp import DTYPES

    family = family_of(recipe)
    settings = family.read_config(config)
    source = family.open_source(recipe, settings, False, None)
    weights = Path(initial_weights) if initial_weights is not None else None
    mesh = build_mesh(recipe.layout, process.device.type)
    trainer = family.trainer()(recipe, settings, mesh, process.device, source, weights)
    load_model_only(trainer, Path(checkpoint))
    if not (options.merge and recipe.goal == "peft"):
        family.export(trainer, Path(out), options.consolidated)
        return
    hf_io.save_model(
        trainer.stages,
        mesh,
        settings,
        Path(out),
        dtype=DTYPES[recipe.precision.compute],
        max_shard_gib=options.shard_gib,
        consolidated=options.consolidated,
        tokenizer=tokenizer_folder(recipe, weights, settings),
        merged=True,
    )


def _from_folder(found: FoundCheckpoint, folder: Path, options: ConvertOptions) -> None:
    """Convert a model folder to another dtype or file size, or merge adapters into their model."""
    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.config_json import write_config
    from meshwright.engine.hf_io.find import read_json
    from meshwright.engine.parallelize.fsdp import DTYPES
    from meshwright.engine.post_training.model_card import copy_card
    from meshwright.hub import CONFIG

    if found.type == "adapters" and not options.merge:
        raise InputError(
            "these are adapters; merge them to get a model folder",
            field="source",
            value=str(found.path),
            fix=("--merge",),
        )
    if found.type == "model" and quantization_of(read_json(found.path / CONFIG)) is not None:
        _dequantize(found.path, folder, options)
        copy_card(found.path, folder)
        return
    stage(f"convert: loading the model of {found.path}")
    model = load_model(found.path, DTYPES[options.dtype] if options.dtype else "auto")
    if found.type == "adapters":
        stage("convert: merging the adapters")
        model = model.merge_and_unload()
    stage(f"convert: writing {folder}")
    largest = UNLIMITED_BYTES if options.consolidated else max(1, round(options.shard_gib * 1024**3))
    with no_progress():
        model.save_pretrained(folder, max_shard_size=largest)
    write_config(folder, model.config)
    hf_io.copy_tokenizer(tokenizer_of(found.path), folder)
    copy_card(found.path, folder, merged=found.type == "adapters")


def _dequantize(source: Path, folder: Path, options: ConvertOptions) -> None:
    """Write a quantized folder as a plain one, one tensor in memory at a time."""
    import torch

    from meshwright.engine import hf_io
    from meshwright.engine.hf_io.layout_map import TensorLocation
    from meshwright.engine.hf_io.name_map import build_name_map
    from meshwright.engine.hf_io.read import FolderWeights
    from meshwright.engine.model.build import transformers_config
    from meshwright.engine.model.mtp import mtp_depth
    from meshwright.engine.parallelize.fsdp import DTYPES

    config = transformers_config(load_config(source))
    dtype = DTYPES[options.dtype or "bf16"]
    weights = FolderWeights(source, build_name_map(config, mtp=mtp_depth(config.get_text_config()) == 1))
    names = weights.names

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty(names.shapes[name], dtype=names.buffer_dtypes.get(name, dtype))
        weights.fill(tensor, name, TensorLocation(name))
        return tensor

    hf_io.write_folder(
        {name: shape for name, shape in names.shapes.items() if name in weights.file_tensors},
        read,
        config,
        folder,
        dtype=dtype,
        max_shard_gib=options.shard_gib,
        consolidated=options.consolidated,
        tokenizer=source,
    )

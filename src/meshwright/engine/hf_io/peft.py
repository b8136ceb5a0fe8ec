"""Loads and saves adapters in peft format: adapter_config.json and adapter_model.safetensors.

    ours                                    peft, prefixed by base_model.model.
    PATH.lora_A, PATH.lora_B                PATH.lora_A.weight, PATH.lora_B.weight
    PATH.lora_magnitude                     PATH.lora_magnitude_vector
    EXPERTS.down_proj_lora_A [E, r, in]     EXPERTS.lora_A.weight [E·r, in]
    EXPERTS.down_proj_lora_B [E, out, r]    EXPERTS.lora_B.weight [out, r·E], the experts innermost

If both expert projections have adapters, the first one's are under EXPERTS.base_layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.barriers import (
    TensorChunks,
    gather_from_stages,
    on_rank_zero,
    raise_on_all_ranks,
    write_stages_in_turn,
)
from meshwright.engine.hf_io.files import SafetensorsFolder
from meshwright.engine.hf_io.find import read_json
from meshwright.engine.hf_io.gather import ShardedTensors
from meshwright.engine.hf_io.layout_map import Shape, TensorLocation, local_views
from meshwright.engine.hf_io.merge import AdapterNames, find_adapters
from meshwright.engine.hf_io.shards import Entry, make_folder, write_text
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.adapters import scale_of
from meshwright.errors import InputError, MeshwrightError
from meshwright.recipes.types import Peft

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FIELD = "adapters"
# peft does not adapt these modules: their fused kernels use the weight directly.
NOT_ADAPTABLE = {"nemotron_h": ("out_proj",)}
# In MoE models peft mistakes modules of these names for experts of older files and changes their ranks. Listed as
# target_parameters they are left alone: shared experts and the feed-forward blocks of dense layers.
EXPERT_LIKE_SUFFIXES = (".gate_proj", ".up_proj", ".down_proj")
MERGE_FIX = ("save_model(..., merged=True) writes a model with the adapters in its weights",)


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter: peft's name, and our stored names in order (several if outputs are segmented)."""

    name: str
    part: str  # A, B or magnitude
    stacked: bool
    stored: tuple[str, ...]

    def to_peft(self, full: torch.Tensor) -> torch.Tensor:
        """Convert a tensor from our shape to peft's."""
        if not self.stacked:
            return full
        if self.part == "A":
            return full.flatten(0, 1)
        return full.flatten(1, -2).permute(1, 2, 0).flatten(1, 2)

    def from_peft(self, theirs: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Convert a tensor from peft's shape to ours."""
        if not self.stacked or self.part == "A":
            return theirs.reshape(shape)
        experts, rank = shape[0], shape[-1]
        return theirs.reshape(-1, rank, experts).permute(2, 0, 1).reshape(shape)

    def peft_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return peft's shape of a tensor from ours."""
        first = shapes[0]
        if not self.stacked:
            return (sum(shape[0] for shape in shapes), *first[1:])
        if self.part == "A":
            return (first[0] * first[1], first[2])
        return (prod(first[1:-1]), first[-1] * first[0])


@dataclass(frozen=True)
class AdapterConfig:
    """The inputs of adapter_config.json, of one stage or of all."""

    weights: tuple[str, ...]  # names of the adapted weights
    modules: tuple[str, ...]  # paths of all modules of the model
    inputs_first: bool  # weights stored [in, out]: GPT-2's linear layers


def save_adapters(stages: Sequence[Any], mesh: Mesh, peft: Peft, folder: Path, base: str) -> Path:
    """Save the adapters of all ranks in peft format; every rank must call it.

    `base` is the folder or id of the adapted model.
    """
    source = ShardedTensors(stages, mesh)
    adapters = find_adapters(source.shapes)
    parts = list(_adapter_tensors(adapters))
    raise_on_all_ranks(_unsupported(stages, parts))
    on_rank_zero(mesh, lambda: make_folder(folder))
    local_entries = [
        Entry(part.name, source.tensors[part.stored[0]].dtype, part.peft_shape([source.shapes[n] for n in part.stored]))
        for part in parts
    ]
    entries = [entry for stage_entries in gather_from_stages(mesh, local_entries) for entry in stage_entries]

    def chunks() -> TensorChunks:
        for part in parts:
            rows = [source.rows(name, 0, source.shapes[name][0]) for name in part.stored]
            local_rows = [one for one in rows if one is not None]
            yield part.name, 0, part.to_peft(torch.cat(local_rows)) if local_rows else None

    write_stages_in_turn(entries, chunks, folder / WEIGHTS_FILE, mesh)
    config = _merge_stages(gather_from_stages(mesh, _adapter_config(stages, tuple(adapters))))
    on_rank_zero(
        mesh, lambda: write_text(folder / CONFIG_FILE, json.dumps(_peft_config(config, peft, base), indent=2) + "\n")
    )
    return folder


def load_adapters(stages: Sequence[Any], folder: Path) -> int:
    """Load peft adapters into those of the stages, each rank its part; return how many tensors were read."""
    settings = read_json(folder / CONFIG_FILE)
    files = SafetensorsFolder(folder, WEIGHTS_FILE, "adapter_model.safetensors.index.json")
    expected: set[str] = set()
    for stage in stages:
        tensors = dict(stage.named_parameters())
        parts = list(_adapter_tensors(find_adapters(tensors)))
        _check_settings(folder, settings, stage, parts)
        for part in parts:
            _load_tensor(part, tensors, files, folder)
        expected |= {part.name for part in parts}
    layers = {_layer_key(name) for name in expected}
    unexpected = [name for name in files.file_of if name not in expected and _layer_key(name) in layers]
    if unexpected:
        raise InputError(
            f"{folder / WEIGHTS_FILE} has {unexpected[0]} ({len(unexpected)} such), but this run has no adapter there",
            field="peft.targets",
            fix=("use the targets that the adapters were trained with",),
        )
    files.close()
    return len(expected)


def _adapter_tensors(adapters: Mapping[str, AdapterNames]) -> Iterator[AdapterTensor]:
    for weight, names in adapters.items():
        linear = weight.endswith(".weight")
        path = weight.removesuffix(".weight") if linear else weight.rpartition(".")[0]
        if not linear and not weight.endswith("down_proj") and f"{path}.down_proj" in adapters:
            path += ".base_layer"
        for part, stored in names.parts.items():
            end = "lora_magnitude_vector" if part == "magnitude" else f"lora_{part}.weight"
            yield AdapterTensor(f"{PREFIX}{path}.{end}", part, not linear, tuple(stored))


def _unsupported(stages: Sequence[Any], parts: Sequence[AdapterTensor]) -> MeshwrightError | None:
    """Return why peft could not load these adapters; None if it can."""
    if not parts:
        return InputError("this model has no adapters to save", field="goal", fix=("goal=peft",))
    model_type = str(stages[0].body.config.model_type)
    reason = ""
    if any(part.name.startswith(f"{PREFIX}mtp.") for part in parts):
        reason = "peft loads models without multi-token prediction, so its adapters have no target"
    refused = next(
        (m for m in NOT_ADAPTABLE.get(model_type, ()) if any(f"mixer.{m}." in part.name for part in parts)), None
    )
    if refused is not None:
        reason = f"peft does not adapt {refused} of {model_type}"
    if not reason:
        return None
    return InputError(f"{reason}; they cannot be saved in peft format", field="peft.targets", fix=MERGE_FIX)


def _adapter_config(stages: Sequence[Any], weights: tuple[str, ...]) -> AdapterConfig:
    modules = tuple(path for stage in stages for path, _ in stage.named_modules() if path)
    inputs_first = any(getattr(module, "lora_inputs_first", False) for stage in stages for module in stage.modules())
    return AdapterConfig(weights, modules, inputs_first)


def _merge_stages(stages: Sequence[AdapterConfig]) -> AdapterConfig:
    return AdapterConfig(
        tuple(weight for one in stages for weight in one.weights),
        tuple(path for one in stages for path in one.modules),
        any(one.inputs_first for one in stages),
    )


def _peft_config(config: AdapterConfig, peft: Peft, base: str) -> dict[str, Any]:
    """Return the contents of adapter_config.json."""
    linears = [weight.removesuffix(".weight") for weight in config.weights if weight.endswith(".weight")]
    experts = {".".join(weight.split(".")[-3:]) for weight in config.weights if not weight.endswith(".weight")}
    expert_like = [path for path in linears if path.endswith(EXPERT_LIKE_SUFFIXES)] if _has_experts(config) else []
    parameters = experts | {f"{name}.weight" for name in _shortest_names(expert_like, config.modules)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": peft.rank,
        "lora_alpha": int(peft.alpha) if float(peft.alpha).is_integer() else peft.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": config.inputs_first,
        "use_rslora": peft.method == "rslora",
        "use_dora": peft.method == "dora",
        "target_modules": _shortest_names([path for path in linears if path not in expert_like], config.modules),
        "target_parameters": sorted(parameters) or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _has_experts(config: AdapterConfig) -> bool:
    return any(path.endswith(".experts") for path in config.modules)


def _shortest_names(paths: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Return the shortest path suffixes that match exactly these modules; full paths if there are none."""
    for depth in (1, 2):
        names = {".".join(path.split(".")[-depth:]) for path in paths}
        if {one for one in modules if any(f".{one}".endswith(f".{name}") for name in names)} == set(paths):
            return sorted(names)
    return sorted(paths)


def _load_tensor(
    part: AdapterTensor, tensors: Mapping[str, torch.Tensor], files: SafetensorsFolder, folder: Path
) -> None:
    """Read one tensor and copy this rank's part of it into our adapter."""
    if part.name not in files.file_of:
        raise InputError(
            f"{folder / WEIGHTS_FILE} has no {part.name}, but this run has an adapter there",
            field="peft.targets",
            fix=("use the targets that the adapters were trained with",),
        )
    shapes = [tuple(tensors[name].shape) for name in part.stored]
    expected, found = part.peft_shape(shapes), files.shape(part.name)
    if expected != found:
        raise InputError(
            f"{part.name} in {folder / WEIGHTS_FILE} has shape {found}, but this run's adapter has {expected}",
            field="peft.rank",
            fix=("use the rank and the model that the adapters were trained with",),
        )
    theirs, start = files.read(part.name), 0
    for name, shape in zip(part.stored, shapes, strict=True):
        length = shape[0] if len(part.stored) > 1 else theirs.shape[0]
        ours = part.from_peft(theirs.narrow(0, start, length), shape)
        start += length
        with torch.no_grad():
            for view, box in local_views(tensors[name], TensorLocation(name)):
                view.copy_(ours[box])


def _check_settings(folder: Path, settings: Mapping[str, Any], stage: Any, parts: Sequence[AdapterTensor]) -> None:
    """Raise if the adapters' settings do not match this run's."""
    if not parts:
        raise InputError("this run has no adapters to load into", field="goal", fix=("goal=peft",))
    if settings.get("peft_type") != "LORA":
        raise _mismatch(folder, f"peft_type={settings.get('peft_type')}", "adapters of type LORA")
    for name, plain in (("modules_to_save", None), ("rank_pattern", {}), ("alpha_pattern", {}), ("bias", "none")):
        if settings.get(name) not in (plain, None, {}, []):
            raise _mismatch(folder, f"{name}={settings[name]}", f"{name}={plain}")
    dora = any(part.part == "magnitude" for part in parts)
    if bool(settings.get("use_dora")) != dora:
        raise _mismatch(folder, f"use_dora={settings.get('use_dora')}", f"peft.method={'dora' if dora else 'lora'}")
    rank, alpha = int(settings.get("r", 8)), float(settings.get("lora_alpha", 8))
    theirs = scale_of(Peft(method="rslora" if settings.get("use_rslora") else "lora", rank=rank, alpha=alpha))
    ours = next(module.lora_scale for module in stage.modules() if hasattr(module, "lora_scale"))
    if abs(theirs - ours) > 1e-6 * abs(theirs):
        raise InputError(
            f"{folder / CONFIG_FILE} scales by {theirs:g} (r={rank}, lora_alpha={alpha:g}), but this run by {ours:g}",
            field="peft.alpha",
            fix=(f"peft.rank={rank}", f"peft.alpha={alpha:g}", f"use_rslora={settings.get('use_rslora', False)}"),
        )


def _mismatch(folder: Path, theirs: str, ours: str) -> InputError:
    return InputError(
        f"{folder / CONFIG_FILE} has {theirs}, but this run has {ours}",
        field=FIELD,
        value=str(folder),
        fix=("use a recipe with the adapters' settings",),
    )


def _layer_key(name: str) -> str:
    """Return the layer part of a name: a pipeline stage loads only its own layers."""
    found = re.search(r"\.(?:layers|h)\.\d+\.", name)
    return found.group(0) if found else ""

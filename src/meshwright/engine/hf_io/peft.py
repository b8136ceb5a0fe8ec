"""Adapters in the format of the peft library: adapter_config.json and adapter_model.safetensors.

    ours                                    theirs, behind base_model.model.
    PATH.lora_A, PATH.lora_B                PATH.lora_A.weight, PATH.lora_B.weight
    PATH.lora_magnitude                     PATH.lora_magnitude_vector
    EXPERTS.down_proj_lora_A [E, r, in]     EXPERTS.lora_A.weight [E·r, in]
    EXPERTS.down_proj_lora_B [E, out, r]    EXPERTS.lora_B.weight [out, r·E], the experts innermost

Where both projections of the experts have adapters, the first one's lie under EXPERTS.base_layer.
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

from meshwright.engine.hf_io.barriers import Emitted, of_stages, on_first, raise_everywhere, write_in_turns
from meshwright.engine.hf_io.files import Files
from meshwright.engine.hf_io.find import read_json
from meshwright.engine.hf_io.gather import LocalTensors
from meshwright.engine.hf_io.layout_map import Place, Shape, pieces
from meshwright.engine.hf_io.merge import AdapterNames, adapters_in
from meshwright.engine.hf_io.shards import Entry, make_folder, write_text
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.adapters import scale_of
from meshwright.errors import InputError, MeshwrightError
from meshwright.recipes.types import Peft

SETTINGS = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
FRONT = "base_model.model."
FIELD = "adapters"
# The library does not adapt these modules of these models: their kernels multiply by the weight itself.
REFUSED = {"nemotron_h": ("out_proj",)}
# In models with experts the library takes modules of these names for experts of older files, and changes their ranks;
# named as parameters they stay what they are: a shared expert, or the feed-forward block of a dense layer.
TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
MERGED = ("save_model(..., merged=True) writes a model with the adapters in its weights",)


@dataclass(frozen=True)
class Part:
    """One tensor of an adapter: the library's name, and ours in their order (several where outputs are segmented)."""

    name: str
    part: str  # A, B or magnitude
    stacked: bool
    stored: tuple[str, ...]

    def to_theirs(self, whole: torch.Tensor) -> torch.Tensor:
        """Our tensor in their shape."""
        if not self.stacked:
            return whole
        if self.part == "A":
            return whole.flatten(0, 1)
        return whole.flatten(1, -2).permute(1, 2, 0).flatten(1, 2)

    def to_ours(self, theirs: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Their tensor in our shape."""
        if not self.stacked or self.part == "A":
            return theirs.reshape(shape)
        experts, rank = shape[0], shape[-1]
        return theirs.reshape(-1, rank, experts).permute(2, 0, 1).reshape(shape)

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape that a tensor has in the library, from ours."""
        first = shapes[0]
        if not self.stacked:
            return (sum(shape[0] for shape in shapes), *first[1:])
        if self.part == "A":
            return (first[0] * first[1], first[2])
        return (prod(first[1:-1]), first[-1] * first[0])


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json is made from: of one stage, or of all."""

    weights: tuple[str, ...]  # the model's names of what is adapted
    modules: tuple[str, ...]  # all modules of the model, by their paths
    inputs_first: bool  # GPT-2's linear layers


def save_adapters(stages: Sequence[Any], mesh: Mesh, peft: Peft, folder: Path, base: str) -> Path:
    """Writes the adapters that all ranks hold together as the peft library would; every rank must call it.

    `base` is the folder or id of the model that was adapted.
    """
    source = LocalTensors(stages, mesh)
    adapters = adapters_in(source.shapes)
    parts = list(_parts(adapters))
    raise_everywhere(_refusal(stages, parts))
    on_first(mesh, lambda: make_folder(folder))
    own = [
        Entry(
            part.name, source.tensors[part.stored[0]].dtype, part.their_shape([source.shapes[n] for n in part.stored])
        )
        for part in parts
    ]
    entries = [entry for those in of_stages(mesh, own) for entry in those]

    def emitted() -> Emitted:
        for part in parts:
            rows = [source.rows(name, 0, source.shapes[name][0]) for name in part.stored]
            have = [one for one in rows if one is not None]
            yield part.name, 0, part.to_theirs(torch.cat(have)) if have else None

    write_in_turns(entries, emitted, folder / TENSORS, mesh)
    said = _joined(of_stages(mesh, _adapter_config(stages, tuple(adapters))))
    on_first(mesh, lambda: write_text(folder / SETTINGS, json.dumps(_settings(said, peft, base), indent=2) + "\n"))
    return folder


def load_adapters(stages: Sequence[Any], folder: Path) -> int:
    """Puts adapters of the peft library's format into those of the stages, each rank its part; how many were read."""
    settings = read_json(folder / SETTINGS)
    files = Files(folder, TENSORS, "adapter_model.safetensors.index.json")
    wanted: set[str] = set()
    for stage in stages:
        tensors = dict(stage.named_parameters())
        parts = list(_parts(adapters_in(tensors)))
        _check_settings(folder, settings, stage, parts)
        for part in parts:
            _fill(part, tensors, files, folder)
        wanted |= {part.name for part in parts}
    layers = {_layer(name) for name in wanted}
    left = [name for name in files.where if name not in wanted and _layer(name) in layers]
    if left:
        raise InputError(
            f"{folder / TENSORS} holds {left[0]} ({len(left)} such tensors), and this run has no adapter there",
            field="peft.targets",
            fix=("name the targets that the adapters were trained with",),
        )
    files.close()
    return len(wanted)


def _parts(adapters: Mapping[str, AdapterNames]) -> Iterator[Part]:
    for weight, names in adapters.items():
        linear = weight.endswith(".weight")
        path = weight.removesuffix(".weight") if linear else weight.rpartition(".")[0]
        if not linear and not weight.endswith("down_proj") and f"{path}.down_proj" in adapters:
            path += ".base_layer"
        for part, stored in names.parts.items():
            end = "lora_magnitude_vector" if part == "magnitude" else f"lora_{part}.weight"
            yield Part(f"{FRONT}{path}.{end}", part, not linear, tuple(stored))


def _refusal(stages: Sequence[Any], parts: Sequence[Part]) -> MeshwrightError | None:
    """Why the library could not read these adapters; None where it can."""
    if not parts:
        return InputError("this model has no adapters to write", field="goal", fix=("goal=peft",))
    kind = str(stages[0].body.config.model_type)
    reason = ""
    if any(part.name.startswith(f"{FRONT}mtp.") for part in parts):
        reason = "adapters of multi-token prediction have no place in the models that the library loads"
    refused = next((m for m in REFUSED.get(kind, ()) if any(f"mixer.{m}." in part.name for part in parts)), None)
    if refused is not None:
        reason = f"the library does not adapt {refused} of {kind}"
    if not reason:
        return None
    return InputError(f"{reason}, so these cannot be written in its format", field="peft.targets", fix=MERGED)


def _adapter_config(stages: Sequence[Any], weights: tuple[str, ...]) -> AdapterConfig:
    modules = tuple(path for stage in stages for path, _ in stage.named_modules() if path)
    inputs_first = any(getattr(module, "lora_inputs_first", False) for stage in stages for module in stage.modules())
    return AdapterConfig(weights, modules, inputs_first)


def _joined(stages: Sequence[AdapterConfig]) -> AdapterConfig:
    return AdapterConfig(
        tuple(weight for one in stages for weight in one.weights),
        tuple(path for one in stages for path in one.modules),
        any(one.inputs_first for one in stages),
    )


def _settings(said: AdapterConfig, peft: Peft, base: str) -> dict[str, Any]:
    """What adapter_config.json says."""
    linears = [weight.removesuffix(".weight") for weight in said.weights if weight.endswith(".weight")]
    experts = {".".join(weight.split(".")[-3:]) for weight in said.weights if not weight.endswith(".weight")}
    beside = [path for path in linears if path.endswith(TAKEN_FOR_EXPERTS)] if _has_experts(said) else []
    parameters = experts | {f"{name}.weight" for name in _short(beside, said.modules)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": peft.rank,
        "lora_alpha": int(peft.alpha) if float(peft.alpha).is_integer() else peft.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": said.inputs_first,
        "use_rslora": peft.method == "rslora",
        "use_dora": peft.method == "dora",
        "target_modules": _short([path for path in linears if path not in beside], said.modules),
        "target_parameters": sorted(parameters) or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _has_experts(said: AdapterConfig) -> bool:
    return any(path.endswith(".experts") for path in said.modules)


def _short(paths: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Names that end the paths of these modules and of no others; whole paths where there are no such names."""
    for words in (1, 2):
        names = {".".join(path.split(".")[-words:]) for path in paths}
        if {one for one in modules if any(f".{one}".endswith(f".{name}") for name in names)} == set(paths):
            return sorted(names)
    return sorted(paths)


def _fill(part: Part, tensors: Mapping[str, torch.Tensor], files: Files, folder: Path) -> None:
    """Reads one tensor and puts what this rank holds of it into our adapter."""
    if part.name not in files.where:
        raise InputError(
            f"{folder / TENSORS} does not hold {part.name}, and this run has an adapter there",
            field="peft.targets",
            fix=("name the targets that the adapters were trained with",),
        )
    shapes = [tuple(tensors[name].shape) for name in part.stored]
    wanted, found = part.their_shape(shapes), files.shape(part.name)
    if wanted != found:
        raise InputError(
            f"{part.name} in {folder / TENSORS} is {found}, and this run's adapter is {wanted}",
            field="peft.rank",
            fix=("the rank and the model that the adapters were trained with",),
        )
    theirs, start = files.read(part.name), 0
    for name, shape in zip(part.stored, shapes, strict=True):
        length = shape[0] if len(part.stored) > 1 else theirs.shape[0]
        ours = part.to_ours(theirs.narrow(0, start, length), shape)
        start += length
        with torch.no_grad():
            for view, box in pieces(tensors[name], Place(name)):
                view.copy_(ours[box])


def _check_settings(folder: Path, settings: Mapping[str, Any], stage: Any, parts: Sequence[Part]) -> None:
    """Refuses adapters that compute otherwise than this run's."""
    if not parts:
        raise InputError("this run has no adapters to fill", field="goal", fix=("goal=peft",))
    if settings.get("peft_type") != "LORA":
        raise _unlike(folder, f"peft_type={settings.get('peft_type')}", "adapters of type LORA")
    for name, plain in (("modules_to_save", None), ("rank_pattern", {}), ("alpha_pattern", {}), ("bias", "none")):
        if settings.get(name) not in (plain, None, {}, []):
            raise _unlike(folder, f"{name}={settings[name]}", f"{name}={plain}")
    dora = any(part.part == "magnitude" for part in parts)
    if bool(settings.get("use_dora")) != dora:
        raise _unlike(folder, f"use_dora={settings.get('use_dora')}", f"peft.method={'dora' if dora else 'lora'}")
    rank, alpha = int(settings.get("r", 8)), float(settings.get("lora_alpha", 8))
    theirs = scale_of(Peft(method="rslora" if settings.get("use_rslora") else "lora", rank=rank, alpha=alpha))
    ours = next(module.lora_scale for module in stage.modules() if hasattr(module, "lora_scale"))
    if abs(theirs - ours) > 1e-6 * abs(theirs):
        raise InputError(
            f"{folder / SETTINGS} scales adapters by {theirs:g} (r={rank}, lora_alpha={alpha:g}), this run by {ours:g}",
            field="peft.alpha",
            fix=(f"peft.rank={rank}", f"peft.alpha={alpha:g}", f"use_rslora={settings.get('use_rslora', False)}"),
        )


def _unlike(folder: Path, theirs: str, ours: str) -> InputError:
    return InputError(
        f"{folder / SETTINGS} says {theirs}, and this run has {ours}",
        field=FIELD,
        value=str(folder),
        fix=("a recipe with the adapters' own settings",),
    )


def _layer(name: str) -> str:
    """What tells the layers of a model apart in a name: a stage reads only its own."""
    found = re.search(r"\.(?:layers|h)\.\d+\.", name)
    return found.group(0) if found else ""

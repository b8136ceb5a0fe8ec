"""Linear layers that compute in 8 bits or through tuned products; weights keep their names and formats.

Eight bits are for the linear layers of the decoder. The embedding, the head and vision towers are never asked; routers
are left out, and so are experts, whose grouped products have no 8-bit form here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.engine.experts import expert_blocks
from meshwright.engine.kernels.device_caps import DRY, capability, is_gpu
from meshwright.engine.kernels.fp8 import MULTIPLE, Scaling
from meshwright.engine.kernels.linears import FP8_PATCHES, divides, tune_linears
from meshwright.engine.kernels.mxfp8 import CAPABILITY
from meshwright.engine.kernels.residuals import fold_residuals
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.adapters import is_linear, patch_base, tune_adapters
from meshwright.engine.model.stage import Stage
from meshwright.engine.patching import apply
from meshwright.errors import InputError
from meshwright.recipes.types import Precision, Recipe

SCALINGS: dict[str, Scaling] = {"fp8_tensor": "tensor", "fp8_row": "row", "mxfp8": "mx"}


@dataclass(frozen=True)
class LowPrecision:
    """What of a stage computes in 8 bits, and what does not, with the reason."""

    matmul: str
    low: tuple[str, ...]
    kept: Mapping[str, str]  # module -> why it stays in the format of the rest

    def told(self) -> list[str]:
        """It in words: one line for what computes in 8 bits and one for each kind of layer that does not."""
        count = f"{len(self.low)} linear layer{'s' * (len(self.low) != 1)}"
        kinds = Counter((_kind(name), why) for name, why in self.kept.items())
        stay = [
            f"{kind} ({number} of them) computes in the format of the rest: {why}"
            for (kind, why), number in kinds.items()
        ]
        return [f"precision.matmul={self.matmul}: {count} compute in 8 bits", *stay]


def apply_fp8(stage: Stage, precision: Precision, layers: int, device_type: str = "cuda") -> None:
    """Makes the linear layers of a stage compute as the recipe says; `stage.low_precision` says which do."""
    if precision.matmul == "same":
        return
    _check_offered(precision.matmul, device_type)
    scaling = SCALINGS[precision.matmul]
    low: list[str] = []
    kept: dict[str, str] = {}
    for number, layer in stage.layers.items():
        spared = precision.first_last_bf16 and number in (0, layers - 1)
        for path, module, why in _candidates(layer, scaling):
            name = f"layers.{number}.{path}"
            if why or spared:
                kept[name] = why or "precision.first_last_bf16 spares the first and last layer"
                continue
            _lower(module, scaling)
            low.append(name)
    stage.low_precision = LowPrecision(precision.matmul, tuple(low), kept)  # type: ignore[assignment]  # no module


def describe(stages: list[Stage]) -> list[str]:
    """What computes in 8 bits on this rank and what does not, in words; nothing where no 8 bits are asked for."""
    found: list[Any] = [getattr(stage, "low_precision", None) for stage in stages]
    return [line for one in found if one is not None for line in one.told()]


def _check_offered(matmul: str, device_type: str) -> None:
    if matmul not in SCALINGS:
        raise InputError(
            f"the engine computes linear layers in {', '.join(SCALINGS)} or as the rest",
            field="precision.matmul",
            value=matmul,
            fix=("precision.matmul=fp8_tensor", "precision.matmul=same"),
        )
    dry = device_type == DRY
    if matmul == "mxfp8" and (dry or torch.cuda.is_available()) and capability(DRY if dry else None) < CAPABILITY:
        raise InputError(
            f"{'the GPU' if dry else torch.cuda.get_device_name()} has no products with a scale for each block of 32",
            field="precision.matmul",
            value=matmul,
            fix=("precision.matmul=fp8_row", "precision.matmul=fp8_tensor"),
        )


def _candidates(layer: nn.Module, scaling: Scaling) -> Iterator[tuple[str, nn.Module, str]]:
    """Every module of a layer that multiplies by weights, and why it cannot do so in 8 bits; empty where it can."""
    blocks = list(expert_blocks(layer))
    routers = {id(part) for block in blocks for part in block.router.modules()}
    experts = {id(block.experts) for block in blocks}
    shapes = dict(_shapes(layer))
    for path, module in list(layer.named_modules()):
        if id(module) in routers:
            if any(True for _ in module.parameters(recurse=False)):
                yield path, module, "a router chooses experts by small differences"
        elif id(module) in experts:
            yield path, module, "the grouped products of experts have no 8-bit form here"
        elif is_linear(module):
            yield path, module, _reason(module, shapes.get(id(module)), scaling)


def _reason(linear: Any, shape: tuple[int, ...] | None, scaling: Scaling) -> str:
    if not isinstance(linear, nn.Linear):
        return "its weight is stored transposed"
    shape = tuple(linear.weight.shape) if shape is None else shape
    if not divides(shape, scaling):
        return f"its weight of {' × '.join(map(str, shape))} on a rank is not in steps of {MULTIPLE[scaling]}"
    return ""


@torch.no_grad()
def _shapes(layer: nn.Module) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The shape that the weights of a cut module have where they are used."""
    for module in layer.modules():
        uses: Any = getattr(module, "region_uses", ())
        for use in uses:
            if use.attribute == "weight":
                owner = module.get_submodule(use.child)
                parts = [use.make(getattr(owner, name)) for name in use.stored]
                yield id(owner), tuple(torch.cat(parts, use.dim).shape)


def _lower(linear: Any, scaling: Scaling) -> None:
    if hasattr(linear, "lora_A"):
        patch_base(linear, FP8_PATCHES[scaling])
    else:
        apply(linear, FP8_PATCHES[scaling])


def _kind(name: str) -> str:
    """A module's name without the number of its layer."""
    return name.split(".", 2)[2]


def select_gemm_kernels(stage: Stage, recipe: Recipe, mesh: Mesh) -> None:
    """On Hopper, bf16 products by kernels that hold their speed at the power limit: 1.5 % of a step of Llama 3 8B."""
    plain = recipe.precision.compute == "bf16" and recipe.precision.matmul == "same"
    if not (plain and recipe.kernels.compile and _is_hopper(mesh)):
        return
    for layer in stage.layers.values():
        if recipe.goal == "peft":
            tune_adapters(layer)
            continue
        tune_linears(layer)
        if mesh.tp.size == 1:  # with tp the sum over ranks comes before the residual
            fold_residuals(layer)


def _is_hopper(mesh: Mesh) -> bool:
    return is_gpu(mesh.device_type) and capability(mesh.device_type) == (9, 0)

"""fp8 and tuned GEMMs for linear layers; weights keep their names and dtypes.

fp8 is for the linear layers of the decoder. The embedding, the head and the vision encoder are never considered;
routers stay in the compute dtype, and so do experts, unless MESHWRIGHT_FP8_EXPERTS=1 tries their grouped GEMM in fp8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.engine.experts import expert_blocks
from meshwright.engine.kernels import fp8_grouped
from meshwright.engine.kernels.device_caps import DRY, capability, is_gpu
from meshwright.engine.kernels.fp8 import MULTIPLE, Scaling
from meshwright.engine.kernels.linears import FP8_PATCHES, is_divisible, tune_linears
from meshwright.engine.kernels.mxfp8 import CAPABILITY
from meshwright.engine.kernels.residuals import fuse_residuals
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.adapters import is_linear, patch_base, tune_adapters
from meshwright.engine.model.stage import Stage
from meshwright.engine.patching import apply
from meshwright.errors import InputError
from meshwright.recipes.types import Precision, Recipe

SCALINGS: dict[str, Scaling] = {"fp8_tensor": "tensor", "fp8_row": "row", "mxfp8": "mx"}


@dataclass(frozen=True)
class LowPrecision:
    """Which linear layers of a stage compute in fp8, and why the others do not."""

    matmul: str
    converted: tuple[str, ...]
    skipped: Mapping[str, str]  # module -> reason

    def describe(self) -> list[str]:
        """Return one line for the layers in fp8 and one for each skipped layer name."""
        count = f"{len(self.converted)} linear layer{'s' * (len(self.converted) != 1)}"
        names = Counter((_name_in_layer(name), reason) for name, reason in self.skipped.items())
        skipped = [f"{name} ({number}x) stays in the compute dtype: {why}" for (name, why), number in names.items()]
        return [f"precision.matmul={self.matmul}: {count} in fp8", *skipped]


def apply_fp8(stage: Stage, precision: Precision, layers: int, device_type: str = "cuda") -> None:
    """Patch the linear layers of a stage for fp8; `stage.low_precision` lists them."""
    if precision.matmul == "same":
        return
    _check_supported(precision.matmul, device_type)
    scaling = SCALINGS[precision.matmul]
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for number, layer in stage.layers.items():
        excluded = precision.first_last_bf16 and number in (0, layers - 1)
        for path, module, reason in _candidates(layer, scaling):
            name = f"layers.{number}.{path}"
            if reason or excluded:
                skipped[name] = reason or "precision.first_last_bf16 excludes the first and last layer"
                continue
            _convert(module, scaling)
            converted.append(name)
    report = LowPrecision(precision.matmul, tuple(converted), skipped)
    stage.low_precision = report  # type: ignore[assignment]  # not a module


def describe(stages: list[Stage]) -> list[str]:
    """Return lines that say which linear layers of this rank compute in fp8; empty without fp8."""
    reports: list[Any] = [getattr(stage, "low_precision", None) for stage in stages]
    return [line for report in reports if report is not None for line in report.describe()]


def _check_supported(matmul: str, device_type: str) -> None:
    if matmul not in SCALINGS:
        raise InputError(
            f"the engine supports {', '.join(SCALINGS)} and same",
            field="precision.matmul",
            value=matmul,
            fix=("precision.matmul=fp8_tensor", "precision.matmul=same"),
        )
    dry = device_type == DRY
    if matmul == "mxfp8" and (dry or torch.cuda.is_available()) and capability(DRY if dry else None) < CAPABILITY:
        raise InputError(
            f"{'the GPU' if dry else torch.cuda.get_device_name()} has no MXFP8 tensor cores (one scale per 32 values)",
            field="precision.matmul",
            value=matmul,
            fix=("precision.matmul=fp8_row", "precision.matmul=fp8_tensor"),
        )


def _candidates(layer: nn.Module, scaling: Scaling) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield every module of a layer that multiplies by weights, and why it cannot use fp8 (empty if it can)."""
    blocks = list(expert_blocks(layer))
    routers = {id(part) for block in blocks for part in block.router.modules()}
    experts = {id(block.experts) for block in blocks}
    shapes = dict(_local_shapes(layer))
    for path, module in list(layer.named_modules()):
        if id(module) in routers:
            if any(True for _ in module.parameters(recurse=False)):
                yield path, module, "a router chooses experts by small differences"
        elif id(module) in experts:
            yield path, module, _experts_reason(scaling)
        elif is_linear(module):
            yield path, module, _reason(module, shapes.get(id(module)), scaling)


def _experts_reason(scaling: Scaling) -> str:
    if scaling != "row":
        return "the grouped GEMM of experts has fp8 with scales per row only"
    if not fp8_grouped.is_enabled():
        return f"the grouped GEMM of experts in fp8 is not measured yet; {fp8_grouped.SWITCH}=1 tries it"
    return ""


def _reason(linear: Any, shape: tuple[int, ...] | None, scaling: Scaling) -> str:
    if not isinstance(linear, nn.Linear):
        return "its weight is stored transposed"
    shape = tuple(linear.weight.shape) if shape is None else shape
    if not is_divisible(shape, scaling):
        return f"its local weight of {' × '.join(map(str, shape))} is not a multiple of {MULTIPLE[scaling]}"
    return ""


@torch.no_grad()
def _local_shapes(layer: nn.Module) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the local shapes of the weights of tensor-parallel modules, by the id of their owner."""
    for module in layer.modules():
        params: Any = getattr(module, "tp_params", ())
        for param in params:
            if param.attribute == "weight":
                owner = module.get_submodule(param.child)
                local = [param.make(getattr(owner, name)) for name in param.stored]
                yield id(owner), tuple(torch.cat(local, param.dim).shape)


def _convert(linear: Any, scaling: Scaling) -> None:
    if hasattr(linear, "is_concatenated"):  # experts
        linear.fp8_rows = True
    elif hasattr(linear, "lora_A"):
        patch_base(linear, FP8_PATCHES[scaling])
    else:
        apply(linear, FP8_PATCHES[scaling])


def _name_in_layer(name: str) -> str:
    return name.split(".", 2)[2]


def select_gemm_kernels(stage: Stage, recipe: Recipe, mesh: Mesh) -> None:
    """Use bf16 GEMM kernels that keep their speed at a Hopper GPU's power limit: 1.5 % of a Llama 3 8B step."""
    plain = recipe.precision.compute == "bf16" and recipe.precision.matmul == "same"
    if not (plain and recipe.kernels.compile and _is_hopper(mesh)):
        return
    for layer in stage.layers.values():
        if recipe.goal == "peft":
            tune_adapters(layer)
            continue
        tune_linears(layer)
        if mesh.tp.size == 1:  # with tp the reduction over ranks comes before the residual
            fuse_residuals(layer)


def _is_hopper(mesh: Mesh) -> bool:
    return is_gpu(mesh.device_type) and capability(mesh.device_type) == (9, 0)

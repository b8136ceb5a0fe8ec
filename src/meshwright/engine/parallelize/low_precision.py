"""Linear layers that compute in 8 bits or through tuned products; weights keep their names and formats."""

from __future__ import annotations

import torch

from meshwright.engine.kernels.linears import tune_linears, use_fp8
from meshwright.engine.kernels.residuals import fold_residuals
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.adapters import tune_adapted
from meshwright.engine.model.stage import Stage
from meshwright.errors import InputError
from meshwright.recipes.types import Precision, Recipe

OFFERED = ("fp8_tensor",)


def compute_low(stage: Stage, precision: Precision, layers: int) -> None:
    """Makes the linear layers of a stage compute as the recipe says; the first and last layer may stay out of it."""
    if precision.matmul == "same":
        return
    if precision.matmul not in OFFERED:
        raise InputError(
            f"the engine computes linear layers in {', '.join(OFFERED)} or as the rest",
            field="precision.matmul",
            value=precision.matmul,
            fix=("precision.matmul=fp8_tensor", "precision.matmul=same"),
        )
    for number, layer in stage.layers.items():
        if not (precision.first_last_bf16 and number in (0, layers - 1)):
            use_fp8(layer)


def tune(stage: Stage, recipe: Recipe, mesh: Mesh) -> None:
    """On Hopper, bf16 products by kernels that hold their speed at the power limit: 1.5 % of a step of Llama 3 8B."""
    plain = recipe.precision.compute == "bf16" and recipe.precision.matmul == "same"
    if not (plain and recipe.kernels.compile and _is_hopper(mesh)):
        return
    for layer in stage.layers.values():
        if recipe.goal == "peft":
            tune_adapted(layer)
            continue
        tune_linears(layer)
        if mesh.tp.size == 1:  # with tp the sum over ranks comes before the residual
            fold_residuals(layer)


def _is_hopper(mesh: Mesh) -> bool:
    return mesh.device_type == "cuda" and torch.cuda.get_device_capability() == (9, 0)

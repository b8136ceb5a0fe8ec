"""Linear layers that compute in 8 bits; weights keep their names and formats."""

from __future__ import annotations

from meshwright.engine.kernels.linears import use_fp8
from meshwright.engine.model.stage import Stage
from meshwright.errors import InputError
from meshwright.recipes.types import Precision

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

"""The initial weights of a model folder."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule


@rule(
    "weights.quantized",
    "error",
    "pretrained",
    engines=("meshwright",),
    message="the weights in the model's folder are quantized: {reason}",
    symptom="the run ends with an error before the weights are read",
    cause="training starts from weights in a float format; of the quantized folders only mxfp4 and fp8 are dequantized",
    values={"reason": lambda c: c.model.quantization.reason if c.model.quantization else ""},
)
def unreadable_quantization(c: Case) -> Column:
    found = c.model.quantization
    return found is not None and bool(found.reason) and (c.goal != "pretrain") & (c.pretrained == "")

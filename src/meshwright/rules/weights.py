"""The initial weights of a model folder."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule


def loads_weights(c: Case) -> Column:
    """Return whether training starts from trained weights: fine-tuning does, pretraining if it names some."""
    return np.where(c.goal == "pretrain", c.pretrained != "", True) & (c.pretrained != "random")


@rule(
    "weights.init-std-unused",
    "warning",
    "init_std",
    message="init_std={init_std} has no effect: training starts from pretrained weights",
    symptom="the setting changes nothing but adapters and weights that the folder lacks",
    cause="the standard deviation is that of random initial weights",
    fixes=({"init_std": [0.0]},),
)
def unused_init_std(c: Case) -> Column:
    return (c.init_std > 0) & loads_weights(c)


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

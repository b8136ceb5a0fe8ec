"""Decides by name and shape which parameters get weight decay and which are hidden matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

# Last part of the name; biases of experts have two or three dimensions, so the number of dimensions is not enough.
VECTORS = ("bias", "A_log", "D", "dt_bias", "sinks")
# Embeddings and output heads: their rows are tokens or classes, so Muon does not apply to them.
TABLES = ("embed", "wte", "wpe", "lm_head", "score", "classifier")
EXPERTS = ".experts."


def decays(name: str, parameter: Parameter) -> bool:
    """Whether weight decay applies to a parameter: to matrices, not to biases, norms or other vectors."""
    last = name.rpartition(".")[2]
    return parameter.ndim >= 2 and last not in VECTORS and not last.endswith("_bias") and "norm" not in name.lower()


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Whether a parameter maps hidden states to hidden states: a 2-D weight, or stacked experts."""
    if not decays(name, parameter) or any(table in part for part in name.split(".") for table in TABLES):
        return False
    return parameter.ndim == 2 or EXPERTS in f".{name}."


def decay_groups(parameters: Iterable[tuple[str, Parameter]], weight_decay: float, rule: str) -> list[dict[str, Any]]:
    """Return the non-empty parameter groups of one update rule, with and without weight decay."""
    split: dict[bool, list[Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        split[decays(name, parameter)].append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decay else 0.0, "rule": rule}
        for decay, members in split.items()
        if members
    ]

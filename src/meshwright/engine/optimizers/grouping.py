"""Which parameters decay and which are hidden matrices: read from Hugging Face's names and the shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

# Last part of the name; a bias of experts has two or three dimensions, so dimensions alone do not tell.
VECTORS = ("bias", "A_log", "D", "dt_bias", "sinks")
# Lookup tables and read-outs: their rows are words, not directions of one space, so they are no hidden matrices.
TABLES = ("embed", "wte", "wpe", "lm_head", "score", "classifier")
EXPERTS = ".experts."


def decays(name: str, parameter: Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to biases, norms or other vectors."""
    last = name.rpartition(".")[2]
    return parameter.ndim >= 2 and last not in VECTORS and not last.endswith("_bias") and "norm" not in name.lower()


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Whether a parameter maps hidden states to hidden states: a 2-D weight, or stacked experts."""
    if not decays(name, parameter) or any(table in part for part in name.split(".") for table in TABLES):
        return False
    return parameter.ndim == 2 or EXPERTS in f".{name}."


def decay_groups(parameters: Iterable[tuple[str, Parameter]], weight_decay: float, rule: str) -> list[dict[str, Any]]:
    """Parameter groups of one update rule: those that decay and those that do not; empty ones are left out."""
    split: dict[bool, list[Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        split[decays(name, parameter)].append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decay else 0.0, "rule": rule}
        for decay, members in split.items()
        if members
    ]

"""Builds a rank's optimizer from the recipe; parameters may be sharded in any way."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from meshwright.engine.optimizers.base import LocalOptimizer
from meshwright.engine.optimizers.eight_bit import AdamW8bit
from meshwright.engine.optimizers.elementwise import AdamW, Lion, ScheduleFreeAdamW, Sgd
from meshwright.engine.optimizers.grouping import decay_groups, is_hidden_matrix
from meshwright.engine.optimizers.muon import Muon
from meshwright.errors import InputError
from meshwright.recipes.types import Optimizer, Precision

__all__ = ["LocalOptimizer", "build_optimizer"]

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]], optimizer: Optimizer, precision: Precision, device_type: str
) -> LocalOptimizer:
    """Return the recipe's optimizer over the trainable parameters, grouped by update rule and weight decay.

    The trainer sets group["lr"] before every step, to the schedule's learning rate times group["lr_scale"].
    """
    parameters = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    lr, betas, eps = optimizer.lr, (optimizer.beta1, optimizer.beta2), optimizer.eps
    moments = MOMENTS[precision.moments]
    if optimizer.name == "muon":
        return _muon(parameters, optimizer, moments, device_type)
    groups = decay_groups(parameters, optimizer.weight_decay, optimizer.name)
    if optimizer.name == "lion":
        return Lion(groups, lr, betas, moments)
    if optimizer.name == "sgd":
        return Sgd(groups, lr, optimizer.beta1, moments)
    if optimizer.name == "adamw8bit":
        return AdamW8bit(groups, lr, betas, eps)
    if optimizer.name == "adamw":
        return AdamW(groups, lr, betas, eps, moments)
    if not optimizer.beta1:
        raise InputError(
            "must not be 0: schedule-free AdamW divides by beta1 to compute the weights for evaluation",
            field="optimizer.beta1",
            value=optimizer.beta1,
            fix=("optimizer.beta1=0.9",),
        )
    return ScheduleFreeAdamW(groups, lr, betas, eps)


def _muon(
    parameters: list[tuple[str, Parameter]], optimizer: Optimizer, moments: torch.dtype, device_type: str
) -> Muon:
    hidden = [(name, one) for name, one in parameters if is_hidden_matrix(name, one)]
    rest = [(name, one) for name, one in parameters if not is_hidden_matrix(name, one)]
    decay = optimizer.weight_decay
    return Muon(
        [*decay_groups(hidden, decay, "muon"), *decay_groups(rest, decay, "adamw")],
        optimizer.lr,
        (optimizer.beta1, optimizer.beta2),
        optimizer.eps,
        moments,
        optimizer.muon_momentum,
        optimizer.muon_ns_steps,
        device_type,
    )

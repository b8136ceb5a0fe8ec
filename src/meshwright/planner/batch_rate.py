"""The learning rate of another batch: scaled where the result is usual for the model, else unchanged."""

from __future__ import annotations

from math import sqrt
from typing import Literal

from meshwright import rules
from meshwright.recipes.case import Case
from meshwright.rules import SEVERITIES
from meshwright.rules.learning_rate import is_above_usual

LrLaw = Literal["sqrt", "linear"]
LAWS: tuple[LrLaw, ...] = ("sqrt", "linear")


def scaled_lr(lr: float, old_batch: int, new_batch: int, law: LrLaw = "sqrt") -> float:
    """Return the learning rate for another batch size: scaled by the square root (Adam) or linearly (SGD)."""
    ratio = new_batch / old_batch
    return float(f"{lr * (sqrt(ratio) if law == 'sqrt' else ratio):.3g}")


def high_lr_rules(case: Case) -> list[rules.Rule]:
    """Return the rules on the learning rate itself that the case breaks."""
    on_lr = [one for one in rules.applicable(case, SEVERITIES) if one.field == "lr"]
    return [one for one in on_lr if bool(one.broken(case))]


def is_too_high(case: Case, lr: float) -> bool:
    """Return whether a scaled learning rate is above what models of this size are trained with, or a rule refuses."""
    scaled = case.replace(lr=lr)
    return bool(is_above_usual(scaled)) or bool(high_lr_rules(scaled))


def lr_of_batch(case: Case, batch: int) -> float:
    """Return the learning rate of a case with another batch."""
    lr = scaled_lr(float(case.lr), int(case.global_batch_size), batch)
    return float(case.lr) if is_too_high(case, lr) else lr

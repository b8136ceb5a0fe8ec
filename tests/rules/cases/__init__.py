"""For every rule, a case that breaks it and the smallest change that resolves it."""

from __future__ import annotations

from meshwright.recipes.case import Case

from ..helpers import case
from . import capabilities, mesh, training

CASES = {**mesh.CASES, **training.CASES, **capabilities.CASES}

# Rules that no override can satisfy: they need another goal or engine.
WITHOUT_FIX = {"diffusion.adapters", "engine.model-not-trained", "peft.engine", "peft.qwen3-next", "weights.quantized"}


def broken_case(rule_id: str) -> Case:
    return case(**CASES[rule_id][0])


def sound_case(rule_id: str) -> Case:
    broken, change = CASES[rule_id]
    return case(**{**broken, **change})

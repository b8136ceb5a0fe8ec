"""Select the shipped recipe that a plan starts from."""

from __future__ import annotations

from math import log2
from typing import Literal

from meshwright import models
from meshwright.clusters import gpu
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.planner.plan import Question
from meshwright.recipes import index
from meshwright.recipes.index import IndexEntry
from meshwright.recipes.types import Recipe

BaselineSource = Literal["same_model", "closest", "derived"]


def find_baseline_recipe(question: Question) -> tuple[Recipe, BaselineSource]:
    """Return the model's recipe for the goal, else that of the closest model; "derived" for a user's model."""
    matching = [
        e for e in index.entries(question.benchmark) if (e.model, e.goal) == (question.model_ref, question.goal)
    ]
    if matching:
        return index.load(_preferred(matching, question).name), "same_model"
    if question.benchmark:
        raise InputError(
            f"{question.model.name} has no benchmark recipe for goal {question.goal}",
            field="benchmark",
            value="true",
            fix=("remove --benchmark", f"meshwright recipes --benchmark --goal {question.goal}"),
        )
    near = index.closest(question.model, question.goal, question.seq_length)
    if models.find(near.model).kind != question.model.kind:
        raise InputError(
            f"no recipe trains a {model_kind_label(question.model)} model with goal {question.goal}",
            field="goal",
            value=question.goal,
            fix=tuple(f"--goal {g}" for g in ("pretrain", "sft", "peft") if g != question.goal),
        )
    return index.load(near.name), "closest" if question.model_ref in models.names() else "derived"


def model_kind_label(model: ModelSpec) -> str:
    """Return the model kind as text for messages."""
    return {"causal_lm": "language", "vision_language": "vision-language", "diffusion": "diffusion"}[model.kind]


def _preferred(entries: list[IndexEntry], question: Question) -> IndexEntry:
    """Return the best of a model's recipes: same GPU type, nearest sequence length and GPU count, shortest name."""
    return min(
        entries,
        key=lambda e: (
            question.benchmark and e.gpu != question.cluster.gpu.name,
            question.benchmark and gpu(e.gpu).arch != question.cluster.gpu.arch,
            abs(log2(e.seq_length / question.seq_length)) if question.seq_length else 0,
            question.benchmark and abs(log2(e.gpus / question.cluster.world)),
            len(e.name),
            e.name,
        ),
    )

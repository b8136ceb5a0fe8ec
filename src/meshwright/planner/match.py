"""Select the shipped recipe that a plan starts from."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any, Literal

from meshwright import models
from meshwright.clusters import cluster, gpu
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.planner.plan import Question
from meshwright.recipes import index
from meshwright.recipes.index import IndexEntry
from meshwright.recipes.types import Recipe

BaselineSource = Literal["same_model", "closest", "derived"]


PURPOSES = ("production", "trial", "smoke_test")
"""Best base of a plan first; a short run is the base only on its own cluster, or if its model has no other recipe."""


def find_baseline_recipe(question: Question, wanted: Mapping[str, Any] | None = None) -> tuple[Recipe, BaselineSource]:
    """Return the model's recipe for the goal, else that of the closest model; "derived" for a user's model.

    `wanted` are values the user sets by key: a recipe in fp8 or with another optimizer is chosen only for them.
    """
    name = models.catalogue_name(question.model_ref)
    matching = [e for e in index.entries(question.benchmark) if (e.model, e.goal) == (name, question.goal)]
    if matching:
        return index.load(_preferred(matching, question, wanted or {}).name), "same_model"
    if question.benchmark:
        raise InputError(
            f"{question.model.name} has no benchmark recipe for goal {question.goal}",
            field="benchmark",
            value="true",
            fix=("remove --benchmark", f"meshwright recipes --benchmark --goal {question.goal}"),
        )
    near = index.closest(question.model, question.goal, question.seq_length)
    if models.find(near.model).kind != question.model.kind:
        others = tuple(f"--goal {g}" for g in ("pretrain", "sft", "peft") if g != question.goal)
        reason = f"no recipe trains a {model_kind_label(question.model)} model with goal {question.goal}"
        if question.model.kind == "vision_language":
            reason += "; on plain text (a text column, or .txt files) sft trains all weights, and peft adapters"
            others = tuple(f"{one} data.images=false" for one in others)
        raise InputError(reason, field="goal", value=question.goal, fix=others)
    return index.load(near.name), "closest" if name is not None else "derived"


def model_kind_label(model: ModelSpec) -> str:
    """Return the model kind as text for messages."""
    return {"causal_lm": "language", "vision_language": "vision-language", "diffusion": "diffusion"}[model.kind]


def _preferred(entries: list[IndexEntry], question: Question, wanted: Mapping[str, Any]) -> IndexEntry:
    """Return the best of a model's recipes: the one made for this cluster, else the nearest full training."""
    rank = _benchmark_rank if question.benchmark else _library_rank
    shortest = min(e.seq_length for e in entries)
    length = question.seq_length or wanted.get("data.seq_length") or (0 if question.benchmark else shortest)
    return min(entries, key=lambda e: (*_variant(e, wanted), *rank(e, question, length), len(e.name), e.name))


def _variant(entry: IndexEntry, wanted: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a recipe has another precision or optimizer than the user asks for (16 bits, AdamW)."""
    matmul, optimizer = wanted.get("precision.matmul", "same"), wanted.get("optimizer.name", "adamw")
    return entry.matmul != matmul, entry.optimizer != optimizer


def _library_rank(entry: IndexEntry, question: Question, length: int) -> tuple[Any, ...]:
    """Rank by sequence length, then the very cluster, then purpose, GPU type and GPU count."""
    on = question.cluster
    same_gpus = (entry.gpu, entry.gpus) == (on.gpu.name, on.world)
    same_nodes = same_gpus and cluster(index.load(entry.name).cluster).gpus_per_node == on.gpus_per_node
    return (
        _doublings(entry.seq_length, length),
        not same_nodes,
        not same_gpus,
        PURPOSES.index(entry.purpose),
        entry.gpu != on.gpu.name,
        _doublings(entry.gpus, on.world),
    )


def _benchmark_rank(entry: IndexEntry, question: Question, length: int) -> tuple[Any, ...]:
    """Rank by GPU type and architecture, then sequence length and GPU count."""
    on = question.cluster
    return (
        entry.gpu != on.gpu.name,
        gpu(entry.gpu).arch != on.gpu.arch,
        _doublings(entry.seq_length, length) if length else 0.0,
        _doublings(entry.gpus, on.world),
    )


def _doublings(value: int, other: int) -> float:
    return abs(log2(value / other))

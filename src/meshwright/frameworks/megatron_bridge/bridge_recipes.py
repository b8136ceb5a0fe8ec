"""The recipes that Megatron-Bridge ships (recipes.tsv), as recipes here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.model_match import find_model
from meshwright.recipes import overrides
from meshwright.recipes.build import balanced_by_bias
from meshwright.recipes.types import Goal, Recipe, keys_by_flat_name, recipe_fields
from meshwright.recipes.values import parse

"""Checkpoints to keep where Megatron-Bridge keeps all (-1)."""

COMMON: dict[str, dict[str, Any]] = {
    "pretrain": {"global_batch_size": 32, "micro_batch_size": 2, "eval_every": 500, "save_every": 500},
    "sft": {
        "dataset": "squad",
        "packing": True,
        "seq_length": 2048,
        "global_batch_size": 128,
        "steps": 1000,
        "seed": 5678,
        "lr": 5e-6,
        "min_lr": 0.0,
        "warmup_steps": 50,
        "beta2": 0.98,
        "eval_every": 100,
        "save_every": 100,
        "log_every": 1,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    },
}
COMMON["peft"] = {**COMMON["sft"], "lr": 1e-4}
ALL_RECIPES: dict[str, Any] = {"strategy": "zero1", "keep": KEEP_ALL, "async_save": False}
BENCHMARK: dict[str, Any] = {
    "dataset": "mock",
    "steps": 50,
    "check_nan": False,
    "warmup_steps": 10,
    "log_every": 1,
    "eval_every": 0,
    "save_every": 0,
    "grads": "bf16",
    "reduce": "bf16",
    "async_save": True,  # nothing is saved
}
"""Changes of every benchmark recipe."""


class BridgeRecipe(msgspec.Struct, frozen=True):
    """One recipe function of Megatron-Bridge."""

    name: str
    aliases: tuple[str, ...]  # older names that can still be imported
    goal: Goal
    model: str  # Hugging Face id, if it has one
    gpus: int | None  # from its name, or else its layout
    gpu: str
    benchmark: bool
    marks: tuple[str, ...]
    settings: str  # differences from the common recipe of its goal, as flat field names

    @property
    def raises(self) -> bool:
        """Whether the recipe function raises."""
        return "raises" in self.marks

    @property
    def null_vocabulary(self) -> int | None:
        """Vocabulary size that its NullTokenizer sets instead of the model's, if any."""
        return next((int(mark[5:]) for mark in self.marks if mark.startswith("null=")), None)

    @property
    def model_length(self) -> int | None:
        """Length that it gives the model, if its dataset has another: the runner trains with the dataset's."""
        return next((int(mark[7:]) for mark in self.marks if mark.startswith("length=")), None)

    @property
    def precision_is_a_name(self) -> bool:
        """Whether mixed_precision is a preset name without fields to set."""
        return "object" not in self.marks

    @property
    def precision_aware(self) -> bool:
        """Whether its optimizer supports states in formats other than fp32."""
        return "aware" in self.marks

    @property
    def packs_in_batch(self) -> bool:
        """Whether samples are packed inside a batch."""
        return "in-batch" in self.marks

    def recipe(self) -> Recipe:
        """Return it as a recipe."""
        base = common(self.goal, self.benchmark)
        named = msgspec.structs.replace(base, name=self.name, cluster=self.cluster)
        if balanced_by_bias(model_of(self), self.goal):
            named = overrides.change(named, {"moe.balancing": "bias"})[0]
        return overrides.change(named, dict(_typed(pair) for pair in self.settings.split()))[0]

    @property
    def cluster(self) -> str:
        """The GPUs that the name gives."""
        return f"{self.gpus}x{self.gpu}" if self.gpus and self.gpu else ""


def _typed(pair: str) -> tuple[str, Any]:
    flat, _, text = pair.partition("=")
    key = keys_by_flat_name()[flat]
    return key, parse(recipe_fields()[key], text, key)


@cache
def common(goal: Goal, benchmark: bool = False) -> Recipe:
    """Return the common base recipe of a goal."""
    values = {**ALL_RECIPES, **COMMON[goal], **(BENCHMARK if benchmark else {})}
    blank = Recipe(name="", model="", goal=goal, cluster="", benchmark=benchmark)
    return overrides.change(blank, {keys_by_flat_name()[flat]: value for flat, value in values.items()})[0]


@cache
def _lines() -> dict[str, tuple[str, bool]]:
    """Return the data line for every name; if two packages share a name, the runner uses the benchmark."""
    found: dict[str, tuple[str, bool]] = {}
    rows = Path(__file__).with_name("recipes.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for row in rows:
        name, aliases, *_ = row.split("\t", 2)
        found[name] = (row, True)
        for alias in aliases.split():
            found.setdefault(alias, (row, False))
    return found


def names() -> tuple[str, ...]:
    """Return every name that `--recipe` accepts."""
    return tuple(_lines())


def find(name: str) -> BridgeRecipe | None:
    """Return the recipe with this name (case-sensitive)."""
    line = _lines().get(name)
    if line is None:
        return None
    recipe, aliases, goal, model, gpus, gpu, category, marks, settings = line[0].split("\t")
    return BridgeRecipe(
        name=recipe,
        aliases=tuple(aliases.split()),
        goal=goal,  # type: ignore[arg-type]  # a test checks the data file
        model=model,
        gpus=int(gpus) if gpus else None,
        gpu=gpu,
        benchmark=category == "benchmark",
        marks=tuple(marks.split()),
        settings=settings,
    )


@cache
def library() -> tuple[BridgeRecipe, ...]:
    """Return the recipes that are not benchmarks."""
    found = [row for name in _lines() if (row := find(name)) is not None and not row.benchmark]
    return tuple({row.name: row for row in found}.values())  # one whose name is also a benchmark's has an alias


@cache
def _model_name(hf_id: str) -> str:
    found = find_model(hf_id)
    return found.name if found else ""


def model_of(row: BridgeRecipe) -> str:
    """Return the catalog name of a recipe's model, or an empty string."""
    return _model_name(row.model)


GPUS_IN_NAME = re.compile(r"_(\d+)gpu_([a-z]+\d+)_")


def gpus_in_name(name: str) -> tuple[int, str] | None:
    """Return the number and type of GPUs in a recipe name."""
    found = GPUS_IN_NAME.search(name)
    return (int(found[1]), found[2].upper()) if found else None

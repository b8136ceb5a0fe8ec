"""Trains a tiny version of a recipe on two processes and on one, and compares the two."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.engine import processes
from meshwright.engine.model_families import ModelFamily, family_of
from meshwright.engine.run_spec import RankSpec, RunSpec
from meshwright.engine.tiny import tiny_recipe
from meshwright.engine.train import preloaded, with_tiny_weights
from meshwright.engine.validate import data_ranks, validate
from meshwright.engine.worker import RunMetrics, run_rank
from meshwright.recipes.types import Kernels, Layout, Recipe

RANKS = 2
STEPS = {"pretrain": 6, "sft": 6, "peft": 12}  # adapters start at zero and take longer
TIMEOUT_S = 900.0
AXES = ("tp", "pp", "vp", "cp", "ep", "etp")


class TinyRun(msgspec.Struct, frozen=True):
    """The same few steps on two processes and on one, in fp32."""

    layout: str  # of the run on two processes
    losses: tuple[float, ...]  # on two processes
    grad_norms: tuple[float, ...]
    losses_alone: tuple[float, ...]
    grad_norms_alone: tuple[float, ...]

    @property
    def loss_difference(self) -> float:
        """The largest relative difference between the losses of a step."""
        return largest_difference(self.losses, self.losses_alone)

    @property
    def norm_difference(self) -> float:
        """The largest relative difference between the gradient norms of a step."""
        return largest_difference(self.grad_norms, self.grad_norms_alone)

    @property
    def learns(self) -> bool:
        """Whether the last third of the steps has less loss than the first: single steps see few samples and vary."""
        third = len(self.losses) // 3
        return sum(self.losses[-third:]) < sum(self.losses[:third])


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference between pairs of values; infinite if one is not finite."""
    return max(_difference(a, b) for a, b in zip(found, expected, strict=True))


def _difference(found: float, expected: float) -> float:
    if found == expected:
        return 0.0
    if not (math.isfinite(found) and math.isfinite(expected)) or expected == 0:
        return math.inf
    return abs(found - expected) / abs(expected)


def run(recipe: Recipe) -> TinyRun:
    """Train the recipe's tiny model for a few steps on two processes, and again on one.

    Both use the model, samples, micro batches and optimizer of the two processes' tiny recipe.
    """
    family = family_of(recipe)
    small, config = tiny_recipe(recipe, family.config_for(recipe), RANKS, {"train.steps": STEPS[recipe.goal]})
    two = _train(small, family, config, RANKS)
    one = _train(single_process(small, RANKS), family, config, 1)
    return TinyRun(
        layout=_describe(small.layout),
        losses=tuple(two.losses),
        grad_norms=tuple(two.grad_norms),
        losses_alone=tuple(one.losses),
        grad_norms_alone=tuple(one.grad_norms),
    )


def single_process(recipe: Recipe, world: int) -> Recipe:
    """Return the same training without parallelism, and without the layout's kernels and memory savings."""
    size = recipe.layout.micro_batch_size
    if recipe.moe.balancing == "global_aux_loss":  # balances over the tokens of all ranks
        size *= data_ranks(recipe.layout, world)
    return msgspec.structs.replace(recipe, layout=Layout(micro_batch_size=size), kernels=Kernels())


def _train(recipe: Recipe, family: ModelFamily, config: Any, world: int) -> RunMetrics:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        case = validate(recipe, config, None, world)
        spec = RankSpec(recipe, config.to_dict(), case, folder, RunSpec(quiet=True, checkpoints=False))
        if recipe.goal != "pretrain":  # fine-tuning starts from weights: random ones, fixed by the recipe's seed
            spec = with_tiny_weights(spec)
        modules = preloaded(family, config)
        results: list[RunMetrics | None] = processes.fork(
            world, run_rank, spec, device_type="cpu", preload=modules, timeout=TIMEOUT_S
        )
    return next(result for result in results if result is not None)


def _describe(layout: Layout) -> str:
    axes = [f"{axis}{size}" for axis in AXES if (size := getattr(layout, axis)) > 1]
    return " ".join([layout.strategy, *axes, *(["sp"] if layout.sp else [])])

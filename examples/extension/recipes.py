"""Recipes as functions, like the shipped ones."""

from __future__ import annotations

from meshwright.recipes.build import pretrain
from meshwright.recipes.registry import recipe
from meshwright.recipes.types import Recipe


@recipe(family="acme")
def acme_3b_pretrain_config() -> Recipe:
    """Pretraining of our own 3B model on one node."""
    return pretrain("acme_3b", "8xACME-H100", seq_length=8192, global_batch_size=256, recompute="selective")

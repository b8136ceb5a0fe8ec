"""Samples by number, and the part of a step's samples that one rank works on."""

from __future__ import annotations

from meshwright.engine.data.mock import Mock
from meshwright.engine.data.source import Batch, Loader, Samples, Source
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

__all__ = ["Batch", "Loader", "Mock", "Samples", "Source", "open_source"]

MOCK_NAMES = ("mock", "llm-pretrain-mock")
HELD_OUT = 1 << 20  # added to the seed of samples that are only evaluated on


def open_source(recipe: Recipe, vocab: int, held_out: bool = False) -> Source:
    """The samples of a recipe's data set, or those held out from it."""
    data = recipe.data
    if data.dataset not in MOCK_NAMES:
        raise InputError(
            "only made-up data can be trained on so far",
            field="data.dataset",
            value=data.dataset,
            fix=("--dataset mock",),
        )
    return Mock(vocab, data.seq_length, recipe.train.seed + HELD_OUT * held_out)

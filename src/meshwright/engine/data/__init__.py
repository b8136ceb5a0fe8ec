"""Data sources and the per-rank loader."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.engine.data.sample_types import Source

__all__ = ["open_source"]


def open_source(recipe: Recipe, vocab: int, held_out: bool = False, pretrained: Path | None = None) -> Source:
    """Open the recipe's dataset, or its held-out part; `pretrained` is the folder of the initial weights."""
    # Imported lazily: tokenizer worker processes import this package and must not load torch.
    from meshwright.engine.data.open_dataset import open_dataset

    return open_dataset(recipe, vocab, held_out, pretrained)

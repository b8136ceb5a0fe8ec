"""Samples by number, and the part of a step's samples that one rank works on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.engine.data.sampler import Source

__all__ = ["open_source"]


def open_source(recipe: Recipe, vocab: int, held_out: bool = False, pretrained: Path | None = None) -> Source:
    """The samples of a recipe's data set, or those held out from it; `pretrained` is the folder it starts from."""
    # Imported here because processes that tokenise load this package, and must not load torch with it.
    from meshwright.engine.data.open_dataset import opened

    return opened(recipe, vocab, held_out, pretrained)

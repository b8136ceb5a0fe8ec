"""Samples for a dry run: nothing is read, and every sample is as wide as the recipe allows.

Nobody looks at their tokens. What counts is their shapes: full sequences, several documents in each where samples are
packed, and pictures that take the share of the sequence which the estimate assumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import msgspec
import numpy as np

from meshwright.costs.memory_constants import IMAGE_SHARE
from meshwright.engine.data.mock import typical_documents
from meshwright.engine.data.sampler import Samples
from meshwright.engine.model_families import family_of
from meshwright.engine.vision.image_tokens import Document, ImageTokenSpec, optics_of, sample_of, stack_padded
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

PICTURES = 4  # documents with a picture each in a packed sample


def dry_recipe(recipe: Recipe) -> Recipe:
    """The recipe on made-up data of full width that nobody reads ahead; all else stays."""
    data = msgspec.structs.replace(
        recipe.data,
        dataset="mock",
        blend={},
        anneal_blend={},
        anneal_steps=0,
        validation="",
        validation_part=0.0,
        group_by_length=False,
        streaming=False,
        prefetch=0,
        workers=0,
    )
    return msgspec.structs.replace(recipe, data=data)


def open_samples(recipe: Recipe, config: Any) -> Any:
    """The samples of a dry run, for the trainer of the recipe's kind of model."""
    data = recipe.data
    if hasattr(config, "get_text_config"):
        if getattr(config, "vision_config", None) is not None:
            return DryImages(optics_of(config), data.seq_length, data.packing)
        return DryTokens(data.seq_length, packed=data.packing and not recipe.benchmark)
    return family_of(recipe).open_source(dry_recipe(recipe), config, False, None)


class DryTokens:
    """Samples of full width; packed ones hold documents of typical lengths."""

    def __init__(self, seq_length: int, packed: bool) -> None:
        self.seq_length, self.packed = seq_length, packed

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        shape = len(numbers), self.seq_length
        counted = np.ones(shape, dtype=np.bool_)
        documents = typical_documents(*shape) if self.packed else None
        if documents is not None:
            counted[:, :-1] = documents[:, :-1] == documents[:, 1:]
        return Samples(np.zeros((shape[0], shape[1] + 1), dtype=np.int64), counted, documents)


class DryImages:
    """Samples of full width with square pictures of one size: one in each sample, or several where they are packed."""

    def __init__(self, optics: ImageTokenSpec, seq_length: int, packed: bool) -> None:
        self.optics, self.seq_length, self.packed = optics, seq_length, packed
        framed = len(optics.before) + len(optics.after)
        least = framed + (optics.tokens or 1) + 1
        if seq_length < least:
            raise InputError(
                f"a sample has no room for an image and its text: {least} tokens at least",
                field="data.seq_length",
                value=seq_length,
                fix=(f"data.seq_length={2 * least}",),
            )
        count = max(1, min(PICTURES, seq_length // least)) if packed else 1
        self.lengths = [seq_length // count] * (count - 1)
        self.lengths.append(seq_length + 1 - sum(self.lengths))
        self.side = max(1, isqrt(int(IMAGE_SHARE * self.lengths[0]) - framed))

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers, all alike."""
        documents = [self._document(length) for length in self.lengths]
        made = sample_of(documents, self.optics, self.seq_length, self.packed)
        return stack_padded([made] * len(numbers), self.optics)

    def _document(self, length: int) -> Document:
        optics = self.optics
        grid = (1, self.side * optics.merge, self.side * optics.merge)
        image = [*optics.before, *[optics.image_token] * optics.tokens_of(grid), *optics.after]
        tokens = np.array([*image, *[0] * (length - len(image))], dtype=np.int64)
        pixels = np.zeros((1 if optics.whole else grid[1] * grid[2], *optics.shape), dtype=np.float32)
        grids = None if optics.whole else np.array([grid], dtype=np.int64)
        return Document(tokens, np.arange(length) >= len(image), pixels, grids)

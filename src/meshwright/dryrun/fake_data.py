"""Samples for a dry run: nothing is read from disk, and every sample is as long as the recipe allows.

Only shapes matter, not token values: full sequences, several documents in each if samples are packed, and images that
take the share of the sequence which the estimate assumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import msgspec
import numpy as np

from meshwright.costs.memory_constants import IMAGE_SHARE, IMAGES_PER_SAMPLE
from meshwright.engine.data.mock import typical_documents
from meshwright.engine.data.sample_types import Samples
from meshwright.engine.model_families import family_of
from meshwright.engine.vision.image_tokens import Document, ImageTokenSpec, build_sample, image_token_spec, stack_padded
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe


def dry_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with mock data of full length and no prefetch; everything else stays."""
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
    """Return the samples of a dry run for the trainer of the recipe's model family."""
    data = recipe.data
    if hasattr(config, "get_text_config"):
        if getattr(config, "vision_config", None) is not None:
            return DryImages(image_token_spec(config), data.seq_length, data.packing)
        return DryTokens(data.seq_length, packed=data.packing and not recipe.benchmark)
    return family_of(recipe).open_source(dry_recipe(recipe), config, False, None)


class DryTokens:
    """Samples of full length; packed ones hold documents of typical lengths."""

    def __init__(self, seq_length: int, packed: bool) -> None:
        self.seq_length, self.packed = seq_length, packed

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        shape = len(numbers), self.seq_length
        counted = np.ones(shape, dtype=np.bool_)
        documents = typical_documents(*shape) if self.packed else None
        if documents is not None:
            counted[:, :-1] = documents[:, :-1] == documents[:, 1:]
        return Samples(np.zeros((shape[0], shape[1] + 1), dtype=np.int64), counted, documents)


class DryImages:
    """Samples of full length with square images of one size: one per sample, or several if packed."""

    def __init__(self, image_spec: ImageTokenSpec, seq_length: int, packed: bool) -> None:
        self.image_spec, self.seq_length, self.packed = image_spec, seq_length, packed
        delimiters = len(image_spec.before) + len(image_spec.after)
        shortest = delimiters + (image_spec.tokens or 1) + 1
        if seq_length < shortest:
            raise InputError(
                f"too short for an image and its text, which need at least {shortest} tokens",
                field="data.seq_length",
                value=seq_length,
                fix=(f"data.seq_length={2 * shortest}",),
            )
        count = max(1, min(IMAGES_PER_SAMPLE, seq_length // shortest)) if packed else 1
        self.lengths = [seq_length // count] * (count - 1)
        self.lengths.append(seq_length + 1 - sum(self.lengths))
        self.side = max(1, isqrt(int(IMAGE_SHARE * self.lengths[0]) - delimiters))

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers, all identical."""
        documents = [self._document(length) for length in self.lengths]
        sample = build_sample(documents, self.image_spec, self.seq_length, self.packed)
        return stack_padded([sample] * len(numbers), self.image_spec)

    def _document(self, length: int) -> Document:
        image_spec = self.image_spec
        grid = (1, self.side * image_spec.merge, self.side * image_spec.merge)
        image = [*image_spec.before, *[image_spec.image_token] * image_spec.tokens_for_grid(grid), *image_spec.after]
        tokens = np.array([*image, *[0] * (length - len(image))], dtype=np.int64)
        pixels = np.zeros((1 if image_spec.whole_images else grid[1] * grid[2], *image_spec.shape), dtype=np.float32)
        grids = None if image_spec.whole_images else np.array([grid], dtype=np.int64)
        return Document(tokens, np.arange(length) >= len(image), pixels, grids)

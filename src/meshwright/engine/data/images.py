"""Samples with images: made-up ones, and where those of files come from."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np

from meshwright.engine.data.mock import NOISE
from meshwright.engine.data.source import Samples, Source
from meshwright.engine.vision.optics import Document, Ints, Optics, optics_of, sample_of, stack_padded
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

MOCK_NAMES = ("mock", "vlm-mock")
LARGEST_SIDE = 16  # tokens along a side of a made-up image
HELD_OUT = 1 << 20  # added to the seed of samples that are only evaluated on


def open_images(recipe: Recipe, config: Any, held_out: bool = False) -> Source:
    """The samples of a recipe for a model that sees, or those held out from them."""
    data = recipe.data
    if data.dataset not in MOCK_NAMES:
        raise InputError("only made-up images", field="data.dataset", value=data.dataset, fix=("--dataset mock",))
    seed = recipe.train.seed + HELD_OUT * held_out
    return MockImages(optics_of(config), data.seq_length, seed, packed=data.packing)


class MockImages:
    """Pictures of one brightness each, and text that counts upwards from a token which the brightness tells.

    A sample is one picture and its text, or several where samples are packed.
    """

    def __init__(self, optics: Optics, seq_length: int, seed: int, packed: bool = False) -> None:
        self.optics, self.seq_length, self.seed, self.packed = optics, seq_length, seed, packed
        self.framed = len(optics.before) + len(optics.after)
        if self._image_tokens(self._largest()) + self.framed + 1 > seq_length:
            needed = self._image_tokens(self._largest()) + self.framed + 1
            raise InputError(
                f"a sample has no room for an image and its text: {needed} tokens at least",
                field="data.seq_length",
                value=seq_length,
                fix=(f"data.seq_length={2 * needed}",),
            )

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        made = []
        for number in numbers:
            random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
            made.append(sample_of(self._documents(random), self.optics, self.seq_length, self.packed))
        return stack_padded(made, self.optics)

    def _documents(self, random: np.random.Generator) -> list[Document]:
        if not self.packed:
            return [self._document(random, self.seq_length + 1)]
        least = self._image_tokens(self._largest()) + self.framed + 1
        found, left = [], self.seq_length + 1
        while left >= least:
            length = int(random.integers(least, max(least, left // 2) + 1))
            length = left if left - length < least else length
            found.append(self._document(random, length))
            left -= length
        return found

    def _document(self, random: np.random.Generator, length: int) -> Document:
        optics = self.optics
        side = self._largest()
        grid = [1, *(optics.merge * random.integers(1, side + 1, size=2))]
        count = self._image_tokens(side) if optics.whole else optics.tokens_of(grid)
        image = [*optics.before, *[optics.image_token] * count, *optics.after]
        start = int(random.integers(optics.words))
        text = self._text(random, start, length - len(image))
        tokens = np.array([*image, *text], dtype=np.int64)
        learnt = np.arange(len(tokens)) >= len(image)
        pixels = self._pixels(random, start, 1 if optics.whole else int(np.prod(grid)))
        return Document(tokens, learnt, pixels, None if optics.whole else np.array([grid], dtype=np.int64))

    def _text(self, random: np.random.Generator, start: int, length: int) -> Ints:
        counted = (start + np.arange(length)) % self.optics.words
        noise = random.integers(self.optics.words, size=length)
        return np.where(random.random(length) < NOISE, noise, counted)

    def _pixels(self, random: np.random.Generator, start: int, count: int) -> Any:
        brightness = 2 * start / self.optics.words - 1
        noise = NOISE * random.standard_normal((count, *self.optics.shape))
        return (brightness + noise).astype(np.float32)

    def _largest(self) -> int:
        """Tokens along the longer side of the largest picture: an eighth of a sample at most."""
        return min(LARGEST_SIDE, max(1, isqrt(self.seq_length // 8)))

    def _image_tokens(self, side: int) -> int:
        return self.optics.tokens or side * side

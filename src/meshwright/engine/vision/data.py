"""Samples with images: made-up ones, and where those of files come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.engine.data.mock import NOISE_SHARE, VALIDATION_SEED_OFFSET
from meshwright.engine.data.sample_types import Samples, Source
from meshwright.engine.vision.image_tokens import Document, ImageTokenSpec, Ints, optics_of, sample_of, stack_padded
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

MOCK_NAMES = ("mock", "vlm-mock")
LARGEST_SIDE = 16  # tokens along a side of a made-up image


def open_images(recipe: Recipe, config: Any, held_out: bool = False, pretrained: Path | None = None) -> Source:
    """The samples of a recipe for a model that sees, or those held out from them."""
    data = recipe.data
    optics = optics_of(config)
    _refuse_what_images_do_not_have(recipe)
    if data.dataset in MOCK_NAMES:
        seed = recipe.train.seed + VALIDATION_SEED_OFFSET * held_out
        return MockImages(optics, data.seq_length, seed, packed=data.packing)
    return _open_records(recipe, optics, held_out, pretrained)


def _open_records(recipe: Recipe, optics: ImageTokenSpec, held_out: bool, pretrained: Path | None) -> Source:
    # Imported here because made-up images need none of it.
    from meshwright.engine.data.dataset_registry import dataset_columns, open_rows
    from meshwright.engine.data.instructions import dataset_and_split
    from meshwright.engine.data.tokenizers import load_tokenizer
    from meshwright.engine.vision.image_chat import Conversations, ShuffledImages, Writer, load_processor, read_records

    data = recipe.data
    name, split = dataset_and_split(recipe, held_out)
    rows = open_rows(name, split)
    root = (rows.files[0].parent if rows.files else Path(name)).expanduser()
    if Path(name).expanduser().is_dir():
        root = Path(name).expanduser()
    processor = load_processor(load_tokenizer(recipe, pretrained), optics)
    rewrite = REWRITTEN.get(name)
    records = read_records(rows, dataset_columns(name, data.columns), data.train_on, rewrite)
    if data.validation_part and not data.validation:
        records = [record for record in records if (record.share < data.validation_part) == held_out]
    if not records:
        raise InputError("no conversation is left", field="data.validation_part", value=data.validation_part)
    writer = Writer(processor, optics, data, root)
    return ShuffledImages(Conversations(records, writer, data.seq_length, data.packing), recipe.train.seed)


def _receipt(row: dict[str, Any]) -> dict[str, Any]:
    """CORD: a receipt, and what stands on it as JSON."""
    read = json.loads(row["ground_truth"])
    answer = json.dumps(read.get("gt_parse", read), ensure_ascii=False)
    return {"images": [row["image"]], "prompt": "Describe this image.", "response": answer}


def _captioned(row: dict[str, Any]) -> dict[str, Any]:
    return {"images": [row["image"]], "prompt": "Describe this image.", "response": row["text"]}


# Named sets whose rows are no questions and answers; others are read by their columns.
REWRITTEN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"cord-v2": _receipt, "rdr": _captioned}


def _refuse_what_images_do_not_have(recipe: Recipe) -> None:
    data = recipe.data
    asked = {
        "data.blend": bool(data.blend),
        "data.anneal_steps": data.anneal_steps > 0,
        "data.streaming": data.streaming,
        "data.group_by_length": data.group_by_length,
    }
    plain = {"data.blend": "{}", "data.anneal_steps": "0"}
    for field, is_asked in asked.items():
        if is_asked:
            raise InputError(
                "samples with images come from one data set, indexed, each filled up to data.seq_length",
                field=field,
                fix=(f"{field}={plain.get(field, 'false')}",),
            )
    if data.truncation == "start":
        raise InputError(
            "cutting off the start of a conversation would take its images away",
            field="data.truncation",
            value="start",
            fix=("data.truncation=end", "data.truncation=drop"),
        )


class MockImages:
    """Pictures of one brightness each, and text that counts upwards from a token which the brightness tells.

    A sample is one picture and its text, or several where samples are packed.
    """

    def __init__(self, optics: ImageTokenSpec, seq_length: int, seed: int, packed: bool = False) -> None:
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
        loss_mask = np.arange(len(tokens)) >= len(image)
        pixels = self._pixels(random, start, 1 if optics.whole else int(np.prod(grid)))
        return Document(tokens, loss_mask, pixels, None if optics.whole else np.array([grid], dtype=np.int64))

    def _text(self, random: np.random.Generator, start: int, length: int) -> Ints:
        counted = (start + np.arange(length)) % self.optics.words
        noise = random.integers(self.optics.words, size=length)
        return np.where(random.random(length) < NOISE_SHARE, noise, counted)

    def _pixels(self, random: np.random.Generator, start: int, count: int) -> Any:
        brightness = 2 * start / self.optics.words - 1
        noise = NOISE_SHARE * random.standard_normal((count, *self.optics.shape))
        return (brightness + noise).astype(np.float32)

    def _largest(self) -> int:
        """Tokens along the longer side of the largest picture: an eighth of a sample at most."""
        return min(LARGEST_SIDE, max(1, isqrt(self.seq_length // 8)))

    def _image_tokens(self, side: int) -> int:
        return self.optics.tokens or side * side

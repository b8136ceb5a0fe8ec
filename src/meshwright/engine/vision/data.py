"""Opens datasets with images, and generates mock ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.costs.memory_constants import IMAGE_SHARE
from meshwright.engine.data.mock import NOISE_SHARE, VALIDATION_SEED_OFFSET
from meshwright.engine.data.sample_types import Samples, Source
from meshwright.engine.vision.image_tokens import (
    Document,
    ImageTokenSpec,
    Ints,
    build_sample,
    image_token_spec,
    stack_padded,
)
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

MOCK_NAMES = ("mock", "vlm-mock")


def open_images(recipe: Recipe, config: Any, held_out: bool = False, pretrained: Path | None = None) -> Source:
    """Open the dataset of a vision-language recipe, or its held-out part."""
    data = recipe.data
    spec = image_token_spec(config)
    _check_supported_settings(recipe)
    if data.dataset in MOCK_NAMES and not (held_out and data.validation):
        seed = recipe.train.seed + VALIDATION_SEED_OFFSET * held_out
        return MockImages(spec, data.seq_length, seed, packed=data.packing)
    return _open_records(recipe, spec, held_out, pretrained)


def _open_records(recipe: Recipe, spec: ImageTokenSpec, held_out: bool, pretrained: Path | None) -> Source:
    # Imported lazily: mock images need none of it.
    from meshwright.engine.data.dataset_registry import dataset_columns, open_rows
    from meshwright.engine.data.instructions import dataset_and_split, naming_validation
    from meshwright.engine.data.tokenizers import load_tokenizer
    from meshwright.engine.vision.image_chat import (
        ImageConversations,
        RecordEncoder,
        ShuffledImages,
        load_processor,
        read_records,
    )

    data = recipe.data
    name, split = dataset_and_split(recipe, held_out)
    with naming_validation(recipe, held_out):
        rows = open_rows(name, split)
    root = (rows.files[0].parent if rows.files else Path(name)).expanduser()
    if Path(name).expanduser().is_dir():
        root = Path(name).expanduser()
    processor = load_processor(load_tokenizer(recipe, pretrained), spec)
    rewrite = ROW_REWRITES.get(name)
    records = read_records(rows, dataset_columns(name, data.columns), data.train_on, rewrite)
    if data.validation_part and not data.validation:
        records = [record for record in records if (record.hash_fraction < data.validation_part) == held_out]
    if not records:
        raise InputError("no conversations left", field="data.validation_part", value=data.validation_part)
    encoder = RecordEncoder(processor, spec, data, root)
    return ShuffledImages(ImageConversations(records, encoder, data.seq_length, data.packing), recipe.train.seed)


def _receipt(row: dict[str, Any]) -> dict[str, Any]:
    """Return a CORD row as a prompt and the receipt's contents as JSON."""
    parsed = json.loads(row["ground_truth"])
    answer = json.dumps(parsed.get("gt_parse", parsed), ensure_ascii=False)
    return {"images": [row["image"]], "prompt": "Describe this image.", "response": answer}


def _captioned(row: dict[str, Any]) -> dict[str, Any]:
    return {"images": [row["image"]], "prompt": "Describe this image.", "response": row["text"]}


# Registered datasets whose rows are not prompt-response pairs; others are read by their columns.
ROW_REWRITES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"cord-v2": _receipt, "rdr": _captioned}


def _check_supported_settings(recipe: Recipe) -> None:
    data = recipe.data
    unsupported = {
        "data.blend": bool(data.blend),
        "data.anneal_steps": data.anneal_steps > 0,
        "data.streaming": data.streaming,
        "data.group_by_length": data.group_by_length,
    }
    defaults = {"data.blend": "{}", "data.anneal_steps": "0"}
    for field, is_set in unsupported.items():
        if is_set:
            raise InputError(
                "not supported with images: samples come from one indexed dataset and are padded to data.seq_length",
                field=field,
                fix=(f"{field}={defaults.get(field, 'false')}",),
            )
    if data.truncation == "start":
        raise InputError(
            "truncating the start of a conversation would remove its images",
            field="data.truncation",
            value="start",
            fix=("data.truncation=end", "data.truncation=drop"),
        )


class MockImages:
    """Images of uniform brightness, and text that counts up from a token that the brightness determines.

    A sample is one image with its text, or several if packed. Images have the share of tokens that estimates assume,
    in random proportions, unless the model takes images of one size.
    """

    def __init__(self, spec: ImageTokenSpec, seq_length: int, seed: int, packed: bool = False) -> None:
        self.spec, self.seq_length, self.seed, self.packed = spec, seq_length, seed, packed
        self.frame_tokens = len(spec.before) + len(spec.after)
        needed = (spec.tokens or 1) + self.frame_tokens + 1
        if needed > seq_length:
            raise InputError(
                f"too short for an image and its text, which need at least {needed} tokens",
                field="data.seq_length",
                value=seq_length,
                fix=(f"data.seq_length={2 * needed}",),
            )

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        built = []
        for number in numbers:
            random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
            built.append(build_sample(self._documents(random), self.spec, self.seq_length, self.packed))
        return stack_padded(built, self.spec)

    def _documents(self, random: np.random.Generator) -> list[Document]:
        if not self.packed:
            return [self._document(random, self.seq_length + 1)]
        min_length = max((self.spec.tokens or 1) + self.frame_tokens + 1, self.seq_length // 8)
        found, left = [], self.seq_length + 1
        while left >= min_length:
            length = int(random.integers(min_length, max(min_length, left // 2) + 1))
            length = left if left - length < min_length else length
            found.append(self._document(random, length))
            left -= length
        return found

    def _document(self, random: np.random.Generator, length: int) -> Document:
        spec = self.spec
        grid = self._grid(random, length)
        count = spec.tokens_for_grid(grid)
        image = [*spec.before, *[spec.image_token] * count, *spec.after]
        start = int(random.integers(spec.text_vocab))
        text = self._text(random, start, length - len(image))
        tokens = np.array([*image, *text], dtype=np.int64)
        loss_mask = np.arange(len(tokens)) >= len(image)
        pixels = self._pixels(random, start, 1 if spec.whole_images else int(np.prod(grid)))
        return Document(tokens, loss_mask, pixels, None if spec.whole_images else np.array([grid], dtype=np.int64))

    def _text(self, random: np.random.Generator, start: int, length: int) -> Ints:
        sequence = (start + np.arange(length)) % self.spec.text_vocab
        noise = random.integers(self.spec.text_vocab, size=length)
        return np.where(random.random(length) < NOISE_SHARE, noise, sequence)

    def _pixels(self, random: np.random.Generator, start: int, count: int) -> Any:
        brightness = 2 * start / self.spec.text_vocab - 1
        noise = NOISE_SHARE * random.standard_normal((count, *self.spec.shape))
        return (brightness + noise).astype(np.float32)

    def _grid(self, random: np.random.Generator, length: int) -> list[int]:
        """Return the patches of an image that takes its share of a document: time, height and width."""
        tokens = max(1, int(IMAGE_SHARE * length) - self.frame_tokens)
        height = int(random.integers(max(1, isqrt(tokens) // 2), isqrt(tokens) + 1))
        return [1, self.spec.merge * height, self.spec.merge * (tokens // height)]

"""Image tokens: what a model takes as an image, and the layout of samples with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.sample_types import Sample, Samples, stack
from meshwright.engine.vision.vision_modules import VISION_MODULES

TOKEN_SUFFIXES = ("_token_id", "_token_index")
# Config keys of the tokens around an image, by model family.
BEFORE = ("vision_start_token_id", "image_start_token_id", "boi_token_index")
AFTER = ("vision_end_token_id", "image_end_token_id", "eoi_token_index")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ImageTokenSpec:
    """What a model takes as an image: any number of patches, or whole images of one size."""

    image_token: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    text_vocab: int  # token ids below this are text
    shape: tuple[int, ...]  # of a flattened patch, or of a whole image
    merge: int  # patches per token along each side
    tokens: int  # per whole image; 0 if it depends on the number of patches
    processor: str  # the transformers model family of its image processor

    @property
    def whole_images(self) -> bool:
        """Whether the model takes whole images of one size."""
        return self.tokens > 0

    def tokens_for_grid(self, grid: Sequence[int] | Ints) -> int:
        """Return the tokens of an image of time × height × width patches."""
        return self.tokens or int(np.prod(grid)) // self.merge**2


def image_token_spec(config: Any) -> ImageTokenSpec:
    """Return the image token spec of a transformers config."""
    vision = config.vision_config
    values = {name: value for name, value in config.to_dict().items() if isinstance(value, int)}
    special_tokens = [value for name, value in values.items() if name.endswith(TOKEN_SUFFIXES) and value > 0]
    vocab = config.get_text_config().vocab_size
    channels: int = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    whole_images = VISION_MODULES[config.model_type].whole_images
    pixels = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return ImageTokenSpec(
        image_token=int(config.image_token_id),
        before=tuple(values[name] for name in BEFORE if name in values),
        after=tuple(values[name] for name in AFTER if name in values),
        text_vocab=min([token for token in special_tokens if token > vocab // 2] + [vocab]),
        shape=(channels, vision.image_size, vision.image_size) if whole_images else (pixels,),
        merge=1 if whole_images else vision.spatial_merge_size,
        tokens=config.mm_tokens_per_image if whole_images else 0,
        processor=VISION_MODULES[config.model_type].images,
    )


@dataclass(frozen=True)
class Document:
    """A text with images; an image's tokens are contiguous, and images are in the order of their tokens.

    `pixels` has the concatenated patches of all images, with the images' shapes in `grids`; or whole images, without.
    """

    tokens: Ints
    loss_mask: NDArray[np.bool_]
    pixels: NDArray[np.float32]
    grids: Ints | None = None  # [images, 3]


def build_sample(documents: Sequence[Document], spec: ImageTokenSpec, seq_length: int, packed: bool) -> Sample:
    """Concatenate documents into one sample and pad it; padding and image tokens are outside the loss."""
    length = seq_length + 1
    tokens = np.concatenate([one.tokens for one in documents])[:length]
    loss_mask = np.concatenate([one.loss_mask & (np.arange(len(one.tokens)) > 0) for one in documents])[:length]
    loss_mask = loss_mask & (tokens != spec.image_token)
    padding = length - len(tokens)
    numbers = np.repeat(np.arange(len(documents)), [len(one.tokens) for one in documents])[:length]
    tokens, loss_mask = np.pad(tokens, (0, padding)), np.pad(loss_mask, (0, padding))
    extras: dict[str, NDArray[Any]] = {
        "pixels": np.concatenate([one.pixels for one in documents]),
        "image_at": _feature_indices(tokens[:-1], spec),
    }
    extras["feature_counts"] = np.array((extras["image_at"] >= 0).sum())
    if not spec.whole_images:
        grids = np.concatenate([one.grids for one in documents if one.grids is not None])
        extras["grids"] = grids
        extras["feature_counts"] = np.array(sum(spec.tokens_for_grid(grid) for grid in grids))
        rows = [position_axes(one.tokens, one.grids, spec) for one in documents if one.grids is not None]
        extras["axes"] = _pad_positions(np.concatenate(rows, 1)[:, :seq_length], seq_length, restart=packed)
    else:
        extras["feature_counts"] = np.array(len(extras["pixels"]) * spec.tokens)
    document_ids = np.pad(numbers, (0, padding), constant_values=len(documents))[:-1] if packed else None
    return Sample(tokens, loss_mask[1:], document_ids, extras)


def position_axes(tokens: Ints, grids: Ints, spec: ImageTokenSpec) -> Ints:
    """Return the time, height and width positions [3, tokens] of a document's tokens (multimodal RoPE).

    Text advances all three together. An image's positions run along its sides from the current text position; the text
    continues after the image's longer side.
    """
    parts: list[Ints] = []
    index, position = 0, 0
    shapes = iter(grids)
    while index < len(tokens):
        if tokens[index] == spec.image_token:
            time, height, width = (int(n) for n in next(shapes))
            height, width = height // spec.merge, width // spec.merge
            parts.append(np.indices((time, height, width)).reshape(3, -1) + position)
            index, position = index + time * height * width, position + max(height, width)
            continue
        images = np.flatnonzero(tokens[index:] == spec.image_token)
        run = int(images[0]) if len(images) else len(tokens) - index
        parts.append(np.broadcast_to(np.arange(run) + position, (3, run)))
        index, position = index + run, position + run
    return np.concatenate(parts, 1) if parts else np.zeros((3, 0), dtype=np.int64)


def stack_padded(samples: Sequence[Sample], spec: ImageTokenSpec) -> Samples:
    """Stack samples; pad their image arrays to the longest, with counts."""
    counts = {"pixel_counts": "pixels"} | ({} if spec.whole_images else {"image_counts": "grids"})
    padded_samples = []
    for sample in samples:
        extras = dict(sample.extras)
        for count, name in counts.items():
            max_rows = max(len(other.extras[name]) for other in samples)
            extras[count] = np.array(len(extras[name]))
            extras[name] = _pad_rows(extras[name], max(max_rows, 1))
        padded_samples.append(sample._replace(extras=extras))
    return stack(padded_samples)


def _pad_rows(values: NDArray[Any], length: int) -> NDArray[Any]:
    return np.pad(values, [(0, length - len(values)), *[(0, 0)] * (values.ndim - 1)])


def _feature_indices(tokens: Ints, spec: ImageTokenSpec) -> Ints:
    is_image = tokens == spec.image_token
    return np.where(is_image, np.cumsum(is_image) - 1, -1)


def _pad_positions(rows: Ints, width: int, restart: bool) -> Ints:
    """Append positions for padding: continue after the last token, or restart at 0 for packed documents."""
    first = 0 if restart or not rows.shape[1] else int(rows[:, -1].max()) + 1
    more = np.arange(width - rows.shape[1]) + first
    return np.concatenate([rows, np.broadcast_to(more, (3, len(more)))], 1)

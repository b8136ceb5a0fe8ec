"""How images become tokens of a model: what it takes as an image, and how a sample with images is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.sample_types import Sample, Samples, stack
from meshwright.engine.vision.vision_modules import EYES

TOKEN_ENDS = ("_token_id", "_token_index")
# Tokens around an image, under the names that the families have for them.
BEFORE = ("vision_start_token_id", "image_start_token_id", "boi_token_index")
AFTER = ("vision_end_token_id", "image_end_token_id", "eoi_token_index")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ImageTokenSpec:
    """What a model takes as an image: patches of any number and shape, or pictures of one size."""

    image_token: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    words: int  # tokens below this number are text
    shape: tuple[int, ...]  # of a patch's numbers, or of a whole picture
    merge: int  # patches along each side of a token
    tokens: int  # of a whole picture; 0 where it depends on the number of patches
    processor: str  # the family in transformers whose image processor makes patches for it

    @property
    def whole(self) -> bool:
        """Whether images are pictures of one size."""
        return self.tokens > 0

    def tokens_of(self, grid: Sequence[int] | Ints) -> int:
        """How many tokens an image of time × height × width patches becomes."""
        return self.tokens or int(np.prod(grid)) // self.merge**2


def optics_of(config: Any) -> ImageTokenSpec:
    """The optics of the model that a transformers config builds."""
    vision = config.vision_config
    values = {name: value for name, value in config.to_dict().items() if isinstance(value, int)}
    marks = [value for name, value in values.items() if name.endswith(TOKEN_ENDS) and value > 0]
    vocab = config.get_text_config().vocab_size
    channels: int = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    whole = EYES[config.model_type].sees_whole_images
    pixels = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return ImageTokenSpec(
        image_token=int(config.image_token_id),
        before=tuple(values[name] for name in BEFORE if name in values),
        after=tuple(values[name] for name in AFTER if name in values),
        words=min([mark for mark in marks if mark > vocab // 2] + [vocab]),
        shape=(channels, vision.image_size, vision.image_size) if whole else (pixels,),
        merge=1 if whole else vision.spatial_merge_size,
        tokens=config.mm_tokens_per_image if whole else 0,
        processor=EYES[config.model_type].images,
    )


@dataclass(frozen=True)
class Document:
    """One text with its images; the tokens of an image lie side by side, and images come in the order of their tokens.

    `learnt` says of each token whether predicting it counts. `pixels` are the patches of all images, one after the
    other, with the images' shapes in `grids`; or whole pictures, without.
    """

    tokens: Ints
    loss_mask: NDArray[np.bool_]
    pixels: NDArray[np.float32]
    grids: Ints | None = None  # [images, 3]


def sample_of(documents: Sequence[Document], optics: ImageTokenSpec, seq_length: int, packed: bool) -> Sample:
    """The documents one after the other in one sample; what is left of it is padding that does not count."""
    length = seq_length + 1
    tokens = np.concatenate([one.tokens for one in documents])[:length]
    loss_mask = np.concatenate([one.loss_mask & (np.arange(len(one.tokens)) > 0) for one in documents])[:length]
    loss_mask = loss_mask & (tokens != optics.image_token)
    room = length - len(tokens)
    numbers = np.repeat(np.arange(len(documents)), [len(one.tokens) for one in documents])[:length]
    tokens, loss_mask = np.pad(tokens, (0, room)), np.pad(loss_mask, (0, room))
    whole: dict[str, NDArray[Any]] = {
        "pixels": np.concatenate([one.pixels for one in documents]),
        "image_at": _feature_numbers(tokens[:-1], optics),
    }
    whole["feature_counts"] = np.array((whole["image_at"] >= 0).sum())
    if not optics.whole:
        grids = np.concatenate([one.grids for one in documents if one.grids is not None])
        whole["grids"] = grids
        whole["feature_counts"] = np.array(sum(optics.tokens_of(grid) for grid in grids))
        rows = [axes(one.tokens, one.grids, optics) for one in documents if one.grids is not None]
        whole["axes"] = _filled(np.concatenate(rows, 1)[:, :seq_length], seq_length, restart=packed)
    else:
        whole["feature_counts"] = np.array(len(whole["pixels"]) * optics.tokens)
    marks = np.pad(numbers, (0, room), constant_values=len(documents))[:-1] if packed else None
    return Sample(tokens, loss_mask[1:], marks, whole)


def axes(tokens: Ints, grids: Ints, optics: ImageTokenSpec) -> Ints:
    """Time, height and width [3, tokens] of a document's tokens.

    Text counts on along all three; an image counts along its own sides from where the text is, and the text goes on
    behind its longer side.
    """
    parts: list[Ints] = []
    place, position = 0, 0
    shapes = iter(grids)
    while place < len(tokens):
        if tokens[place] == optics.image_token:
            time, height, width = (int(n) for n in next(shapes))
            height, width = height // optics.merge, width // optics.merge
            parts.append(np.indices((time, height, width)).reshape(3, -1) + position)
            place, position = place + time * height * width, position + max(height, width)
            continue
        images = np.flatnonzero(tokens[place:] == optics.image_token)
        run = int(images[0]) if len(images) else len(tokens) - place
        parts.append(np.broadcast_to(np.arange(run) + position, (3, run)))
        place, position = place + run, position + run
    return np.concatenate(parts, 1) if parts else np.zeros((3, 0), dtype=np.int64)


def stack_padded(samples: Sequence[Sample], optics: ImageTokenSpec) -> Samples:
    """Samples side by side: images padded to the most that one of them has, with counts."""
    counts = {"pixel_counts": "pixels"} | ({} if optics.whole else {"image_counts": "grids"})
    even = []
    for sample in samples:
        extras = dict(sample.extras)
        for count, name in counts.items():
            most = max(len(other.extras[name]) for other in samples)
            extras[count] = np.array(len(extras[name]))
            extras[name] = _padded(extras[name], max(most, 1))
        even.append(sample._replace(extras=extras))
    return stack(even)


def _padded(values: NDArray[Any], length: int) -> NDArray[Any]:
    return np.pad(values, [(0, length - len(values)), *[(0, 0)] * (values.ndim - 1)])


def _feature_numbers(tokens: Ints, optics: ImageTokenSpec) -> Ints:
    seen = tokens == optics.image_token
    return np.where(seen, np.cumsum(seen) - 1, -1)


def _filled(rows: Ints, width: int, restart: bool) -> Ints:
    """Positions of padding: on from the last token, or from 0 where documents are counted by themselves."""
    first = 0 if restart or not rows.shape[1] else int(rows[:, -1].max()) + 1
    more = np.arange(width - rows.shape[1]) + first
    return np.concatenate([rows, np.broadcast_to(more, (3, len(more)))], 1)

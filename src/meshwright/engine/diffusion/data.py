"""Latents and text embeddings by sample number: made up, or read from a folder that an encoder wrote beforehand.

A folder holds safetensors files, read in the order of their names. Each has, for its N samples:

    latents  [N, channels, frames, height, width]; images may leave frames out. Shifted and scaled as the
             transformer takes them: what the autoencoder gives, less its shift, times its scale.
    text     [N, tokens, width], the text encoder's last hidden states
    pooled   [N, width], one embedding of the whole text; FLUX only

All samples have one shape; its number of tokens (of 1 × 2 × 2 latents in both models) is the recipe's seq_length.
Numbers are floats of any width. Every epoch sees the samples in an order of its own, drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.engine.data.mock import VALIDATION_SEED_OFFSET
from meshwright.engine.diffusion.config import DenoiserConfig
from meshwright.engine.safetensors_header import FLOATS
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

MOCK_NAMES = ("mock", "diffusion-mock")
TEXT_TOKENS = 512  # of made-up texts: what Wan and FLUX are trained with, where a sample is at least as long
CLASSES = 8  # of made-up samples
ROUGHNESS = 0.1  # how far made-up samples of one class differ


@dataclass(frozen=True)
class LatentSamples:
    """Latents [n, channels, frames, height, width] and what is known of their texts."""

    latents: torch.Tensor
    text: torch.Tensor  # [n, tokens, width]
    pooled: torch.Tensor | None = None  # [n, width]


class LatentSource(Protocol):
    """Samples by number: the same number gives the same sample, whoever asks and whenever."""

    def samples(self, numbers: Sequence[int]) -> LatentSamples: ...


def open_latents(recipe: Recipe, config: DenoiserConfig, held_out: bool = False) -> LatentSource:
    """The samples of a recipe's data set, or those held out from it."""
    data, seed = recipe.data, recipe.train.seed
    if data.blend or data.anneal_blend:
        raise InputError(
            "diffusion models are trained on one folder of latents",
            field="data.blend" if data.blend else "data.anneal_blend",
            value=data.blend or data.anneal_blend,
            fix=("data.dataset=FOLDER without a blend",),
        )
    if data.dataset in MOCK_NAMES:
        return MockLatents(config, data.seq_length, seed, seed + VALIDATION_SEED_OFFSET * held_out)
    if held_out and data.validation:
        return LatentFolder(data.validation, config, data.seq_length, seed, "data.validation")
    part = 0.0 if data.validation else data.validation_part
    if held_out and not part:
        raise InputError(
            "there is nothing to evaluate on",
            field="data.validation",
            value=data.validation,
            fix=("data.validation=FOLDER", "data.validation_part=0.05", "train.eval_every=0"),
        )
    last = (1 - part, 1.0) if held_out else (0.0, 1 - part)
    return LatentFolder(data.dataset, config, data.seq_length, seed, "data.dataset", last)


def grid_of(tokens: int, video: bool) -> tuple[int, int, int]:
    """Frames, rows and columns of made-up samples with this many tokens, as near to a cube or a square as they go."""
    frames = max(d for d in (1, 2, 4, 8) if d == 1 or (video and tokens % d == 0 and d**3 <= tokens))
    area = tokens // frames
    rows = max(d for d in range(1, int(area**0.5) + 1) if area % d == 0)
    return frames, rows, area // rows


class MockLatents:
    """Made-up samples of a few classes that their texts name: a model can learn them, so that its loss falls."""

    def __init__(self, config: DenoiserConfig, seq_length: int, classes_seed: int, seed: int) -> None:
        grid = grid_of(seq_length, config.model_type == "wan")
        sides = [count * side for count, side in zip(grid, config.patch, strict=True)]
        self.shape = (config.channels, *sides)
        self.text_shape = (min(TEXT_TOKENS, seq_length), config.text_width)
        self.seed = seed
        random = np.random.Generator(np.random.Philox(key=[classes_seed, 1 << 62]))
        # Signs, so that samples of all classes are as hard as each other and the loss of a step tells what was learnt.
        self.means = np.sign(_normal(random, (CLASSES, config.channels, 1, 1, 1)))
        self.texts = _normal(random, (CLASSES, config.text_width))
        self.pooled = _normal(random, (CLASSES, config.pooled_width)) if config.pooled_width else None

    def samples(self, numbers: Sequence[int]) -> LatentSamples:
        """The samples with these numbers."""
        made = [self._sample(number) for number in numbers]
        kinds = torch.tensor([kind for kind, _, _ in made])
        return LatentSamples(
            torch.from_numpy(np.stack([latents for _, latents, _ in made])),
            torch.from_numpy(np.stack([text for _, _, text in made])),
            None if self.pooled is None else torch.from_numpy(self.pooled)[kinds],
        )

    def _sample(self, number: int) -> tuple[int, NDArray[np.float32], NDArray[np.float32]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        kind = int(random.integers(CLASSES))
        latents = self.means[kind] + ROUGHNESS * _normal(random, self.shape)
        return kind, latents, self.texts[kind] + ROUGHNESS * _normal(random, self.text_shape)


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return random.standard_normal(shape, dtype=np.float32)


class LatentFolder:
    """The samples of a folder of safetensors files, those between two parts of it; see the top of this file."""

    def __init__(
        self,
        folder: str,
        config: DenoiserConfig,
        seq_length: int,
        seed: int,
        field: str = "data.dataset",
        part: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.config, self.seq_length, self.seed, self.field = config, seq_length, seed, field
        self.files = self._files(folder)
        self.counts = [self._check(file) for file in self.files]
        total = sum(self.counts)
        self.first, last = round(part[0] * total), round(part[1] * total)
        self.length = last - self.first
        if self.length < 1:
            raise InputError(f"of {total} samples none are left for this part", field=field, value=folder)

    def samples(self, numbers: Sequence[int]) -> LatentSamples:
        """The samples with these numbers; numbers past the last begin another epoch."""
        rows = [self._row(number) for number in numbers]
        names = ("latents", "text", *(("pooled",) if self.config.pooled_width else ()))
        read = {name: torch.stack([_opened(file).get_slice(name)[row].float() for file, row in rows]) for name in names}
        latents = read["latents"]
        return LatentSamples(latents if latents.dim() == 5 else latents.unsqueeze(2), read["text"], read.get("pooled"))

    def _row(self, number: int) -> tuple[Path, int]:
        epoch, place = divmod(number, self.length)
        row = self.first + int(_order(self.seed, epoch, self.length)[place])
        for file, count in zip(self.files, self.counts, strict=True):
            if row < count:
                return file, row
            row -= count
        raise IndexError(number)

    def _files(self, folder: str) -> list[Path]:
        found = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
        if not found:
            raise InputError(
                "diffusion models are trained on mock data or on a folder of latents in safetensors files",
                field=self.field,
                value=folder,
                fix=(f"{self.field}=mock",) if self.field == "data.dataset" else ("data.validation_part=0.05",),
            )
        return found

    def _check(self, file: Path) -> int:
        """The number of samples in a file, whose tensors must all be there in the shape of the model."""
        tensors = _opened(file)
        names = set(tensors.keys())
        wanted = {"latents", "text"} | ({"pooled"} if self.config.pooled_width else set())
        if wanted - names:
            raise self._error(file, f"has no {', '.join(sorted(wanted - names))}; it has {', '.join(sorted(names))}")
        shapes = {name: list(tensors.get_slice(name).get_shape()) for name in wanted}
        for name in wanted:
            if tensors.get_slice(name).get_dtype() not in FLOATS:
                raise self._error(file, f"{name} are {tensors.get_slice(name).get_dtype()}, not floats")
        if not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
            raise self._error(file, f"tensors differ in their number of samples: {shapes}")
        self._check_shapes(file, shapes)
        if file != self.files[0]:
            first = _opened(self.files[0])
            for name, shape in shapes.items():
                if shape[1:] != list(first.get_slice(name).get_shape())[1:]:
                    raise self._error(file, f"{name} of shape {shape[1:]} differ from those of {self.files[0].name}")
        return int(shapes["latents"][0])

    def _check_shapes(self, file: Path, shapes: dict[str, list[int]]) -> None:
        _, channels, *sides = shapes["latents"]
        image = self.config.model_type == "flux"
        if image and len(sides) == 2:
            sides = [1, *sides]
        if len(sides) != 3 or channels != self.config.channels or (image and sides[0] != 1):
            wanted = f"[N, {self.config.channels}, {'1, ' if image else 'frames, '}height, width]"
            raise self._error(file, f"latents are {shapes['latents']}, where the model takes {wanted}")
        if any(side % patch for side, patch in zip(sides, self.config.patch, strict=True)):
            raise self._error(file, f"latents of {sides} cannot be cut into patches of {list(self.config.patch)}")
        counts = [side // patch for side, patch in zip(sides, self.config.patch, strict=True)]
        most = self.config.values.get("rope_max_seq_len")
        if most is not None and max(counts) > most:
            raise self._error(file, f"samples have {max(counts)} tokens along a side; the model knows {most} positions")
        tokens = int(np.prod(counts))
        if tokens != self.seq_length:
            raise InputError(
                f"{file.name} has samples of {tokens} tokens",
                field="data.seq_length",
                value=self.seq_length,
                fix=(f"data.seq_length={tokens}",),
            )
        for name, width in (("text", self.config.text_width), ("pooled", self.config.pooled_width)):
            dims = 3 if name == "text" else 2
            if name in shapes and (len(shapes[name]) != dims or shapes[name][-1] != width):
                raise self._error(
                    file, f"{name} is {shapes[name]}, where the model takes width {width} in {dims} dimensions"
                )

    def _error(self, file: Path, text: str) -> InputError:
        return InputError(text, field=self.field, value=str(file))


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(length)


@lru_cache(maxsize=256)
def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"is no safetensors file: {error}", field="data.dataset", value=str(file)) from None

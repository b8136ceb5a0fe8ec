"""Latents and text embeddings by sample number: mock ones, or a folder of precomputed ones.

A folder has safetensors files, read in name order. Each has, for its N samples:

    latents  [N, channels, frames, height, width]; frames is optional for images. Normalized for the transformer:
             the autoencoder's output minus its shift, times its scale.
    text     [N, tokens, width], the text encoder's last hidden states
    pooled   [N, width], the pooled text embedding; FLUX only

All samples have the same shape; its number of tokens (of 1 × 2 × 2 latents in both models) is the recipe's seq_length.
Values are floats of any width. Every epoch is shuffled by the seed.
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
TEXT_TOKENS = 512  # of mock texts, as in Wan and FLUX training; capped at the sample length
CLASSES = 8  # of mock samples
CLASS_NOISE = 0.1  # noise within a class of mock samples


@dataclass(frozen=True)
class LatentSamples:
    """Latents [n, channels, frames, height, width] and their text embeddings."""

    latents: torch.Tensor
    text: torch.Tensor  # [n, tokens, width]
    pooled: torch.Tensor | None = None  # [n, width]

    def take(self, rows: Sequence[int], keep: Sequence[bool]) -> LatentSamples:
        """Return the samples of these rows; the loader gives those not kept no weight."""
        return LatentSamples(self.latents[rows], self.text[rows], None if self.pooled is None else self.pooled[rows])


class LatentSource(Protocol):
    """Samples by number: the same number returns the same sample on every rank."""

    def samples(self, numbers: Sequence[int]) -> LatentSamples: ...


def open_latents(recipe: Recipe, config: DenoiserConfig, held_out: bool = False) -> LatentSource:
    """Open a recipe's latents, or their held-out part."""
    data, seed = recipe.data, recipe.train.seed
    if data.blend or data.anneal_blend:
        raise InputError(
            "diffusion models train on one folder of latents, not on a blend",
            field="data.blend" if data.blend else "data.anneal_blend",
            value=data.blend or data.anneal_blend,
            fix=("data.dataset=FOLDER without a blend",),
        )
    if data.dataset in MOCK_NAMES and not (held_out and data.validation):
        return MockLatents(config, data.seq_length, seed, seed + VALIDATION_SEED_OFFSET * held_out)
    if held_out and data.validation:
        return LatentFolder(data.validation, config, data.seq_length, seed, "data.validation")
    fraction = 0.0 if data.validation else data.validation_part
    if held_out and not fraction:
        raise InputError(
            "no validation data is set",
            field="data.validation",
            value=data.validation,
            fix=("data.validation=FOLDER", "data.validation_part=0.05", "train.eval_every=0"),
        )
    fractions = (1 - fraction, 1.0) if held_out else (0.0, 1 - fraction)
    return LatentFolder(data.dataset, config, data.seq_length, seed, "data.dataset", fractions)


def mock_grid(tokens: int, video: bool) -> tuple[int, int, int]:
    """Return frames, rows and columns of mock samples with this many tokens, close to a cube or square."""
    frames = max(d for d in (1, 2, 4, 8) if d == 1 or (video and tokens % d == 0 and d**3 <= tokens))
    area = tokens // frames
    rows = max(d for d in range(1, int(area**0.5) + 1) if area % d == 0)
    return frames, rows, area // rows


class MockLatents:
    """Mock samples of a few classes that their texts identify: learnable, so the loss falls."""

    def __init__(self, config: DenoiserConfig, seq_length: int, classes_seed: int, seed: int) -> None:
        grid = mock_grid(seq_length, config.model_type == "wan")
        sides = [count * side for count, side in zip(grid, config.patch, strict=True)]
        self.shape = (config.channels, *sides)
        self.text_shape = (min(TEXT_TOKENS, seq_length), config.text_width)
        self.seed = seed
        random = np.random.Generator(np.random.Philox(key=[classes_seed, 1 << 62]))
        # Signs make all classes equally hard, so that the loss of a step does not depend on its classes.
        self.means = np.sign(_normal(random, (CLASSES, config.channels, 1, 1, 1)))
        self.texts = _normal(random, (CLASSES, config.text_width))
        self.pooled = _normal(random, (CLASSES, config.pooled_width)) if config.pooled_width else None

    def samples(self, numbers: Sequence[int]) -> LatentSamples:
        """Return the samples with these numbers."""
        generated = [self._sample(number) for number in numbers]
        labels = torch.tensor([label for label, _, _ in generated])
        return LatentSamples(
            torch.from_numpy(np.stack([latents for _, latents, _ in generated])),
            torch.from_numpy(np.stack([text for _, _, text in generated])),
            None if self.pooled is None else torch.from_numpy(self.pooled)[labels],
        )

    def _sample(self, number: int) -> tuple[int, NDArray[np.float32], NDArray[np.float32]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        label = int(random.integers(CLASSES))
        latents = self.means[label] + CLASS_NOISE * _normal(random, self.shape)
        return label, latents, self.texts[label] + CLASS_NOISE * _normal(random, self.text_shape)


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return random.standard_normal(shape, dtype=np.float32)


class LatentFolder:
    """The samples of a folder of safetensors files between two fractions of it; format in the module docstring."""

    def __init__(
        self,
        folder: str,
        config: DenoiserConfig,
        seq_length: int,
        seed: int,
        field: str = "data.dataset",
        fraction: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.config, self.seq_length, self.seed, self.field = config, seq_length, seed, field
        self.files = self._files(folder)
        self.counts = [self._check(file) for file in self.files]
        total = sum(self.counts)
        self.first, fractions = round(fraction[0] * total), round(fraction[1] * total)
        self.length = fractions - self.first
        if self.length < 1:
            raise InputError(f"none of the {total} samples is left for this part", field=field, value=folder)

    def samples(self, numbers: Sequence[int]) -> LatentSamples:
        """Return the samples with these numbers; numbers past the last start another epoch."""
        rows = [self._row(number) for number in numbers]
        names = ("latents", "text", *(("pooled",) if self.config.pooled_width else ()))
        read = {
            name: torch.stack([_open_safetensors(file).get_slice(name)[row].float() for file, row in rows])
            for name in names
        }
        latents = read["latents"]
        return LatentSamples(latents if latents.dim() == 5 else latents.unsqueeze(2), read["text"], read.get("pooled"))

    def epoch_size(self, limit: int) -> int:
        """Return the number of different samples."""
        return self.length

    def _row(self, number: int) -> tuple[Path, int]:
        epoch, position = divmod(number, self.length)
        row = self.first + int(_permutation(self.seed, epoch, self.length)[position])
        for file, count in zip(self.files, self.counts, strict=True):
            if row < count:
                return file, row
            row -= count
        raise IndexError(number)

    def _files(self, folder: str) -> list[Path]:
        found = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
        if not found:
            raise InputError(
                "diffusion models train on mock data or on a folder of latents in safetensors files",
                field=self.field,
                value=folder,
                fix=(f"{self.field}=mock",) if self.field == "data.dataset" else ("data.validation_part=0.05",),
            )
        return found

    def _check(self, file: Path) -> int:
        """Check the tensors of a file against the model; return its number of samples."""
        tensors = _open_safetensors(file)
        names = set(tensors.keys())
        required = {"latents", "text"} | ({"pooled"} if self.config.pooled_width else set())
        if required - names:
            raise self._error(file, f"has no {', '.join(sorted(required - names))}; it has {', '.join(sorted(names))}")
        shapes = {name: list(tensors.get_slice(name).get_shape()) for name in required}
        for name in required:
            if tensors.get_slice(name).get_dtype() not in FLOATS:
                raise self._error(file, f"{name} are {tensors.get_slice(name).get_dtype()}, not floats")
        if not all(shapes.values()) or len({shape[0] for shape in shapes.values()}) != 1:
            raise self._error(file, f"tensors differ in their number of samples: {shapes}")
        self._check_shapes(file, shapes)
        if file != self.files[0]:
            first = _open_safetensors(self.files[0])
            for name, shape in shapes.items():
                if shape[1:] != list(first.get_slice(name).get_shape())[1:]:
                    raise self._error(file, f"{name} have shape {shape[1:]}, unlike those of {self.files[0].name}")
        return int(shapes["latents"][0])

    def _check_shapes(self, file: Path, shapes: dict[str, list[int]]) -> None:
        _, channels, *sides = shapes["latents"]
        image = self.config.model_type == "flux"
        if image and len(sides) == 2:
            sides = [1, *sides]
        if len(sides) != 3 or channels != self.config.channels or (image and sides[0] != 1):
            required = f"[N, {self.config.channels}, {'1, ' if image else 'frames, '}height, width]"
            raise self._error(file, f"latents have shape {shapes['latents']}, the model expects {required}")
        if any(side % patch for side, patch in zip(sides, self.config.patch, strict=True)):
            raise self._error(file, f"latents of {sides} cannot be split into patches of {list(self.config.patch)}")
        counts = [side // patch for side, patch in zip(sides, self.config.patch, strict=True)]
        max_positions = self.config.values.get("rope_max_seq_len")
        if max_positions is not None and max(counts) > max_positions:
            raise self._error(
                file, f"samples have {max(counts)} tokens along a side; the model has {max_positions} positions"
            )
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
                    file, f"{name} has shape {shapes[name]}, the model expects width {width} in {dims} dimensions"
                )

    def _error(self, file: Path, text: str) -> InputError:
        return InputError(text, field=self.field, value=str(file))


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(length)


@lru_cache(maxsize=256)
def _open_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"is not a safetensors file: {error}", field="data.dataset", value=str(file)) from None

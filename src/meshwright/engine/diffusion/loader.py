"""The loader of latents: each rank's part of a step, with noise and times."""

from __future__ import annotations

import numpy as np
import torch

from meshwright.engine.data.finite import FiniteSource
from meshwright.engine.data.sampler import Batch, sample_numbers
from meshwright.engine.diffusion import flow
from meshwright.engine.diffusion.config import DenoiserConfig
from meshwright.engine.diffusion.data import LatentSource
from meshwright.engine.mesh import GroupInfo, Mesh
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe


def patchify(latents: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """Split latents [n, channels, frames, height, width] into tokens [n, tokens, channels × patch], channel-major."""
    n, channels = latents.shape[:2]
    frames, rows, columns = (side // size for side, size in zip(latents.shape[2:], patch, strict=True))
    patches = latents.reshape(n, channels, frames, patch[0], rows, patch[1], columns, patch[2])
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(n, frames * rows * columns, -1)


def token_positions(shape: torch.Size, patch: tuple[int, int, int]) -> torch.Tensor:
    """Return frame, row and column of every token, [tokens, 3]."""
    counts = [side // size for side, size in zip(shape[2:], patch, strict=True)]
    return torch.cartesian_prod(*(torch.arange(count) for count in counts)).reshape(-1, 3)


class LatentLoader:
    """Gives each rank its samples of every step and, with cp and sp, its part of their tokens."""

    def __init__(
        self,
        source: LatentSource | FiniteSource,
        config: DenoiserConfig,
        recipe: Recipe,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.source, self.config, self.recipe, self.mesh, self.device = source, config, recipe, mesh, device

    def batch(self, step: int) -> Batch:
        """Return this rank's part of a step."""
        train, mesh = self.recipe.train, self.mesh
        numbers = sample_numbers(
            step, train.global_batch_size, self.recipe.layout.micro_batch_size, mesh.dp.size, mesh.dp.rank
        )
        first, count = step * train.global_batch_size, train.global_batch_size
        valid = self.source.valid(first, count) if isinstance(self.source, FiniteSource) else count
        samples = self.source.samples(numbers)
        shape, patch = samples.latents.shape, self.config.patch
        tokens = patchify(samples.latents, patch)
        noise, times = self._noise(numbers, shape[1:], tokens.shape[1])
        positions = self._shard_over_cp(token_positions(shape, patch), 0)
        fields = {
            "noise": self._local_tokens(patchify(noise, patch)),
            "times": times,
            "text": samples.text if self.config.model_type == "wan" else self._local_tokens(samples.text),
            "positions": positions.expand(len(numbers), -1, -1),
            "weights": self._weights(numbers, valid, tokens[0].numel()),
        }
        if samples.pooled is not None:
            fields["pooled"] = samples.pooled
        tensors = {name: value.to(self.device, non_blocking=True) for name, value in fields.items()}
        total_tokens = train.global_batch_size * tokens.shape[1]
        return Batch(
            self._local_tokens(tokens).to(self.device, non_blocking=True),
            tensors,
            numbers,
            valid * tokens.shape[1],
            total_tokens,
            valid,
        )

    def close(self) -> None:
        """Do nothing: latents are not prefetched."""

    def _weights(self, numbers: list[int], valid: int, values: int) -> torch.Tensor:
        """Return the loss weight of each sample; padding of a finite source has none."""
        size = self.source.size if isinstance(self.source, FiniteSource) else None
        kept = torch.tensor([float(size is None or number < size) for number in numbers])
        return kept / (max(valid, 1) * values)

    def _noise(self, numbers: list[int], shape: torch.Size, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = flow.shift_of(self.config.model_type, tokens)
        drawn = [flow.draw(self.recipe.train.seed, number, tuple(shape), shift) for number in numbers]
        times = torch.tensor([time for _, time in drawn], dtype=torch.float32)
        return torch.from_numpy(np.stack([noise for noise, _ in drawn])), times

    def _local_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the tokens [n, tokens, ...]: over cp and, with sp, over tp."""
        x = self._shard_over_cp(x, 1)
        return _shard(x, self.mesh.tp, 1) if self.recipe.layout.sp else x

    def _shard_over_cp(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return _shard(x, self.mesh.cp, dim)


def _shard(x: torch.Tensor, axis: GroupInfo, dim: int) -> torch.Tensor:
    if x.shape[dim] % axis.size:
        raise InputError(
            f"{x.shape[dim]} tokens of a sample or its text cannot be split evenly over {axis.size} ranks",
            field="data.seq_length",
            value=x.shape[dim],
            fix=("layout.cp=1 layout.sp=false",),
        )
    return x.chunk(axis.size, dim)[axis.rank]

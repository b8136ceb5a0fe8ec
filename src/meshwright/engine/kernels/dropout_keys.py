"""Deterministic dropout: the same mask for every layout, for recomputed layers and after a resume.

A token has a key, hashed from the run's seed, its sample number and its position in the sample. A layer hashes its
number into the keys; whether a channel is dropped depends on the token's key, the adapter's key and the channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.engine.model.init import MASK, hash32

_GOLDEN = 0x9E3779B1  # golden-ratio hash constant: neighboring inputs end up far apart


def token_keys(seed: int, samples: Sequence[int], positions: Tensor) -> Tensor:
    """Return the keys [samples, positions] of tokens from their sample numbers and positions."""
    numbers = torch.tensor(samples, dtype=torch.int64)[:, None]
    of_sample = hash32(hash32(numbers) + (numbers >> 32) * _GOLDEN + seed * _GOLDEN)
    return hash32(of_sample + positions[None].to(torch.int64) * _GOLDEN)


def layer_keys(keys: Tensor, layer: int) -> Tensor:
    """Return the keys of the same tokens in a layer."""
    return hash32(keys + (layer + 1) * _GOLDEN)


def apply_dropout(x: Tensor, keys: Tensor, adapter_key: int, first: int, probability: float) -> Tensor:
    """Return x [..., channels] with dropout; kept values are scaled up so that the mean stays.

    `first` is the index of x's first channel in the full width (tensor parallelism).
    """
    channels = torch.arange(first, first + x.shape[-1], device=x.device)
    drawn = hash32(hash32(keys.reshape(*x.shape[:-1], 1) ^ adapter_key) + channels * _GOLDEN)
    kept = drawn >= int(probability * (MASK + 1))
    return torch.where(kept, x * (1 / (1 - probability)), torch.zeros((), dtype=x.dtype, device=x.device))

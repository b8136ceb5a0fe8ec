"""Dropout that is a function of what is dropped: the same for every layout, for recomputed layers and after a resume.

A token has a key, made of the run's seed, its sample's number and its place in the sample. A layer mixes its number
into the keys; whether a channel is dropped depends on the token's key, the adapter's own and the channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.engine.model.init import MASK, hash32

_GOLDEN = 0x9E3779B1  # odd and far from round: neighbours end up far apart


def token_keys(seed: int, samples: Sequence[int], places: Tensor) -> Tensor:
    """The keys [samples, places] of tokens by the numbers of their samples and their places in them."""
    numbers = torch.tensor(samples, dtype=torch.int64)[:, None]
    of_sample = hash32(hash32(numbers) + (numbers >> 32) * _GOLDEN + seed * _GOLDEN)
    return hash32(of_sample + places[None].to(torch.int64) * _GOLDEN)


def layer_keys(keys: Tensor, layer: int) -> Tensor:
    """The keys of the same tokens in one of the layers."""
    return hash32(keys + (layer + 1) * _GOLDEN)


def dropped(x: Tensor, keys: Tensor, own: int, first: int, probability: float) -> Tensor:
    """x [..., channels], each number nought with this probability and else scaled up, so that the mean stays.

    `first` is the number of the first channel of x in the whole.
    """
    channels = torch.arange(first, first + x.shape[-1], device=x.device)
    drawn = hash32(hash32(keys.reshape(*x.shape[:-1], 1) ^ own) + channels * _GOLDEN)
    kept = drawn >= int(probability * (MASK + 1))
    return torch.where(kept, x * (1 / (1 - probability)), torch.zeros((), dtype=x.dtype, device=x.device))

"""Flow matching: what a model of velocities is trained on. Part of the contract of a recipe.

A sample x and noise n of the same shape are mixed by a time t between 0 (data) and 1 (noise): (1 - t) x + t n. The
model is asked for the velocity n - x; the loss is the mean square of what it misses, all numbers alike.
Times are drawn by a logit-normal, u = sigmoid(z), and moved towards noise by a shift s: t = s u / (1 + (s - 1) u).
Wan's shift is 3; FLUX's grows with the tokens of an image, exp(0.5) at 256 and exp(1.15) at 4096, linear in between in
the exponent. Models that are told a guidance (FLUX dev) are told 3.5. Texts are never dropped.
Noise and time of a sample are functions of the seed and of the sample's number alone, in every layout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TIMES = 1000.0  # models are told times from 0 to 1000
GUIDANCE = 3.5
WAN_SHIFT = 3.0
FLUX_EXPONENTS = ((256, 0.5), (4096, 1.15))  # tokens and the exponent of the shift
NOISE = 1 << 40  # added to the seed of noise and times, so that they are not those of mock data


def shift_of(model_type: str, tokens: int) -> float:
    """How far times are moved towards noise."""
    if model_type == "wan":
        return WAN_SHIFT
    (low, first), (high, last) = FLUX_EXPONENTS
    return math.exp(first + (last - first) * (tokens - low) / (high - low))


def draw(seed: int, number: int, shape: tuple[int, ...], shift: float) -> tuple[NDArray[np.float32], float]:
    """The noise and the time of a sample."""
    random = np.random.Generator(np.random.Philox(key=[seed + NOISE, number]))
    mixed = 1 / (1 + math.exp(-random.standard_normal()))
    return random.standard_normal(shape, dtype=np.float32), shift * mixed / (1 + (shift - 1) * mixed)


def mixed(latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The samples at their times, [n, tokens, width]."""
    t = times[:, None, None]
    return (1 - t) * latents + t * noise


def loss(found: torch.Tensor, velocity: torch.Tensor, weights: torch.Tensor) -> Any:
    """The squared error of velocities, summed with what one number of each sample counts."""
    return ((found.float() - velocity).square().sum((1, 2)) * weights).sum()

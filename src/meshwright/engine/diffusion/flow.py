"""Flow matching: the training objective of velocity models. Part of the contract of a recipe.

A sample x and noise n are interpolated at a time t between 0 (data) and 1 (noise): (1 - t) x + t n. The model predicts
the velocity n - x; the loss is the mean squared error over all values.
Times are logit-normal, u = sigmoid(z), shifted towards noise by a shift s: t = s u / (1 + (s - 1) u).
Wan's shift is 3; FLUX's grows with the tokens of an image, exp(0.5) at 256 and exp(1.15) at 4096, linear in between in
the exponent. Guidance-distilled models (FLUX dev) get a guidance of 3.5. Texts are never dropped.
Noise and time of a sample depend only on the seed and the sample number, in every layout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

TIME_SCALE = 1000.0  # models take times from 0 to 1000
GUIDANCE = 3.5
WAN_SHIFT = 3.0
FLUX_EXPONENTS = ((256, 0.5), (4096, 1.15))  # tokens and the exponent of the shift
NOISE_SEED_OFFSET = 1 << 40  # added to the seed of noise and times, so that they differ from mock data


def shift_of(model_type: str, tokens: int) -> float:
    """Return the shift of times towards noise."""
    if model_type == "wan":
        return WAN_SHIFT
    (low, first), (high, last) = FLUX_EXPONENTS
    return math.exp(first + (last - first) * (tokens - low) / (high - low))


def draw(seed: int, number: int, shape: tuple[int, ...], shift: float) -> tuple[NDArray[np.float32], float]:
    """Draw the noise and the time of a sample."""
    random = np.random.Generator(np.random.Philox(key=[seed + NOISE_SEED_OFFSET, number]))
    add_noise = 1 / (1 + math.exp(-random.standard_normal()))
    return random.standard_normal(shape, dtype=np.float32), shift * add_noise / (1 + (shift - 1) * add_noise)


def add_noise(latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Interpolate samples and noise at the given times, [n, tokens, width]."""
    t = times[:, None, None]
    return (1 - t) * latents + t * noise


def loss(predicted: torch.Tensor, velocity: torch.Tensor, weights: torch.Tensor) -> Any:
    """Return the squared error of velocities, summed with a weight per sample."""
    return ((predicted.float() - velocity).square().sum((1, 2)) * weights).sum()

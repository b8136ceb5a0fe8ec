"""NF4: four-bit weights with sixteen levels at quantiles of a normal distribution.

A block of 64 consecutive values along the last dimension shares a scale, its largest magnitude; a value is stored as
the nearest level times the scale, two per byte, the first in the high half. Scales have the dtype of the weights, in
which a largest magnitude is exact: 4.25 bits per weight for bf16, 4.5 for fp32. A scale depends on its block only, so
a shard that does not split blocks has the codes of the full weight.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from meshwright.engine.kernels.device_caps import is_dry, launch, on_gpu

BLOCK = 64
# The levels of the QLoRA paper (Dettmers et al., 2023, appendix E): quantiles of the normal distribution, scaled to ±1.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
BYTES_AT_ONCE = 2**22  # codes computed at once: bounds temporary memory
PROGRAM_BYTES = 1024  # codes that one Triton program unpacks


def block_length(width: int) -> int:
    """Return how many values of a row share a scale: 64, or fewer if 64 does not divide the width."""
    return math.gcd(width, BLOCK)


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the codes and scales of a weight."""
    *rows, width = shape
    return (*rows, width // 2), (*rows, width // block_length(width))


@torch.no_grad()
def pack(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantize a weight into `codes` and `scales`, which have the same rows."""
    block = 2 * codes.shape[-1] // scales.shape[-1]
    blocks, out_codes = weight.reshape(-1, block), codes.view(-1, block // 2)
    largest = blocks.abs().amax(1)
    scales.copy_(largest.view(scales.shape))
    thresholds = _thresholds(weight.device)
    step = max(1, 2 * BYTES_AT_ONCE // block)
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        # An all-zero block has scale zero; the clamp avoids the division by zero and its levels are zero anyway.
        relative = blocks[part].float() / largest[part].float().clamp(min=1e-38)[:, None]
        levels = torch.bucketize(relative, thresholds, out_int32=True).to(torch.uint8)
        out_codes[part] = levels[:, 0::2] << 4 | levels[:, 1::2]


def _thresholds(device: torch.device) -> Tensor:
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    return ((levels[1:] + levels[:-1]) / 2).to(device=device, dtype=torch.float32)


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the dequantized weight in the dtype of the scales."""
    codes = codes.to(torch.uint8).contiguous()  # some versions of fully_shard return gathered bytes as floats
    scales = scales.contiguous()
    if on_gpu(codes):
        return _on_gpu(codes, scales)
    levels = _levels_like(codes)
    numbers = torch.stack([levels[(codes >> 4).int()], levels[(codes & 15).int()]], -1).view(*scales.shape, -1)
    return (numbers * scales[..., None].float()).to(scales.dtype).view(*codes.shape[:-1], -1)


def _on_gpu(codes: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=scales.dtype, device=codes.device)
    count = codes.numel()
    levels = _levels_like(codes)
    grid = (-(-count // PROGRAM_BYTES),)
    bytes_per_scale = codes.shape[-1] // scales.shape[-1]
    launch("unpack_nf4", grid, codes, scales, levels, out, count, bytes_per_scale, BLOCK=PROGRAM_BYTES)
    return out


def _levels_like(codes: Tensor) -> Tensor:
    if is_dry(codes):  # no cached tensor may outlive a dry run
        return codes.new_empty(len(LEVELS), dtype=torch.float32)
    return _levels_on(codes.device)


@cache
def _levels_on(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)

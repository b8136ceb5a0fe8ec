"""The MXFP8 format: e4m3 numbers, 32 of them in a row sharing one power of two (e8m0).

GPUs of compute capability 10.0 and newer multiply it in hardware; elsewhere the product is that of the numbers that
the codes stand for. The hardware path has not been run: no such GPU was at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.engine.kernels.device_caps import capability, on_gpu

BLOCK = 32
CODES = torch.float8_e4m3fn
SCALES = torch.float8_e8m0fnu
CAPABILITY = (10, 0)
SMALLEST = 2.0**-100  # a block of noughts needs a scale too
MANTISSA = 0x7FFFFF
MANTISSA_BITS = 23
TILE = (128, 4)  # the rows and columns of scales that the hardware reads at once, in an order of its own


def in_hardware(tensor: Tensor) -> bool:
    """Whether the tensor is on a GPU that multiplies the format itself."""
    return on_gpu(tensor) and capability(tensor.device) >= CAPABILITY


def to_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [rows, columns] as codes of its shape and scales [rows, columns / 32].

    A scale is the smallest power of two that leaves no number of its block beyond the format's largest.
    """
    rows, columns = matrix.shape
    blocks = matrix.float().reshape(rows, columns // BLOCK, BLOCK)
    largest = torch.finfo(CODES).max
    unit = (blocks.abs().amax(-1) / largest).clamp(min=SMALLEST)
    exponent = (unit.view(torch.int32) + MANTISSA) >> MANTISSA_BITS  # rounded up to a power of two
    power = (exponent << MANTISSA_BITS).view(torch.float32)
    codes = (blocks / power.unsqueeze(-1)).clamp(-largest, largest).to(CODES)
    return codes.reshape(rows, columns), exponent.to(torch.uint8).view(SCALES)


def from_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers that codes and scales stand for."""
    rows, columns = codes.shape
    power = (scales.view(torch.uint8).to(torch.int32) << MANTISSA_BITS).view(torch.float32)
    return (codes.float().reshape(rows, columns // BLOCK, BLOCK) * power.unsqueeze(-1)).reshape(rows, columns)


def product(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right.T of two matrices in blocks along their columns."""
    if not in_hardware(left):
        return in_format(from_blocks(left, left_scales) @ from_blocks(right, right_scales).t(), dtype)
    made = torch._scaled_mm(
        left, right.t(), scale_a=tiled(left_scales), scale_b=tiled(right_scales), out_dtype=torch.bfloat16
    )
    return in_format(made, dtype)


def in_format(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a format; a cast that changes nothing is left out.

    As the last operation of an autograd function it would lose every gradient in what torch 2.11 compiles.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def tiled(scales: Tensor) -> Tensor:
    """Scales [rows, columns] in the order in which the hardware reads them, filled up to whole tiles.

    In a tile of 128 rows and 4 columns the scale at (row, column) lies at (row % 32)·16 + (row // 32)·4 + column.
    """
    rows, columns = scales.shape
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    filled = torch.nn.functional.pad(
        scales.view(torch.uint8), (0, across * TILE[1] - columns, 0, down * TILE[0] - rows)
    )
    quarters = filled.reshape(down, 4, 32, across, 4)  # tile, row // 32, row % 32, tile, column
    return quarters.permute(0, 3, 2, 1, 4).flatten().view(SCALES)

"""The MXFP8 format: e4m3 values, of which 32 in a row share one power-of-two scale (e8m0).

GPUs of compute capability 10.0 and newer multiply it in hardware; elsewhere the dequantized values are multiplied. The
hardware path has not been run: no such GPU was available.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.engine.kernels.device_caps import capability, on_gpu

BLOCK = 32
CODES = torch.float8_e4m3fn
SCALES = torch.float8_e8m0fnu
CAPABILITY = (10, 0)
SMALLEST = 2.0**-100  # the scale of an all-zero block
MANTISSA = 0x7FFFFF
MANTISSA_BITS = 23
TILE = (128, 4)  # rows and columns of scales per hardware tile


def has_hardware_support(tensor: Tensor) -> bool:
    """Return whether the tensor is on a GPU with MXFP8 tensor cores."""
    return on_gpu(tensor) and capability(tensor.device) >= CAPABILITY


def to_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix [rows, columns] as codes of its shape and scales [rows, columns / 32].

    A scale is the smallest power of two with which no value of its block overflows.
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
    """Return the dequantized fp32 matrix."""
    rows, columns = codes.shape
    power = (scales.view(torch.uint8).to(torch.int32) << MANTISSA_BITS).view(torch.float32)
    return (codes.float().reshape(rows, columns // BLOCK, BLOCK) * power.unsqueeze(-1)).reshape(rows, columns)


def matmul(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right.T of two matrices quantized in blocks along their columns."""
    if not has_hardware_support(left):
        return cast_if_needed(from_blocks(left, left_scales) @ from_blocks(right, right_scales).t(), dtype)
    result = torch._scaled_mm(
        left, right.t(), scale_a=tile_scales(left_scales), scale_b=tile_scales(right_scales), out_dtype=torch.bfloat16
    )
    return cast_if_needed(result, dtype)


def cast_if_needed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype, without a cast if it has it already.

    A no-op cast as the last operation of an autograd function loses all gradients when compiled by torch 2.11.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def tile_scales(scales: Tensor) -> Tensor:
    """Return scales [rows, columns] in hardware order, padded to full tiles.

    In a tile of 128 rows and 4 columns the scale of (row, column) is at (row % 32)·16 + (row // 32)·4 + column.
    """
    rows, columns = scales.shape
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    filled = torch.nn.functional.pad(
        scales.view(torch.uint8), (0, across * TILE[1] - columns, 0, down * TILE[0] - rows)
    )
    quarters = filled.reshape(down, 4, 32, across, 4)  # tile, row // 32, row % 32, tile, column
    return quarters.permute(0, 3, 2, 1, 4).flatten().view(SCALES)

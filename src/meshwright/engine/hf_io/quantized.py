"""Reads quantized model folders: mxfp4 and fp8 weights appear as bf16 tensors, dequantized slice by slice.

A quantized tensor is stored with its scales in a second tensor. Here both appear as one tensor under the name that an
unquantized folder would use, so that loading into a layout reads only the codes and scales of the slices it needs.

mxfp4  `X_blocks` [experts, out, in / 32, 16] with two 4-bit floats per byte and `X_scales` [experts, out, in / 32], the
       exponents of powers of two; X is [experts, in, out] (gpt-oss)
fp8    `X` in float8 with `X_scale_inv` (fp8) or `X_scale` (compressed-tensors): one factor per block, per row or per
       tensor, in any float format
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.engine.hf_io.files import SafetensorsFolder
from meshwright.engine.hf_io.find import FIELD, read_json
from meshwright.errors import InputError
from meshwright.hub import CONFIG
from meshwright.models import Quantization, quantization_of

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_BLOCK = 32  # values that share a scale
MX_EXPONENT_BIAS = 127
BLOCKS, SCALES = "_blocks", "_scales"
FP8_FORMATS = ("F8_E4M3", "F8_E5M2")
FP8_SCALES = ("_scale_inv", "_scale")
# Scales of activations and of the key-value cache: training computes both in the compute format.
ACTIVATION_SCALES = ("activation_scale", "activation_scale_inv", "input_scale", "k_scale", "v_scale", "q_scale")


class _Stored(NamedTuple):
    """Where a dequantized tensor's codes and scales are stored."""

    codes: str
    scales: str
    is_mxfp4: bool


class QuantizedFolder(SafetensorsFolder):
    """A folder whose quantized tensors are read as bf16; all other tensors are read as they are."""

    slice_bytes = 1 << 23  # of bf16 weights: dequantizing them needs several times as much

    def __init__(self, folder: Path, quantization: Quantization) -> None:
        super().__init__(folder)
        self.block = quantization.block
        self._stored: dict[str, _Stored] = {}
        scales = {name for name in self.stored_in if name.endswith((*FP8_SCALES, SCALES))}
        for name in self.stored_in:
            found = self._pair(name, scales)
            if found is not None:
                self._stored[name.removesuffix(BLOCKS) if found.is_mxfp4 else name] = found
        hidden = {name for one in self._stored.values() for name in (one.codes, one.scales)}
        hidden |= {name for name in self.stored_in if name.rpartition(".")[2] in ACTIVATION_SCALES}
        plain = {name: file for name, file in self.stored_in.items() if name not in hidden}
        self.file_of = plain | {name: self.stored_in[one.codes] for name, one in self._stored.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor after dequantization."""
        one = self._stored.get(name)
        if one is None:
            return super().shape(name)
        codes = self._stored_shape(one.codes)
        if not one.is_mxfp4:
            return codes
        self._check_mxfp4(one, codes)
        return (*codes[:-3], codes[-2] * MX_BLOCK, codes[-3])

    def require_floats(self, name: str) -> None:
        """Raise if a tensor is neither floating point nor dequantized here."""
        if name not in self._stored:
            super().require_floats(name)

    def read(self, name: str, box: Sequence[slice] = ()) -> torch.Tensor:
        """Read a tensor, or the part of it given by one slice per dimension; quantized ones as bf16."""
        one = self._stored.get(name)
        if one is None:
            return super().read(name, box)
        full = self.shape(name)
        box = tuple(box) or tuple(slice(0, size) for size in full)
        return self._read_mxfp4(one, box) if one.is_mxfp4 else self._read_fp8(one, full, box)

    def _pair(self, name: str, scales: set[str]) -> _Stored | None:
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in scales:
            return _Stored(name, name.removesuffix(BLOCKS) + SCALES, True)
        scale = next((name + suffix for suffix in FP8_SCALES if name + suffix in scales), None)
        if scale is not None and self._slice(name).get_dtype() in FP8_FORMATS:
            return _Stored(name, scale, False)
        return None

    def _read_mxfp4(self, one: _Stored, box: Sequence[slice]) -> torch.Tensor:
        *experts, inputs, outputs = box
        groups = slice(inputs.start // MX_BLOCK, -(-inputs.stop // MX_BLOCK))
        codes = super().read(one.codes, (*experts, outputs, groups, slice(0, MX_BLOCK // 2)))
        exponents = super().read(one.scales, (*experts, outputs, groups))
        first = inputs.start - groups.start * MX_BLOCK
        weights = dequantize_mxfp4(codes, exponents)[..., first : first + inputs.stop - inputs.start]
        return weights.transpose(-1, -2)

    def _read_fp8(self, one: _Stored, full: Sequence[int], box: Sequence[slice]) -> torch.Tensor:
        grid = self._stored_shape(one.scales)
        weights = super().read(one.codes, box).float()
        if grid in ((), (1,)):
            return (weights * _as_float(super().read(one.scales))).bfloat16()
        steps = self._steps(one, full, grid)
        ranges = [slice(part.start // step, -(-part.stop // step)) for part, step in zip(box, steps, strict=True)]
        scales = _as_float(super().read(one.scales, ranges))
        for dim, (part, step, blocks) in enumerate(zip(box, steps, ranges, strict=True)):
            if step > 1:
                first = part.start - blocks.start * step
                scales = scales.repeat_interleave(step, dim).narrow(dim, first, part.stop - part.start)
        return weights.mul_(scales).bfloat16()

    def _steps(self, one: _Stored, full: Sequence[int], grid: Sequence[int]) -> list[int]:
        """Return the block size of each dimension: the config's for the last two, or one scale per row or tensor."""
        blocks = [1] * (len(full) - 2) + list(self.block or (1, full[-1]))
        # A single scale applies to the whole dimension, whatever the block size is.
        steps = [size if count == 1 else block for size, count, block in zip(full, grid, blocks, strict=False)]
        if len(grid) != len(full) or any(
            -(-size // step) != count for size, step, count in zip(full, steps, grid, strict=True)
        ):
            raise self._bad_scales(one, f"{list(full)} with blocks of {list(self.block or (1, full[-1]))}", grid)
        return steps

    def _check_mxfp4(self, one: _Stored, codes: Sequence[int]) -> None:
        scales = self._stored_shape(one.scales)
        if codes[-1] != MX_BLOCK // 2 or tuple(codes[:-1]) != scales:
            raise self._bad_scales(one, f"blocks {list(codes)} of {MX_BLOCK // 2} bytes", scales)

    def _bad_scales(self, one: _Stored, what: str, grid: Sequence[int]) -> InputError:
        return InputError(
            f"{one.scales} in {self.folder / self.stored_in[one.scales]} is {list(grid)}, which does not fit {what}",
            field=FIELD,
            value=str(self.folder),
            fix=("download the folder again", "use a folder of the same model with bf16 weights"),
        )

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())


def dequantize_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the bf16 values of 4-bit codes [..., groups, 16] with one exponent per group: [..., groups * 32]."""
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)
    low, high = values[(codes & 15).int()], values[(codes >> 4).int()]
    weights = torch.stack([low, high], dim=-1).flatten(-2)
    scaled = torch.ldexp(weights, exponents.int().unsqueeze(-1) - MX_EXPONENT_BIAS)
    return scaled.flatten(-2)


def _as_float(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in fp32; bytes are exponents of powers of two."""
    return (scales.float() - MX_EXPONENT_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()


def open_folder(folder: Path) -> SafetensorsFolder:
    """Open the weights of a model folder, quantized or not; raise if its quantization is not supported."""
    found = require_readable(folder)
    return SafetensorsFolder(folder) if found is None else QuantizedFolder(folder, found)


def require_readable(folder: Path) -> Quantization | None:
    """Return the quantization of a model folder; raise if its weights cannot be dequantized."""
    found = quantization_of(read_json(folder / CONFIG))
    if found is not None and found.reason:
        raise InputError(
            f"the weights in {folder} are quantized ({found.method}): {found.reason}",
            field=FIELD,
            value=str(folder),
            fix=found.fix,
        )
    return found

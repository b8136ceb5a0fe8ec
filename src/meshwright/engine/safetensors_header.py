"""What a safetensors file says of its tensors: the names of number formats, and the header before the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod

import torch

FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FLOATS = ("F64", "F32", "F16", "BF16")  # that weights are read from without scales beside them

Described = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's name, format and shape


def header(tensors: Iterable[Described], notes: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors in this order, and where in the file each of them begins."""
    said: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    begins: dict[str, int] = {}
    at = 0
    for name, dtype, shape in tensors:
        begins[name], end = at, at + prod(shape) * dtype.itemsize
        said[name] = {"dtype": FORMATS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return whole, {name: len(whole) + begin for name, begin in begins.items()}

"""The header of a safetensors file: dtype names, shapes and offsets."""

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
FLOATS = ("F64", "F32", "F16", "BF16")  # readable as weights without separate scales

TensorInfo = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape


def header(tensors: Iterable[TensorInfo], notes: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors in this order, and each tensor's offset in the file."""
    entries: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    offsets: dict[str, int] = {}
    at = 0
    for name, dtype, shape in tensors:
        offsets[name], end = at, at + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": FORMATS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    encoded = len(text).to_bytes(8, "little") + text
    return encoded, {name: len(encoded) + offset for name, offset in offsets.items()}

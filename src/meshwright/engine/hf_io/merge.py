"""Merges adapters into their weights, a few rows at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

ADAPTER_TENSOR = re.compile(r"^(?P<path>.+?)(?P<joint>\.|_)lora_(?P<part>A|B|magnitude)(?:_(?P<number>\d+))?$")


@dataclass(frozen=True)
class AdapterNames:
    """The stored tensors of one adapter; outputs may be stored in several segments."""

    parts: dict[str, list[str]] = field(default_factory=dict)  # A, B, magnitude -> stored names in order


@dataclass(frozen=True)
class Adapter:
    """One full adapter: A [rank, in] and B [out, rank], with a leading expert dimension if stacked."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None
    inputs_first: bool  # the adapted weight is stored [in, out]


def find_adapters(names: Iterable[str]) -> dict[str, AdapterNames]:
    """Return the adapters among stored names, by the name of the adapted weight."""
    numbered: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        found = ADAPTER_TENSOR.match(name)
        if found is None:
            continue
        weight = f"{found['path']}.weight" if found["joint"] == "." else found["path"]
        numbered.setdefault(weight, {}).setdefault(found["part"], {})[int(found["number"] or 0)] = name
    return {
        weight: AdapterNames({part: [those[i] for i in sorted(those)] for part, those in parts.items()})
        for weight, parts in numbered.items()
    }


def join_part(parts: Mapping[str, list[torch.Tensor]], part: str, stacked: bool) -> torch.Tensor:
    """Concatenate the segments of A, B or magnitude; flatten the output dimensions of stacked B."""
    full = torch.cat(parts[part])
    return full.flatten(1, -2) if stacked and part == "B" else full


def merge_rows(rows: torch.Tensor, first: int, adapter: Adapter) -> torch.Tensor:
    """Return rows of a weight, starting at `first`, with the adapter merged in fp32."""
    last = first + rows.shape[0]
    weight = rows.float()
    if adapter.a.ndim == 3:
        product = adapter.b[first:last].float() @ adapter.a[first:last].float()
        return weight + adapter.scale * (product.mT if adapter.inputs_first else product)
    if adapter.inputs_first:
        weight = weight.t()
        b = adapter.b.float()
    else:
        b = adapter.b[first:last].float()
    weight = weight + adapter.scale * (b @ adapter.a.float())
    if adapter.magnitude is not None:
        magnitude = adapter.magnitude if adapter.inputs_first else adapter.magnitude[first:last]
        weight = weight * (magnitude.float() / weight.norm(dim=1)).unsqueeze(1)
    return weight.t() if adapter.inputs_first else weight

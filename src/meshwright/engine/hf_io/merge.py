"""Adapters put into the weights that they adapt, a few rows at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

PART = re.compile(r"^(?P<path>.+?)(?P<joint>\.|_)lora_(?P<part>A|B|magnitude)(?:_(?P<number>\d+))?$")


@dataclass(frozen=True)
class AdapterNames:
    """The stored tensors of one adapter; the outputs may be stored in several segments."""

    parts: dict[str, list[str]] = field(default_factory=dict)  # A, B, magnitude -> stored names in order


@dataclass(frozen=True)
class Adapter:
    """One adapter, whole: A [rank, in] and B [out, rank], with a first dimension of experts before both if stacked."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None
    inputs_first: bool  # the weight that it adapts is stored [in, out]


def adapters_in(names: Iterable[str]) -> dict[str, AdapterNames]:
    """The adapters among stored names, by the model's name of the weight that each adapts."""
    numbered: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        found = PART.match(name)
        if found is None:
            continue
        weight = f"{found['path']}.weight" if found["joint"] == "." else found["path"]
        numbered.setdefault(weight, {}).setdefault(found["part"], {})[int(found["number"] or 0)] = name
    return {
        weight: AdapterNames({part: [those[i] for i in sorted(those)] for part, those in parts.items()})
        for weight, parts in numbered.items()
    }


def joined(parts: Mapping[str, list[torch.Tensor]], part: str, stacked: bool) -> torch.Tensor:
    """One part of an adapter as one tensor; of experts' B the outputs in one dimension."""
    whole = torch.cat(parts[part])
    return whole.flatten(1, -2) if stacked and part == "B" else whole


def merge_rows(rows: torch.Tensor, first: int, adapter: Adapter) -> torch.Tensor:
    """Rows of a weight, from this one on, with the adapter in them; in fp32."""
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

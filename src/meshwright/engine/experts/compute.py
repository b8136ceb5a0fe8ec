"""The experts' own computation on one rank: two grouped matrix products around the model's activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshwright.engine.experts.storage import first_name, fused

ALIGNMENT = 16  # bytes: what the grouped kernels ask of the rows of both matrices


def run_experts(experts: Any, rows: torch.Tensor, ends: torch.Tensor, adds_down_bias: bool = True) -> torch.Tensor:
    """The experts' outputs for rows sorted by expert, of which expert i's end before `ends[i]`.

    Of the ranks that hold slices of one expert, a single one adds the bias of the sum.
    """
    inner = _linear(experts, first_name(experts), rows, ends)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _linear(experts, "down_proj", inner, ends, 1.0 if adds_down_bias else 0.0)


def _linear(
    experts: nn.Module, name: str, rows: torch.Tensor, ends: torch.Tensor, bias_share: float = 1.0
) -> torch.Tensor:
    weight = fused(experts, name)
    dtype = _compute_dtype(weight)
    columns = weight if experts.is_transposed else weight.transpose(-2, -1)
    out = grouped_mm(rows.to(dtype), columns.to(dtype), ends)
    if experts.has_bias:
        out = out + _bias_of_rows(fused(experts, f"{name}_bias").to(dtype), ends, rows.shape[0], bias_share)
    return out


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """The type of the products: autocast's where it is on, since autocast does not know the grouped product."""
    kind = weight.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else weight.dtype


def _bias_of_rows(bias: torch.Tensor, ends: torch.Tensor, rows: int, share: float) -> torch.Tensor:
    expert = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    # A share of zero keeps the bias in the graph: its gradient exists on every rank and is summed like any other.
    return functional.embedding(expert, bias if share == 1.0 else bias * share)


def grouped_mm(rows: torch.Tensor, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's rows [N, in] times its matrix of [E, in, out]."""
    if _fits_grouped_kernel(rows, columns):
        return functional.grouped_mm(rows, columns, offs=ends)
    return _one_by_one(rows, columns, ends)


def _fits_grouped_kernel(rows: torch.Tensor, columns: torch.Tensor) -> bool:
    if rows.device.type == "cuda" and rows.dtype != torch.bfloat16:
        return False
    widths = (columns.shape[-2], columns.shape[-1])
    return all(width * rows.element_size() % ALIGNMENT == 0 for width in widths)


def _one_by_one(rows: torch.Tensor, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One product per expert, where no grouped kernel fits; asks the device for the group sizes."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ columns[e] for e, part in enumerate(rows.split_with_sizes(sizes))])

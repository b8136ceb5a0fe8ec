"""Rows of tokens put in the order of their experts, and back into tokens.

Every backward here gathers instead of adding at indices: the same sums in the same order on every run, at any type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ExpertOrder:
    """Token and expert pairs sorted by expert."""

    pairs: torch.Tensor  # [T·K]: the pair that stands at each row
    places: torch.Tensor  # [T, K]: the row at which each pair stands
    ends: torch.Tensor  # [E] int32: the row after each expert's last


def sort_by_expert(top_k_index: torch.Tensor, experts: int) -> ExpertOrder:
    """Sorts pairs by expert without asking the device for a number."""
    chosen, pairs = top_k_index.reshape(-1).sort(stable=True)
    every = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
    return ExpertOrder(pairs, invert(pairs).view(top_k_index.shape), ends)


def invert(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes another."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def permute_to_experts(tokens: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    """Each token's row once per chosen expert, sorted by expert."""
    return _Spread.apply(tokens, order.pairs, order.places)  # type: ignore[no-any-return,no-untyped-call]


def combine(rows: torch.Tensor, weights: torch.Tensor, order: ExpertOrder, dtype: torch.dtype) -> torch.Tensor:
    """Each token's weighted sum of its experts' rows, added up in fp32."""
    return _Collect.apply(rows, weights, order.places, dtype)  # type: ignore[no-any-return,no-untyped-call]


def permute(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows in another order."""
    return _Permute.apply(rows, order, inverse)  # type: ignore[no-any-return,no-untyped-call]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, pairs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return tokens[pairs // places.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        (grad,) = grads
        total = grad.new_zeros((places.shape[0], grad.shape[1]), dtype=_wide(grad.dtype))
        for k in range(places.shape[1]):  # one [T, H] at a time: no second copy of all rows
            total += grad[places[:, k]]
        return total.to(grad.dtype), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, places)
        total = rows.new_zeros((places.shape[0], rows.shape[1]), dtype=_wide(rows.dtype))
        for k in range(places.shape[1]):
            total.addcmul_(rows[places[:, k]], weights[:, k, None])
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weights, places = ctx.saved_tensors
        grad = grads[0].to(_wide(rows.dtype))
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for k in range(places.shape[1]):
            at = places[:, k]
            grad_rows[at] = (grad * weights[:, k, None]).to(rows.dtype)  # a permutation: every row is written once
            grad_weights[:, k] = (grad * rows[at]).sum(-1)
        return grad_rows, grad_weights, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None

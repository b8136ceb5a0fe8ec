"""Permutation of tokens into expert order, and the weighted combination back into tokens.

Every backward pass here gathers instead of index_add: the same sums in the same order on every run, in any dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ExpertOrder:
    """(token, expert) pairs sorted by expert."""

    pairs: torch.Tensor  # [T·K]: the pair of each row
    rows: torch.Tensor  # [T, K]: the row of each pair
    ends: torch.Tensor  # [E] int32: end offset of each expert's rows


def sort_by_expert(top_k_index: torch.Tensor, experts: int) -> ExpertOrder:
    """Sort pairs by expert without a host synchronization."""
    chosen, pairs = top_k_index.reshape(-1).sort(stable=True)
    every = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
    return ExpertOrder(pairs, invert(pairs).view(top_k_index.shape), ends)


def invert(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def permute_to_experts(tokens: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    """Return each token's row once per chosen expert, sorted by expert."""
    return _PermuteToExperts.apply(tokens, order.pairs, order.rows)  # type: ignore[no-any-return,no-untyped-call]


def combine(rows: torch.Tensor, weights: torch.Tensor, order: ExpertOrder, dtype: torch.dtype) -> torch.Tensor:
    """Return each token's weighted sum of its experts' rows, accumulated in fp32."""
    return _Combine.apply(rows, weights, order.rows, dtype)  # type: ignore[no-any-return,no-untyped-call]


def weights_by_row(weights: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    """Return the routing weight of each row, [T·K], of weights [T, K]."""
    return permute(weights.reshape(-1), order.pairs, order.rows.reshape(-1))


def sum_by_token(rows: torch.Tensor, order: ExpertOrder, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of each token's rows, which the experts have weighted, accumulated in fp32."""
    return _SumByToken.apply(rows, order.pairs, order.rows, dtype)  # type: ignore[no-any-return,no-untyped-call]


def permute(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Reorder rows."""
    return _Permute.apply(rows, order, inverse)  # type: ignore[no-any-return,no-untyped-call]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _PermuteToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, pairs: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_rows)
        return tokens[pairs // token_rows.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (token_rows,) = ctx.saved_tensors
        return _summed(grads[0], token_rows, grads[0].dtype), None, None


class _SumByToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, pairs: torch.Tensor, token_rows: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(pairs)
        ctx.topk, ctx.dtype = token_rows.shape[1], rows.dtype
        return _summed(rows, token_rows, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (pairs,) = ctx.saved_tensors
        return grads[0].to(ctx.dtype)[pairs // ctx.topk], None, None, None


def _summed(rows: torch.Tensor, token_rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = rows.new_zeros((token_rows.shape[0], rows.shape[1]), dtype=_wide(rows.dtype))
    for k in range(token_rows.shape[1]):  # one [T, H] at a time: no [T·K, H] temporary
        total += rows[token_rows[:, k]]
    return total.to(dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, token_rows: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, token_rows)
        total = rows.new_zeros((token_rows.shape[0], rows.shape[1]), dtype=_wide(rows.dtype))
        for k in range(token_rows.shape[1]):
            total.addcmul_(rows[token_rows[:, k]], weights[:, k, None])
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weights, token_rows = ctx.saved_tensors
        grad = grads[0].to(_wide(rows.dtype))
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for k in range(token_rows.shape[1]):
            at = token_rows[:, k]
            grad_rows[at] = (grad * weights[:, k, None]).to(rows.dtype)  # a permutation: each row is written once
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

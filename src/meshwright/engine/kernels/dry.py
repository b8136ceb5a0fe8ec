"""Device-dependent torch operations on the simulated GPU: they allocate and save what CUDA's kernels do."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.engine.kernels.device_caps import on_gpu

aten = torch.ops.aten


@cache
def register_operations() -> torch.library.Library:
    """Register CUDA's behavior for the simulated device; once per process."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for name, function in (("rms_norm", _rms_norm), ("scaled_dot_product_attention", _attention)):
        library.impl(name, function, "AutogradPrivateUse1")
    library.impl("silu_backward", _silu_backward, "PrivateUse1")  # one kernel on every real device
    return library  # type: ignore[no-any-return]  # the cache keeps it alive: its destructor would unregister


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    traced = torch._guards.TracingContext.try_get() is not None  # the compiler decomposes it in its graph
    same_dtype = weight is None or weight.dtype == x.dtype
    if traced or not (same_dtype and on_gpu(x)):  # CUDA's fused kernel needs one dtype; CPUs have none
        unfused: Tensor = aten._fused_rms_norm(x, shape, weight, eps)[0]
        return unfused
    return _RmsNorm.apply(x, weight, len(shape))  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.shape[: x.dim() - dims]
        inverse = x.new_empty((*rows, *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        x, gradient = x.contiguous(), gradient.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        return grad_x, torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if mask is not None:
        groups = q.shape[1] // k.shape[1] if enable_gqa else 1
        k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
        needs_grad = torch.is_grad_enabled()
        result = aten._scaled_dot_product_efficient_attention(q, k, v, mask, needs_grad, dropout, causal, scale=scale)
        out: Tensor = result[0]
        return out
    from meshwright.engine.attention.dry import attend_plain  # a lazy import: it imports this package

    return attend_plain(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale, "auto")

"""Operations for which torch looks at the kind of device: on the pretended GPU they make and keep what CUDA's do."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.engine.kernels.device_caps import on_gpu

aten = torch.ops.aten


@cache
def register_operations() -> torch.library.Library:
    """Makes torch take CUDA's way on the pretended device, and on no other; once in a process."""
    ours: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for name, function in (("rms_norm", _rms_norm), ("scaled_dot_product_attention", _attention)):
        ours.impl(name, function, "AutogradPrivateUse1")
    ours.impl("silu_backward", _silu_backward, "PrivateUse1")  # one kernel everywhere else
    return ours  # type: ignore[no-any-return]  # kept by the cache: its end would undo it


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    traced = torch._guards.TracingContext.try_get() is not None  # a compiler writes it out in its graph
    one_format = weight is None or weight.dtype == x.dtype
    if traced or not (one_format and on_gpu(x)):  # CUDA has one kernel for one format only, a CPU none
        written_out: Tensor = aten._fused_rms_norm(x, shape, weight, eps)[0]
        return written_out
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
        by_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        return by_x, torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


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
        learns = torch.is_grad_enabled()
        made = aten._scaled_dot_product_efficient_attention(q, k, v, mask, learns, dropout, causal, scale=scale)
        out: Tensor = made[0]
        return out
    from meshwright.engine.attention.dry import attend_plain  # imports this room

    return attend_plain(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale, "auto")

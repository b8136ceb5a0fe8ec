"""Attention in dry runs: allocates and saves what the CUDA kernels would; torch selects no kernel for fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.engine.attention.mask_spec import shares_heads
from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, capability, on_gpu

aten = torch.ops.aten


def attend_plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, kernel: str) -> Tensor:
    """Run causal or full attention by the operation that torch would choose on the simulated device."""
    if not on_gpu(q):
        return _on_cpu(q, k, v, causal, scale)
    half, needs_grad = q.dtype in (torch.float16, torch.bfloat16), torch.is_grad_enabled()
    if half and kernel != "flash" and capability(q.device)[0] >= 9:
        result = aten._scaled_dot_product_cudnn_attention(q, k, v, None, needs_grad, 0.0, causal, False, scale=scale)
    elif half and v.shape[-1] == q.shape[-1] and q.shape[-1] <= 256:
        result = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
        result = aten._scaled_dot_product_efficient_attention(q, k, v, None, needs_grad, 0.0, causal, scale=scale)
    out: Tensor = result[0]
    return out


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    if v.shape[-1] == q.shape[-1]:
        result: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)[0]
        return result
    out: Tensor = aten._scaled_dot_product_attention_math(
        q, k, v, None, 0.0, causal, scale=scale, enable_gqa=shares_heads(q, k)
    )[0]
    return out


def attend_masked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of flex attention, which compiles into one kernel per pass.

    Custom ops: inside a compiled layer the compiler must not see that nothing is computed.
    """
    out, log_sum = _flex(q, k, v)
    return out, log_sum


def _flex_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output has the order of dimensions of the queries in memory, so that joining its heads copies nothing."""
    order = sorted(range(q.ndim), key=q.stride, reverse=True)
    shape = (*q.shape[:-1], v.shape[-1])
    out = q.new_empty([shape[i] for i in order]).permute([order.index(i) for i in range(q.ndim)])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _flex_backward_impl(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    torch.empty_like(log_sum)  # the row sums of output x its gradient
    made = [torch.empty_like(one) for one in (q, k, v)]
    return made[0], made[1], made[2]


_flex = torch.library.custom_op(
    "meshwright::flex_attention",
    _flex_forward,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)",
)
_flex_backward = torch.library.custom_op(
    "meshwright::flex_attention_backward",
    _flex_backward_impl,
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum) -> (Tensor, Tensor, Tensor)",
)
_flex.register_fake(_flex_forward)
_flex_backward.register_fake(_flex_backward_impl)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = _flex_backward(grad, *ctx.saved_tensors)
    return grads


_flex.register_autograd(_gradients, setup_context=_save)
DECOMPOSITIONS[torch.ops.meshwright.flex_attention.default] = _flex_forward
DECOMPOSITIONS[torch.ops.meshwright.flex_attention_backward.default] = _flex_backward_impl

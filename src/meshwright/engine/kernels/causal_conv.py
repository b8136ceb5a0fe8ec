"""The causal convolution of Mamba-2 and gated-delta mixers by Triton kernels, for bf16 inputs on a GPU.

Tokens come before channels, as a linear layer gives them and the scans take them: nothing is transposed. The SiLU is
part of the kernels; saved are the inputs. With document ids [rows, tokens], a filter sees no token of another document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, launch, on_gpu
from meshwright.engine.kernels.state_space_triton import number_documents

BLOCK = 64  # tokens and channels of a program
ACTIVATIONS = ("silu", "swish", None)
MODULE = "_triton_causal_conv"
INPUTS = "Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? documents"


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Tensor | None = None
) -> Tensor:
    """Return the causal convolution of x [rows, tokens, channels] with a filter [channels, taps] per channel."""
    if not on_gpu(x) or x.dtype != torch.bfloat16:
        wide = x.to(weight.dtype)
        out = _plain(wide, weight, bias) if documents is None else _by_taps(wide, weight, bias, documents)
        return (out if activation is None else functional.silu(out)).to(x.dtype)
    result: Tensor = _conv(x, weight, bias, activation is not None, documents)
    return result


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return torch's convolution."""
    padding, tokens = weight.shape[1] - 1, x.shape[1]
    out = functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=padding, groups=x.shape[2])
    return out[..., :tokens].transpose(1, 2)


def _by_taps(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor) -> Tensor:
    """Return the convolution of each document in torch operations, one per tap of the filter."""
    segments: Any = number_documents(documents)
    taps, tokens = weight.shape[1], x.shape[1]
    out = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for back in range(taps):
        same = functional.pad(segments, (back, 0), value=-1)[:, :tokens] == segments
        out = out + functional.pad(x, (0, 0, back, 0))[:, :tokens] * same[..., None] * weight[:, taps - 1 - back]
    return out


def _launch(name: str, x: Tensor, weight: Tensor, packed: bool, tensors: Any, strides: Any, **options: Any) -> None:
    rows, tokens, channels = x.shape
    launch(
        f"{MODULE}.{name}",
        (-(-tokens // BLOCK), -(-channels // BLOCK), rows),
        *tensors,
        *(tokens, channels, *strides, *weight.stride()),
        **options,
        PACKED=packed,
        TAPS=weight.shape[1],
        T=BLOCK,
        C=BLOCK,
    )


def _conv_forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: Tensor | None) -> Tensor:
    segments = number_documents(documents)
    out = x.new_empty(x.shape)
    tensors = (x, weight, weight if bias is None else bias, weight if segments is None else segments, out)
    _launch("causal_conv", x, weight, segments is not None, tensors, x.stride(), SILU=silu, BIASED=bias is not None)
    return out


def _conv_backward_impl(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    segments = number_documents(documents)
    grad_x = x.new_empty(x.shape)
    rows, tokens, channels = x.shape
    taps = weight.shape[1]
    sums = x.new_empty(rows * -(-tokens // BLOCK), taps + 1, channels, dtype=torch.float32)
    tensors = (gradient, x, weight, weight if bias is None else bias, weight if segments is None else segments)
    strides = (*gradient.stride(), *x.stride())
    options = {"SILU": silu, "BIASED": bias is not None, "num_warps": 8}
    _launch("causal_conv_gradients", x, weight, segments is not None, (*tensors, grad_x, sums), strides, **options)
    filters, biases = sums[:, :taps].sum(0), sums[:, taps].sum(0)
    return grad_x, filters.t().to(weight.dtype, memory_format=torch.contiguous_format), biases.to(weight.dtype)


_conv = torch.library.custom_op(
    "meshwright::causal_conv", _conv_forward, mutates_args=(), schema=f"({INPUTS}) -> Tensor"
)
_conv_backward = torch.library.custom_op(
    "meshwright::causal_conv_backward",
    _conv_backward_impl,
    mutates_args=(),
    schema=f"(Tensor gradient, {INPUTS}) -> (Tensor, Tensor, Tensor)",
)


@_conv.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@_conv_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.silu, documents = inputs
    ctx.save_for_backward(x, weight, bias, documents)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, documents = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = _conv_backward(gradient, x, weight, bias, ctx.silu, documents)
    return grad_x, grad_weight, None if bias is None else grad_bias.to(bias.dtype), None, None


_conv.register_autograd(_gradients, setup_context=_save_inputs)
DECOMPOSITIONS[torch.ops.meshwright.causal_conv.default] = _conv_forward
DECOMPOSITIONS[torch.ops.meshwright.causal_conv_backward.default] = _conv_backward_impl

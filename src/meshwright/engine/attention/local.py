"""Attention on one rank, tokens in their natural order: which kernel computes what on which device.

kernels.attention selects the kernel of plain (causal or full) attention. A window, a softcap, sinks or documents use
flex attention on CUDA and exact blocks elsewhere, unless kernels.attention=eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.engine.attention import dry, kernels
from meshwright.engine.attention.cp_layout import Span
from meshwright.engine.attention.flex import BlockTables, attend_flex
from meshwright.engine.attention.mask_spec import AttentionSpec, Block, shares_heads, visibility
from meshwright.engine.attention.ring import RingLayout, attend_blocks
from meshwright.engine.kernels.device_caps import capability, is_dry, on_gpu
from meshwright.errors import InputError

# SDPA backends for plain attention on CUDA, best first; empty leaves the choice to torch, which takes cuDNN on Hopper
# (measured: as fast as when selected by name, twice as fast as flash).
BACKENDS: dict[str, list[SDPBackend]] = {
    "auto": [],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "sdpa": [],
}
# For values narrower than keys (MLA), which flash does not support.
UNEVEN = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
KERNELS = (*BACKENDS, "flex", "eager")


def attend_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    kernel: str = "auto",
    dropout: float = 0.0,
    groups: Tensor | None = None,
    tables: Mapping[int, BlockTables] | None = None,
) -> Tensor:
    """Return attention [batch, heads, tokens, width] of full sequences on this rank.

    `groups` are the images that tokens belong to, -1 for text: tokens of an image attend to each other both ways.
    `tables` are the block tables of causal masks by window (0: none), built outside compiled layers.
    """
    spec = spec.for_length(k.shape[2])
    plain = spec.window is None and spec.softcap is None and sinks is None and documents is None and groups is None
    if kernel == "eager" or (groups is not None and not on_gpu(q)):
        return _eager(q, k, v, spec, sinks, documents, dropout, groups)
    if plain and (kernel in BACKENDS or not on_gpu(q)):
        return _sdpa(q, k, v, spec, kernel, dropout)
    reject_dropout(dropout)
    if on_gpu(q):
        found = tables.get(spec.window or 0) if tables is not None and spec.causal else None
        return attend_flex(q, k, v, spec, sinks, documents, groups, found)
    span = Span(0, 0, q.shape[2])
    # A copy, because torch.compile rejects an autograd function that gets the same tensor twice.
    pair = None if documents is None else (documents, documents.clone())
    return attend_blocks(q, k, v, spec, RingLayout((span,), ((span,),)), sinks, pair)


def reject_dropout(dropout: float) -> None:
    """Raise if there is attention dropout: only plain and eager attention on one rank support it."""
    if dropout:
        raise InputError(
            "attention dropout needs cp=1, and eager attention with a window, softcap, sinks or documents",
            field="attention_dropout",
            value=dropout,
            fix=("attention_dropout=0", "kernels.attention=eager"),
        )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kernel: str, dropout: float) -> Tensor:
    width = v.shape[-1]
    if on_gpu(q) and width != q.shape[-1] and not _uneven_heads(kernel, q):
        v = F.pad(v, (0, q.shape[-1] - width))
    if is_dry(q):
        return dry.attend_plain(q, k, v, spec.causal, spec.scale, kernel)[..., :width]
    with _chosen(kernel, q, v.shape[-1] != q.shape[-1]):
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=spec.causal, scale=spec.scale, enable_gqa=shares_heads(q, k)
        )
    return out[..., :width]


def _chosen(kernel: str, q: Tensor, uneven: bool) -> contextlib.AbstractContextManager[object]:
    backends = UNEVEN if uneven and kernel == "auto" else BACKENDS.get(kernel)
    return sdpa_kernel(backends, set_priority=True) if q.is_cuda and backends else contextlib.nullcontext()


def _uneven_heads(kernel: str, q: Tensor) -> bool:
    """Return whether the kernel supports values narrower than keys (MLA); otherwise they are padded with zeros.

    cuDNN does on Hopper and later; torch may choose flash, which does not.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    return kernel in ("auto", "cudnn") and half and capability(q.device)[0] >= 9


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    documents: Tensor | None,
    dropout: float,
    groups: Tensor | None = None,
) -> Tensor:
    block = Block(Span(0, 0, q.shape[2]), Span(0, 0, k.shape[2]), "partial")
    pair = None if documents is None else (documents, documents)
    out, lse = kernels.math_forward(q, k, v, visibility(block, spec, pair, q.device, groups), spec, dropout)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float()[:, None])[..., None]
    return out.to(q.dtype)

"""Masked and soft-capped attention on CUDA: flex attention with a block mask computed from block ranges.

torch's `create_block_mask` evaluates the mask for every pair of tokens. Whether a block of 128 x 128 is empty, full or
mixed follows from its first and last position and its lowest and highest document: a few operations on a small table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from meshwright.engine.attention import dry
from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.kernels.device_caps import is_dry

BLOCK = 128  # tokens
MAX_TWO_STAGE_WIDTH = 128  # of a head in fp32


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return attention with any mask, sinks, documents and images, without materializing the score matrix."""
    if is_dry(q):
        out, log_sum = dry.attend_masked(q, k, v)
        return out if sinks is None else _with_sinks(out, log_sum, sinks)
    # Inside a compiled layer flex attention is compiled with the layer.
    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    options: dict[str, Any] = {
        "score_mod": _score_mod(spec),
        "block_mask": block_mask(q.shape[2], spec, documents, q.device, groups),
        "scale": spec.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if q.dtype == torch.float32 and q.shape[3] > MAX_TWO_STAGE_WIDTH:
        options["kernel_options"] = {"num_stages": 1}  # two stages of such keys exceed Hopper's shared memory
    if sinks is None:
        attended: Tensor = flex(q, k, v, **options)
        return attended
    out, extra = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return _with_sinks(out, extra.lse, sinks)


def _with_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    return out * torch.sigmoid(log_sum - sinks.float()[:, None])[..., None].to(out.dtype)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # fullgraph: past the recompile limit it must raise, not fall back to materializing the score matrix.
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(
    seq_length: int, spec: AttentionSpec, documents: Tensor | None, device: torch.device, groups: Tensor | None = None
) -> BlockMask | None:
    """Return which blocks of the score matrix are empty, full or mixed; None if nothing is masked."""
    if not spec.causal and spec.window is None and documents is None:
        return None
    count = -(-seq_length // BLOCK)
    first = torch.arange(count, device=device) * BLOCK
    last = (first + BLOCK - 1).clamp_max(seq_length - 1)
    some = torch.ones(1, count, count, dtype=torch.bool, device=device)
    # The last block of an uneven length is never full: its padding is masked.
    full = some & (last - first == BLOCK - 1)[:, None] & (last - first == BLOCK - 1)
    if spec.causal:
        some = some & (first <= last[:, None])
        full = full & (last <= first[:, None])
    inside = torch.arange(count * BLOCK, device=device).clamp_max(seq_length - 1)
    if groups is not None:  # images are numbered in order, so a block has a range of them, or none (low > high)
        tiled = torch.unflatten(groups[:, inside], 1, (count, BLOCK))
        low, high = tiled.masked_fill(tiled < 0, seq_length).amin(-1), tiled.amax(-1)
        some = some | ((low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None]))
    if spec.window is not None:
        some = some & (first[:, None] - last < spec.window)
        full = full & (last[:, None] - first < spec.window)
    if documents is not None:
        low, high = torch.unflatten(documents[:, inside], 1, (count, BLOCK)).aminmax(dim=-1)
        some = some & (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        full = full & (low[:, :, None] == high[:, None]) & (low[:, None] == high[:, :, None])
    mixed = _numbered(some & ~full)
    return BlockMask.from_kv_blocks(
        *mixed,
        *_numbered(some & full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(spec, documents, groups),
        seq_lengths=(seq_length, seq_length),
    )


def _numbered(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every row of blocks how many are set, and the columns with the set ones first."""
    columns = torch.argsort(table.to(torch.int32), dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32)[:, None], columns.to(torch.int32)[:, None]


def _mask_mod(
    spec: AttentionSpec, documents: Tensor | None, groups: Tensor | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    causal, window = spec.causal, spec.window

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mask = key <= query if causal else key >= 0
        if groups is not None:
            mask = mask | ((groups[batch, query] == groups[batch, key]) & (groups[batch, query] >= 0))
        if window is not None:
            mask = mask & (query - key < window)
        if documents is not None:
            mask = mask & (documents[batch, query] == documents[batch, key])
        return mask

    return mask_mod


def _score_mod(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    cap = spec.softcap
    if cap is None:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod

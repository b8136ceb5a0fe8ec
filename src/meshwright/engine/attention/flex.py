"""Masked and capped attention on CUDA: flex attention with a block mask computed from block ranges.

torch's `create_block_mask` evaluates the mask for every pair of tokens. Whether a block of 128 x 128 is empty, full or
mixed follows from its first and last positions and its lowest and highest document, a few operations on a tiny table.
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

SIDE = 128  # tokens of a block
WIDE = 128  # numbers of a key


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: AttentionSpec,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Attention in natural order with any terms, sinks, documents and images, never holding the score matrix."""
    if is_dry(q):
        made, log_sum = dry.attend_masked(q, k, v)
        return made if sinks is None else _with_sinks(made, log_sum, sinks)
    # Inside a compiled region flex is compiled with it.
    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    options: dict[str, Any] = {
        "score_mod": _score_mod(terms),
        "block_mask": block_mask(q.shape[2], terms, documents, q.device, groups),
        "scale": terms.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if q.dtype == torch.float32 and q.shape[3] > WIDE:
        options["kernel_options"] = {"num_stages": 1}  # two blocks of such keys have no room in a Hopper's cores
    if sinks is None:
        out: Tensor = flex(q, k, v, **options)
        return out
    out, extra = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return _with_sinks(out, extra.lse, sinks)


def _with_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    return out * torch.sigmoid(log_sum - sinks.float()[:, None])[..., None].to(out.dtype)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # fullgraph: too many different shapes must be an error, not a silent return to holding the score matrix.
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(
    seq_length: int, terms: AttentionSpec, documents: Tensor | None, device: torch.device, groups: Tensor | None = None
) -> BlockMask | None:
    """Which blocks of the score matrix are empty, full or mixed; None where everything is seen."""
    if not terms.causal and terms.window is None and documents is None:
        return None
    count = -(-seq_length // SIDE)
    first = torch.arange(count, device=device) * SIDE
    last = (first + SIDE - 1).clamp_max(seq_length - 1)
    some = torch.ones(1, count, count, dtype=torch.bool, device=device)
    # A block that sticks out of the sequence is masked, never full.
    full = some & (last - first == SIDE - 1)[:, None] & (last - first == SIDE - 1)
    if terms.causal:
        some = some & (first <= last[:, None])
        full = full & (last <= first[:, None])
    inside = torch.arange(count * SIDE, device=device).clamp_max(seq_length - 1)
    if groups is not None:  # images are numbered in order, so a block holds a range of them, or none (low > high)
        tiled = torch.unflatten(groups[:, inside], 1, (count, SIDE))
        low, high = tiled.masked_fill(tiled < 0, seq_length).amin(-1), tiled.amax(-1)
        some = some | ((low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None]))
    if terms.window is not None:
        some = some & (first[:, None] - last < terms.window)
        full = full & (last[:, None] - first < terms.window)
    if documents is not None:
        low, high = torch.unflatten(documents[:, inside], 1, (count, SIDE)).aminmax(dim=-1)
        some = some & (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        full = full & (low[:, :, None] == high[:, None]) & (low[:, None] == high[:, :, None])
    mixed = _numbered(some & ~full)
    return BlockMask.from_kv_blocks(
        *mixed,
        *_numbered(some & full),
        BLOCK_SIZE=SIDE,
        mask_mod=_mask_mod(terms, documents, groups),
        seq_lengths=(seq_length, seq_length),
    )


def _numbered(table: Tensor) -> tuple[Tensor, Tensor]:
    """For every row of blocks, how many are marked and their columns, the marked ones first."""
    columns = torch.argsort(table.to(torch.int32), dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32)[:, None], columns.to(torch.int32)[:, None]


def _mask_mod(
    terms: AttentionSpec, documents: Tensor | None, groups: Tensor | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    causal, window = terms.causal, terms.window

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query if causal else key >= 0
        if groups is not None:
            seen = seen | ((groups[batch, query] == groups[batch, key]) & (groups[batch, query] >= 0))
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[batch, query] == documents[batch, key])
        return seen

    return mask_mod


def _score_mod(terms: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    cap = terms.softcap
    if cap is None:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod

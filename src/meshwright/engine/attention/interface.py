"""The attention of every model: the function that transformers' attention layers call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.engine.attention import ulysses
from meshwright.engine.attention.cp_layout import ContextAxis, Span, chunk_spans
from meshwright.engine.attention.local import KERNELS, attend_local, reject_dropout
from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.attention.ring import RingLayout, attend_blocks
from meshwright.engine.patching import symbol
from meshwright.errors import InputError, unknown

NAME = "meshwright"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    documents: Tensor | None = None,
    image_groups: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of [batch, heads, tokens, width] tensors, returned as [batch, tokens, heads, width].

    There is no mask tensor: causality, `sliding_window`, `documents` ([batch, tokens] ids; no attention across
    documents) and `image_groups` ([batch, tokens] images, -1 for text; an image's tokens see each other, later ones
    too) say who sees whom. The module may carry `context` (its cp axis), `kernel` (kernels.attention) and
    `recompute_core` (attention is computed again in the backward pass).
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _reject_unsupported_mask(attention_mask, query, key, causal, sliding_window)
    if _is_plain(module, query, value, sliding_window, softcap, s_aux, documents, image_groups):
        # Most models' attention, with nothing around torch's own call that a compiler would have to see through.
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
        ).transpose(1, 2), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    terms = AttentionSpec(scale, causal, sliding_window or None, softcap or None)
    axis: ContextAxis | None = getattr(module, "context", None)
    kernel: str = getattr(module, "kernel", "auto")
    if kernel not in KERNELS:
        raise unknown("kernels.attention", kernel, KERNELS)
    if axis is None or axis.size == 1:
        core = partial(
            attend_local, terms=terms, documents=documents, groups=image_groups, kernel=kernel, dropout=dropout
        )
    else:
        reject_dropout(dropout)
        _reject_image_groups(image_groups)
        core = partial(_attend_context_parallel, terms=terms, documents=documents, kernel=kernel, axis=axis)
    if getattr(module, "recompute_core", False):
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
        out: Tensor = checkpoint(core, query, key, value, sinks=s_aux, **again)
    else:
        out = core(query, key, value, sinks=s_aux)
    return out.transpose(1, 2), None


def _is_plain(module: Any, query: Tensor, value: Tensor, *terms: Any) -> bool:
    """Whether torch's own choice of kernel can be asked directly: no cp, no terms, one width, no wish for a kernel."""
    return (
        getattr(module, "context", None) is None
        and getattr(module, "kernel", "auto") == "auto"
        and not getattr(module, "recompute_core", False)
        and all(term is None for term in terms)
        and query.shape[-1] == value.shape[-1]
    )


def register() -> None:
    """Makes `attn_implementation="meshwright"` known to transformers, without any mask tensor."""
    symbol("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS").register(NAME, attend)
    symbol("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS").register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _attend_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: AttentionSpec,
    sinks: Tensor | None,
    documents: Tensor | None,
    kernel: str,
    axis: ContextAxis,
) -> Tensor:
    """The cp paths: an all-to-all inside where there is one, and a ring or a gather outside."""
    seq_length = q.shape[2] * axis.size
    terms = terms.over(seq_length)
    inner = _require_group(axis.inner_group)
    if axis.inner > 1:
        k, v = (ulysses.repeat_kv_heads(x, q, axis.inner) for x in (k, v))
        q, k, v = ulysses.heads_to_sequence([q, k, v], inner, axis.parts)
        sinks = None if sinks is None else sinks.chunk(axis.inner)[axis.inner_rank]
        documents = None if documents is None else ulysses.join_documents(documents, inner, axis.parts)
    if axis.ring == 1:
        out = attend_local(q, k, v, terms, sinks, documents, kernel)
    else:
        out = _attend_chunks(q, k, v, terms, sinks, documents, kernel, axis, seq_length)
    return ulysses.sequence_to_heads(out, inner, axis.parts) if axis.inner > 1 else out


def _attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: AttentionSpec,
    sinks: Tensor | None,
    documents: Tensor | None,
    kernel: str,
    axis: ContextAxis,
    seq_length: int,
) -> Tensor:
    held = tuple(chunk_spans(seq_length, axis.ring, rank) for rank in range(axis.ring))
    track = RingLayout(held[axis.ring_rank], held, axis.ring_rank, axis.ring_group)
    pair = None if documents is None else (documents, documents)
    if axis.comm == "allgather":
        group = _require_group(axis.group)
        k, v = ulysses.gather_keys_values(k, v, group)
        if documents is not None:
            pair = (documents, ulysses.gather_documents(documents, group))
        length = seq_length // (2 * axis.ring)
        track = RingLayout(track.queries, (tuple(Span(at, at, length) for at in range(0, seq_length, length)),))
    return attend_blocks(q, k, v, terms, track, sinks, pair, flash=kernel not in ("eager", "flex"))


def _require_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise InputError("this cp axis has no process groups; context_axis() makes them", field="context")
    return group


def _reject_image_groups(groups: Tensor | None) -> None:
    if groups is not None:
        raise InputError(
            "tokens of an image that see each other cannot be spread over cp ranks", field="layout.cp", fix=("cp=1",)
        )


def _reject_unsupported_mask(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, sliding_window: int | None
) -> None:
    """Says no to what would be computed wrongly: foreign masks, caches, windows to both sides."""
    if mask is not None:
        raise InputError("attention takes documents, not mask tensors", field="attention_mask", value=tuple(mask.shape))
    if causal and query.shape[2] != key.shape[2]:
        raise InputError(
            f"causal attention of {query.shape[2]} queries to {key.shape[2]} keys: training uses no cache",
            field="use_cache",
            fix=("use_cache=false",),
        )
    if sliding_window and not causal:
        raise InputError("a sliding window is causal here", field="sliding_window", value=sliding_window)

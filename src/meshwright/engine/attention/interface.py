"""The attention function that transformers' attention modules call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.engine.attention import ulysses
from meshwright.engine.attention.cp_layout import ContextAxis, Span, chunk_spans
from meshwright.engine.attention.flex import BlockTables
from meshwright.engine.attention.local import KERNELS, attend_local, reject_dropout
from meshwright.engine.attention.mask_spec import AttentionSpec, shares_heads
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
    block_tables: Mapping[int, BlockTables] | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention of [batch, heads, tokens, width] tensors as [batch, tokens, heads, width].

    There is no mask tensor. Causality, `sliding_window`, `documents` ([batch, tokens] ids; no attention across
    documents) and `image_groups` ([batch, tokens] images, -1 for text; tokens of an image attend to each other both
    ways) define the mask; `block_tables` are its block tables by window, if they are built already. The module may have
    the attributes `context` (its cp group), `kernel` (kernels.attention) and `recompute_core` (attention is recomputed
    in the backward pass).
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _reject_unsupported_mask(attention_mask, query, key, causal, sliding_window)
    if _is_plain(module, query, value, sliding_window, softcap, s_aux, documents, image_groups):
        # The case of most models: a direct call of torch's kernel, which compiles without graph breaks.
        shared = shares_heads(query, key)
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=shared
        ).transpose(1, 2), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = AttentionSpec(scale, causal, sliding_window or None, softcap or None)
    axis: ContextAxis | None = getattr(module, "context", None)
    kernel: str = getattr(module, "kernel", "auto")
    if kernel not in KERNELS:
        raise unknown("kernels.attention", kernel, KERNELS)
    if axis is None or axis.size == 1:
        core = partial(
            attend_local,
            spec=spec,
            documents=documents,
            groups=image_groups,
            kernel=kernel,
            dropout=dropout,
            tables=block_tables,
        )
    else:
        reject_dropout(dropout)
        _reject_image_groups(image_groups)
        core = partial(_attend_context_parallel, spec=spec, documents=documents, kernel=kernel, axis=axis)
    if getattr(module, "recompute_core", False):
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
        out: Tensor = checkpoint(core, query, key, value, sinks=s_aux, **settings)
    else:
        out = core(query, key, value, sinks=s_aux)
    return out.transpose(1, 2), None


def _is_plain(module: Any, query: Tensor, value: Tensor, *options: Any) -> bool:
    """Return whether torch's SDPA can be called directly: no cp, no mask options, equal widths, kernel=auto."""
    return (
        getattr(module, "context", None) is None
        and getattr(module, "kernel", "auto") == "auto"
        and not getattr(module, "recompute_core", False)
        and all(option is None for option in options)
        and query.shape[-1] == value.shape[-1]
    )


def register() -> None:
    """Register `attn_implementation="meshwright"` with transformers, without mask tensors."""
    symbol("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS").register(NAME, attend)
    symbol("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS").register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _attend_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    documents: Tensor | None,
    kernel: str,
    axis: ContextAxis,
) -> Tensor:
    """Context-parallel attention: an all-to-all over the inner group, then a ring or an all-gather.

    The all-to-all (Ulysses) trades sequence shards for head shards; the ring then passes keys and values between the
    groups. Either may have size one.
    """
    seq_length = q.shape[2] * axis.size
    spec = spec.for_length(seq_length)
    inner = _require_group(axis.inner_group)
    if axis.inner > 1:
        k, v = (ulysses.repeat_kv_heads(x, q, axis.inner) for x in (k, v))
        q, k, v = ulysses.heads_to_sequence([q, k, v], inner, axis.parts)
        sinks = None if sinks is None else sinks.chunk(axis.inner)[axis.inner_rank]
        documents = None if documents is None else ulysses.join_documents(documents, inner, axis.parts)
    if axis.ring == 1:
        out = attend_local(q, k, v, spec, sinks, documents, kernel)
    else:
        out = _attend_chunks(q, k, v, spec, sinks, documents, kernel, axis, seq_length)
    return ulysses.sequence_to_heads(out, inner, axis.parts) if axis.inner > 1 else out


def _attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
    documents: Tensor | None,
    kernel: str,
    axis: ContextAxis,
    seq_length: int,
) -> Tensor:
    spans = tuple(chunk_spans(seq_length, axis.ring, rank) for rank in range(axis.ring))
    layout = RingLayout(spans[axis.ring_rank], spans, axis.ring_rank, axis.ring_group)
    pair = None if documents is None else (documents, documents)
    if axis.comm == "allgather":
        group = _require_group(axis.group)
        k, v = ulysses.gather_keys_values(k, v, group)
        if documents is not None:
            pair = (documents, ulysses.gather_documents(documents, group))
        length = seq_length // (2 * axis.ring)
        # All keys are local now: a ring of one rank over the full sequence.
        layout = RingLayout(layout.queries, (tuple(Span(at, at, length) for at in range(0, seq_length, length)),))
    return attend_blocks(q, k, v, spec, layout, sinks, pair, flash=kernel not in ("eager", "flex"))


def _require_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise InputError("the context-parallel axis has no process groups; call context_axis()", field="context")
    return group


def _reject_image_groups(groups: Tensor | None) -> None:
    if groups is not None:
        raise InputError(
            "bidirectional attention within images does not support context parallelism",
            field="layout.cp",
            fix=("cp=1",),
        )


def _reject_unsupported_mask(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, sliding_window: int | None
) -> None:
    """Raise for what would be computed wrongly: mask tensors, KV caches, bidirectional windows."""
    if mask is not None:
        raise InputError(
            "the engine's attention takes document ids, not mask tensors",
            field="attention_mask",
            value=tuple(mask.shape),
        )
    if causal and query.shape[2] != key.shape[2]:
        raise InputError(
            f"causal attention of {query.shape[2]} queries to {key.shape[2]} keys: training does not use a KV cache",
            field="use_cache",
            fix=("use_cache=false",),
        )
    if sliding_window and not causal:
        raise InputError(
            "a sliding window is supported with causal attention only", field="sliding_window", value=sliding_window
        )

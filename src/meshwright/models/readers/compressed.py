"""Attention over a window and compressed keys (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..spec import Attention, Compressor
from .fields import Fields, require_divisible


def window_only(fields: Fields, traits: Any, hidden: int) -> Attention:
    """Return attention of one key head that is also the value, with low-rank queries and a grouped output."""
    heads, groups, width = fields.size("num_attention_heads"), fields.size("o_groups"), fields.size("head_dim")
    require_divisible(fields, "o_groups", groups, "num_attention_heads", heads)
    fields.read.update(("num_key_value_heads", "index_n_heads", "index_head_dim", "index_topk"))
    return Attention(
        heads,
        1,
        width,
        window=fields.size("sliding_window"),
        sinks=True,
        shared_kv=True,
        q_lora=fields.size("q_lora_rank"),
        out_lora=fields.size("o_lora_rank"),
        out_groups=groups,
    )


def heavily_compressed(fields: Fields, traits: Any, hidden: int) -> Attention:
    """Return attention over a window and all compressed keys."""
    compressor = Compressor(fields.size("heavy_rate"))
    return msgspec.structs.replace(window_only(fields, traits, hidden), compressor=compressor)


def sparsely_compressed(fields: Fields, traits: Any, hidden: int) -> Attention:
    """Return attention over a window and the compressed keys that an indexer selects."""
    sizes = (fields.size(key) for key in ("index_topk", "index_n_heads", "index_head_dim"))
    compressor = Compressor(fields.size("sparse_rate"), *sizes)
    return msgspec.structs.replace(window_only(fields, traits, hidden), compressor=compressor)


COMPRESSED: Mapping[str, Callable[[Fields, Any, int], Attention]] = {
    "window_only": window_only,
    "heavily_compressed": heavily_compressed,
    "sparsely_compressed": sparsely_compressed,
}

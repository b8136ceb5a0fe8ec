"""Find keys of a config that change the architecture of other models and that this model_type does not read.

transformers ignores them too, so the file is valid; but a shared expert, a window or a mistyped key that has no effect
is rarely meant. Files written by transformers carry many keys without an effect on shapes: these are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from meshwright.similar import closest

from .computed import ACTIVATION_KEYS, NUMBERS, ROPE_KEYS
from .fields import MOST_LETTERS, Fields

ARCHITECTURE_WORDS = frozenset(
    (
        "attention", "attn", "conv", "dim", "expert", "experts", "ffn", "gate", "gated", "gating", "head", "heads",
        "hidden", "intermediate", "key", "kv", "latent", "layer", "layernorm", "layers", "lora", "mamba", "mlp", "moe",
        "mtp", "norm", "qk", "qkv", "rank", "residual", "rope", "routed", "router", "shared", "size", "ssm", "theta",
        "value", "window",
    )
)  # fmt: skip
"""Words in the names of keys that set what a layer is made of."""
INERT_WORDS = frozenset(
    (
        "coef", "compress", "dropout", "dtype", "eps", "epsilon", "implementation", "init", "interleave", "jitter",
        "kernels", "max", "min", "multiplier", "overlap", "pdrop", "pad", "padded", "prob", "renormalize", "scalar",
        "scale", "scaling", "softcapping", "cache", "flash", "image", "token", "rescale", "ngram", "rotary", "logn",
    )
)  # fmt: skip
"""Words in the names of keys that change no shape: numbers of the computation, and what only a runtime reads."""
INERT_KEYS = frozenset(
    (
        # of files that transformers and model publishers write
        "attn_type_list", "batch_size", "chunk_size", "chunk_size_feed_forward", "ep_size", "intermediate_size",
        "keys_to_ignore_at_inference", "mtp_transformer_layers", "norm_topk_prob", "num_attention_heads",
        "num_expert_group", "num_hash_layers", "num_mtp_modules", "output_attentions", "output_hidden_states",
        "output_router_logits", "qk_head_dim", "qk_rope_head_dim", "use_mtp", "use_routing_bias",
    )
)  # fmt: skip
OTHER_NAMES = {"rotary_base": "rope_theta", "rope_base": "rope_theta", "rotary_emb_base": "rope_theta"}
"""Keys of Megatron and of other model types, of which transformers reads only another name."""
LEAST_LETTERS = 6  # of a key that may be a mistyped one

_UNREAD: ContextVar[list[str] | None] = ContextVar("unread keys", default=None)


@contextmanager
def collect_unread() -> Iterator[list[str]]:
    """Collect the keys of a file that change other architectures and are not read, each with did-you-mean."""
    found: list[str] = []
    before = _UNREAD.set(found)
    try:
        yield found
    finally:
        _UNREAD.reset(before)


def record_unread(fields: Fields) -> None:
    """Record the keys of a section that was read which have no effect."""
    found = _UNREAD.get()
    if found is not None:
        found.extend(unread_keys(fields))


def unread_keys(fields: Fields) -> list[str]:
    """Return the keys of a section that are set and have no effect, though they name parts of an architecture."""
    aliases = {name for key, names in fields.aliases.items() for name in (key, *names)}
    known = {*fields.read, *fields.defaults, *fields.fallbacks, *aliases, *ACTIVATION_KEYS, *NUMBERS, *ROPE_KEYS}
    missing = [name for name in known - fields.passed if not fields.has(name) and name not in fields.data]
    found = []
    for key in (key for key, value in fields.data.items() if key not in known and _is_set(value)):
        meant = _meant(key, missing)
        if meant or _names_a_part(key, fields.data):
            found.append(fields.where + key + (f" (did you mean {meant}?)" if meant else ""))
    return found


def _is_set(value: Any) -> bool:
    """Return whether a value turns something on; words are names of types and formats."""
    return bool(value) and not isinstance(value, (str, dict))


def _names_a_part(key: str, data: Any) -> bool:
    words = set(key.split("_"))
    if key in INERT_KEYS or key.startswith("_") or words & INERT_WORDS or not words & ARCHITECTURE_WORDS:
        return False
    return bool(data.get(f"use_{key}", True))  # sliding_window with use_sliding_window=false


def _meant(key: str, missing: list[str]) -> str:
    """Return the key that a mistyped one means, of those that the file does not have; empty if there is none."""
    if OTHER_NAMES.get(key) in missing:
        return OTHER_NAMES[key]
    if len(key) < LEAST_LETTERS or key in INERT_KEYS:
        return ""
    near = (one for one in closest(key, missing) if abs(len(one) - len(key)) <= MOST_LETTERS)
    return next(near, "")

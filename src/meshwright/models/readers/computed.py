"""Check the keys of a config that change no shape but what the model computes: activation, RoPE, norms.

A config with a wrong one has a parameter count and still cannot be built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from meshwright.errors import InputError
from meshwright.similar import closest

ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu",
    "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
)  # fmt: skip
"""Names of transformers' activation functions (ACT2FN)."""
OWN_ACTIVATIONS = {
    "kimi_linear": ("situ",),
    "minimax_m3": ("swigluoai",),
    "minimax_m3_vl_text": ("swigluoai",),
}  # of code in repositories: Kimi K3, MiniMax-M3
ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Types of RoPE in transformers, and the keys that each needs."""
OLD_TYPES = {("qwen", "mrope"): "default", ("phi", "su"): "longrope", ("phi", "yarn"): "longrope"}
"""Older names of types: the start of model_type and the name → the type."""
ROPE_KEYS = ("rope_scaling", "rope_parameters")
ROPE_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "rope_theta", "partial_rotary_factor", "alpha",
)  # fmt: skip
ROPE_LISTS = ("short_factor", "long_factor")
ROPE_SETTINGS = ("rope_type", "type", *ROPE_NUMBERS, *ROPE_LISTS)
"""Keys of a table of RoPE settings; other keys with tables are kinds of layers."""
LOCAL_BASES = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
"""Keys of the RoPE base of layers with a window, where the config has no table per kind of layer."""
NUMBERS = (
    "rope_theta", *LOCAL_BASES, "partial_rotary_factor", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
    "norm_eps", "norm_epsilon", "initializer_range", "attention_dropout",
)  # fmt: skip
POSITIVE = (
    "factor",
    "original_max_position_embeddings",
    "rope_theta",
    *LOCAL_BASES,
    "low_freq_factor",
    "high_freq_factor",
)
LARGEST = 1e300
ENCODERS = ("vision", "audio")  # starts of the names of their sections
SHOWS_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
USES_ROPE = ("llama", "mistral", "mixtral", "qwen", "gemma", "phi", "olmo", "deepseek", "smollm")
"""Starts of the model types that rotate queries and keys even if the config does not name a RoPE key."""


def check_computed(config: Mapping[str, Any], sections: Iterable[str]) -> None:
    """Raise InputError for a value with which the model cannot be built, in a config or its sections."""
    model_type = str(config.get("model_type") or "")
    nested = ((f"{key}.", config[key]) for key in sections if isinstance(config.get(key), dict))
    for where, section in (("", config), *nested):
        named = str(section.get("model_type") or model_type)
        for key in ACTIVATION_KEYS:
            if isinstance(section.get(key), str) and section[key]:  # readers check the type where it matters
                known = (*ACTIVATIONS, *OWN_ACTIVATIONS.get(named, ()))
                _require_known(where + key, section[key], known, "activation")
        for key in NUMBERS:
            _require_number(where + key, key, section.get(key))
        if not where.startswith(ENCODERS):  # they have types of RoPE of their own
            for key, table in _rope_tables(section, where):
                _check_rope(key, table, section, named)
        _check_head_width(section, where, named)


def _require_known(field: str, value: str, known: Iterable[str], noun: str) -> None:
    names = list(known)
    if value in names:
        return
    near = closest(value, names) or closest(value.rstrip("0123456789"), names)
    fix = tuple(f'"{field.rsplit(".", 1)[-1]}": "{one}"' for one in near)
    raise InputError(f"unknown {noun}; transformers has {', '.join(names)}", field=field, value=value, fix=fix)


def _require_number(field: str, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fix = (f'"{key}": {value}',) if isinstance(value, str) and _is_numeric(value) else ()
        reason = "must be a number, without quotation marks" if isinstance(value, str) else "must be a number"
        raise InputError(reason, field=field, value=repr(value)[:80], fix=fix)
    if not abs(value) < LARGEST:  # NaN and Infinity, which Python's JSON can contain
        raise InputError("must be a finite number", field=field, value=value)
    if key in POSITIVE and not value > 0:
        raise InputError("must be greater than 0", field=field, value=value)


def _is_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _rope_tables(section: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the RoPE settings of a section: one table, or one for each kind of layer."""
    for key in ROPE_KEYS:
        table = section.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            reason = 'must be an object such as {"rope_type": "yarn", "factor": 4.0}, or null'
            raise InputError(reason, field=where + key, value=repr(table)[:80])
        nested = {name: one for name, one in table.items() if isinstance(one, dict) and name not in ROPE_SETTINGS}
        if nested:
            yield from ((f"{where}{key}.{name}", one) for name, one in nested.items())
        else:
            yield where + key, table


def _check_rope(field: str, table: Mapping[str, Any], section: Mapping[str, Any], model_type: str) -> None:
    key = "rope_type" if "rope_type" in table else "type"
    kind = table.get(key)
    if kind is None:
        if table.get("factor") is not None:
            reason = f"is missing, so the factor has no effect; transformers has {', '.join(ROPE_TYPES)}"
            raise InputError(reason, field=f"{field}.rope_type")
        kind = "default"
    if not isinstance(kind, str):
        raise InputError(f"must be one of {', '.join(ROPE_TYPES)}", field=f"{field}.{key}", value=repr(kind)[:80])
    old = next((new for (start, name), new in OLD_TYPES.items() if kind == name and model_type.startswith(start)), None)
    kind = old or kind
    _require_known(f"{field}.{key}", kind, ROPE_TYPES, "type of RoPE")
    for name in ROPE_NUMBERS:
        _require_number(f"{field}.{name}", name, table.get(name))
    for name in ROPE_TYPES[kind]:
        if table.get(name) is None:
            needed = ", ".join(ROPE_TYPES[kind])
            raise InputError(f"is missing; RoPE of type {kind} needs {needed}", field=f"{field}.{name}")
    for name in ROPE_LISTS if kind == "longrope" else ():
        factors = table[name]
        numeric = isinstance(factors, list) and not any(
            isinstance(one, bool) or not isinstance(one, (int, float)) for one in factors
        )
        if not numeric:
            raise InputError("must be a list of numbers", field=f"{field}.{name}", value=repr(factors)[:80])
    # equal factors are those of Llama 4 Scout: no channel lies between them
    if kind == "llama3" and not table["high_freq_factor"] >= table["low_freq_factor"]:
        reason = f"must not be less than low_freq_factor={table['low_freq_factor']}"
        raise InputError(reason, field=f"{field}.high_freq_factor", value=table["high_freq_factor"])


def _check_head_width(section: Mapping[str, Any], where: str, model_type: str) -> None:
    """Raise for a head of odd width with RoPE, which rotates pairs of channels."""
    if not (model_type.startswith(USES_ROPE) or any(section.get(key) is not None for key in SHOWS_ROPE)):
        return
    part = section.get("qk_rope_head_dim")
    if part is not None:
        if _is_int(part) and part % 2:
            reason = "must be even: RoPE rotates pairs of channels"
            raise InputError(reason, field=f"{where}qk_rope_head_dim", value=part, fix=_even("qk_rope_head_dim", part))
        return
    head: Any
    head, hidden, heads = (section.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    field, reason = "head_dim", "must be even: RoPE rotates pairs of channels"
    if head is None and _is_int(hidden) and _is_int(heads) and heads > 0 and hidden % heads == 0:
        head, field = hidden // heads, "num_attention_heads"
        reason = f"gives heads of {head} channels (hidden_size={hidden}), and RoPE rotates pairs: they must be even"
    if not _is_int(head) or head < 1:  # the reader says what a size can be
        return
    rope = section.get("rope_parameters")
    share = section.get("partial_rotary_factor") or (isinstance(rope, dict) and rope.get("partial_rotary_factor")) or 1
    rotated = int(head * share) if isinstance(share, (int, float)) else head
    if rotated % 2 and head % 2:
        value = head if field == "head_dim" else heads
        raise InputError(reason, field=where + field, value=value, fix=_even("head_dim", head))


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _even(key: str, width: int) -> tuple[str, ...]:
    return (f'"{key}": {width + 1}', *((f'"{key}": {width - 1}',) if width > 1 else ()))

"""Traits that distinguish decoder architectures; the tests compare them with transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from .fields import Fields

Switch = bool | str  # fixed, or the config key that sets it
Number = int | str  # fixed, or the key that has it, of the config or derived

# Which layers have a sliding window if layer_types is not set: none, all, all if use_sliding_window is set, those from
# max_window_layers on, every other one, all but every n-th, or those without RoPE.
# "typed_upper" is "upper" without its switch, "pattern_first" counts the n-th from the first layer.
Window = Literal[
    "none",
    "every",
    "switched",
    "upper",
    "typed_upper",
    "alternate",
    "pattern",
    "pattern_first",
    "typed_every",
    "no_rope",
]


class MoeTraits(msgspec.Struct, frozen=True):
    """The config keys and features of an architecture's experts."""

    experts: str = "num_experts"
    width: str = "moe_intermediate_size"
    topk: str = "num_experts_per_tok"
    shared: Literal["none", "number", "width"] = "none"  # n_shared_experts times width, or a separate width
    shared_number: str = "n_shared_experts"
    shared_width: str = "shared_expert_intermediate_size"
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    balance_bias: bool = False
    dense_bias: Switch = False
    latent: str = ""  # the key of the width at which routed experts work, with a projection down and up
    parallel: str = ""  # the key of the width of a dense block beside the experts
    # "listed": mlp_layer_types, or those after first_k_dense_replace; "derived": the places that Traits.derive returns
    placed: Literal["all", "after_dense", "stepped", "listed", "derived"] = "all"


class Traits(msgspec.Struct, frozen=True):
    """One decoder architecture: its defaults, and which parts it has."""

    family: str
    hf_class: str
    defaults: Mapping[str, Any]
    aliases: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    mixer: Literal["attention", "mla", "delta_hybrid"] = "attention"
    mixers: Mapping[str, str] = msgspec.field(default_factory=dict)  # words of layer_types and the mixers they mean
    beside: str = ""  # a second mixer in every layer, parallel to the first
    derive: Callable[[Fields], Mapping[str, Any]] | None = None  # keys that follow from others of the config
    ignored: tuple[str, ...] = ()  # keys that other architectures have parameters for, and this one has not
    only: Mapping[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)  # the supported values of a key
    inspected: tuple[str, ...] = ()  # keys of `only` whose other values transformers builds: they are inspected
    qkv_bias: Switch = False
    out_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Literal["none", "head", "head_bias", "full"] = "none"
    qk_norm_key: str = ""  # the flag that turns the norm on
    layer_norms: Number = 2  # norm vectors of the model width in one layer
    final_norms: Number = 1
    embedding_norms: int = 0
    layer_vectors: Number = 0  # further parameters of a layer outside its linears
    layer_matmul: Number = 0  # parameters of further linears of a layer
    extra_params: Number = 0  # parameters outside the layers
    head_bias: Switch = False
    positions: Number = 0  # rows of a learned position table
    gated: Switch = True
    has_ffn: Switch = True
    width: str = "intermediate_size"
    ffn_multiple: Number = 0  # width over hidden_size, if the width is null
    window: Window = "none"
    sinks: Switch = False
    shared_kv: Switch = False  # values are keys
    reused_kv: Switch = False  # keys and values of an earlier layer
    residuals: Number = 1  # parallel residual streams
    head_gate: Switch = False
    differential: bool = False
    v_dim: str = ""  # the key of the width of a value head
    output_gate: bool = False
    output_gate_key: str = ""  # a flag that must be on
    heads_divide_hidden: bool = False
    head_dim_follows: bool = False  # head_dim is always hidden_size / num_attention_heads
    moe: MoeTraits | None = None
    activation_key: str = "hidden_act"  # "=silu" is a fixed one
    is_tied: bool | None = None  # whatever tie_word_embeddings says


def row(family: str, hf_class: str, defaults: Mapping[str, Any] | None = None, **parts: Any) -> Traits:
    """Return an architecture whose other defaults are those of its config class (class_defaults.json)."""
    return Traits(family, hf_class, defaults or {}, **parts)


# Defaults and switches that many architectures share.
ATTENTION = {"attention_bias": False}
BIASES = {"attention_bias": False, "mlp_bias": False}
SILU = {"hidden_act": "silu", "tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": None}
MTP = {"num_nextn_predict_layers": ("num_mtp_layers", "mtp_num_hidden_layers")}
ALL_ATTENTION: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
DELTA = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "layer_types": None,
    "num_nextn_predict_layers": 0,
    "attn_output_gate": True,
}

"""Traits that distinguish decoder architectures; the tests compare them with transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Switch = bool | str  # fixed, or the config key that sets it

# Which layers have a sliding window if layer_types is not set: none, all, all if use_sliding_window is set, those from
# max_window_layers on, every other one, all but every n-th, or those without RoPE.
Window = Literal["none", "every", "switched", "upper", "alternate", "pattern", "typed_every", "no_rope"]


class MoeTraits(msgspec.Struct, frozen=True):
    """The config keys and features of an architecture's experts."""

    experts: str = "num_experts"
    width: str = "moe_intermediate_size"
    shared: Literal["none", "number", "width"] = "none"  # n_shared_experts times width, or a separate width
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    balance_bias: bool = False
    dense_bias: Switch = False
    placed: Literal["all", "after_dense", "stepped"] = "all"


class Traits(msgspec.Struct, frozen=True):
    """One decoder architecture: its defaults, and which parts it has."""

    family: str
    hf_class: str
    defaults: Mapping[str, Any]
    aliases: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    mixer: Literal["attention", "mla", "delta_hybrid"] = "attention"
    qkv_bias: Switch = False
    out_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_key: str = ""  # the flag that turns the norm on
    layer_norms: int = 2  # norm vectors of the model width in one layer
    final_norms: int = 1
    gated: bool = True
    window: Window = "none"
    sinks: bool = False
    output_gate: bool = False
    heads_divide_hidden: bool = False
    head_dim_follows: bool = False  # head_dim is always hidden_size / num_attention_heads
    moe: MoeTraits | None = None
    activation_key: str = "hidden_act"


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

"""Decoders whose code is in their repositories, not in transformers: it is never run, so every row types its defaults.

tests/models/test_own_code_types.py compares each with the parameter total of a published checkpoint.
"""

from __future__ import annotations

from typing import Any

from .derived import Derived
from .fields import Fields
from .traits import ALL_ATTENTION, ATTENTION, MTP, SILU, MoeTraits, Traits

_LLAMA: dict[str, Any] = {**SILU, "max_position_embeddings": 2048}
_BAILING: dict[str, Any] = {
    **SILU, "max_position_embeddings": 16384, "use_qkv_bias": False, "use_bias": False, "use_qk_norm": False,
    "num_shared_experts": None, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "norm_head": False,
}  # fmt: skip


def _chatglm(fields: Fields) -> Derived:
    """Return the key/value heads: groups of queries share them if multi_query_attention is set."""
    groups = "multi_query_group_num" if fields.flag("multi_query_attention") else "num_attention_heads"
    return {"num_key_value_heads": fields.size(groups)}


def _qwen(fields: Fields) -> Derived:
    """Return the width of the gate and of the up projection: intermediate_size counts both."""
    width = fields.size("intermediate_size")
    if width % 2:
        raise fields.error("intermediate_size", "must be even: the gate and the up projection have half of it each")
    return {"intermediate_size": width // 2}


OWN_CODE: dict[str, Traits] = {
    "internlm2": Traits(
        "internlm", "InternLM2ForCausalLM", {**_LLAMA, "bias": True}, qkv_bias="bias", out_bias="bias",
    ),
    "internlm3": Traits(
        "internlm", "InternLM3ForCausalLM", {**_LLAMA, "qkv_bias": False, "bias": False},
        qkv_bias="qkv_bias", out_bias="bias", mlp_bias="bias",
    ),
    "baichuan": Traits(
        "baichuan", "BaichuanForCausalLM", {**_LLAMA, "max_position_embeddings": 4096},
        aliases={"max_position_embeddings": ("model_max_length",)},
        heads_divide_hidden=True,
    ),
    "qwen": Traits(
        "qwen", "QWenLMHeadModel", {**_LLAMA, "max_position_embeddings": 8192, "no_bias": True},
        aliases={"max_position_embeddings": ("seq_length",), "head_dim": ("kv_channels",)},
        only={"no_bias": (True,)},
        qkv_bias=True,
        derive=_qwen,
        activation_key="=silu",
    ),
    "chatglm": Traits(
        "glm", "ChatGLMForConditionalGeneration",
        {**_LLAMA, "add_qkv_bias": False, "add_bias_linear": False, "multi_query_attention": False,
         "multi_query_group_num": 1, "rmsnorm": True, "post_layer_norm": True},
        aliases={
            "num_hidden_layers": ("num_layers",),
            "intermediate_size": ("ffn_hidden_size",),
            "vocab_size": ("padded_vocab_size",),
            "head_dim": ("kv_channels",),
            "max_position_embeddings": ("seq_length",),
        },
        only={"rmsnorm": (True,), "post_layer_norm": (True,), "add_bias_linear": (False,)},
        qkv_bias="add_qkv_bias",
        derive=_chatglm,
        activation_key="=silu",
    ),
    "minicpm": Traits(
        "minicpm", "MiniCPMForCausalLM", {**_LLAMA, **ATTENTION, "tie_word_embeddings": True}, **ALL_ATTENTION,
    ),
    "exaone": Traits(
        "exaone", "ExaoneForCausalLM", {**_LLAMA, "activation_function": "silu"},
        aliases={"num_hidden_layers": ("num_layers",)},
        activation_key="activation_function",
    ),
    "deepseek": Traits(
        "deepseek", "DeepseekForCausalLM",
        {**_LLAMA, "attention_bias": False, "n_routed_experts": None, "n_shared_experts": None, "moe_layer_freq": 1,
         "first_k_dense_replace": 0},
        **ALL_ATTENTION,
        only={"moe_layer_freq": (1,)},
        moe=MoeTraits("n_routed_experts", shared="number", placed="after_dense"),
    ),
    "bailing_moe": Traits(
        "ling", "BailingMoeV2ForCausalLM", _BAILING,
        aliases=MTP,
        qkv_bias="use_qkv_bias",
        out_bias="use_bias",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        ignored=("moe_shared_expert_intermediate_size",),  # num_shared_experts of the routed width
        moe=MoeTraits(shared="number", shared_number="num_shared_experts", balance_bias=True, placed="after_dense"),
    ),
}  # fmt: skip

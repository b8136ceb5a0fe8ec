"""What tells one decoder architecture from the next: a table, checked against transformers by the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Switch = bool | str  # fixed, or the name of the config key that decides

# How a layer without layer_types gets its window: nowhere, everywhere, everywhere when use_sliding_window is set, from
# layer max_window_layers on, on every other layer, on all but every n-th, or on the layers without rotary positions.
Window = Literal["none", "every", "switched", "upper", "alternate", "pattern", "typed_every", "no_rope"]


@dataclass(frozen=True)
class MoeTraits:
    """Where an architecture keeps the facts about its experts."""

    experts: str = "num_experts"
    width: str = "moe_intermediate_size"
    shared: Literal["none", "number", "width"] = "none"  # n_shared_experts times width, or a width of its own
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    balance_bias: bool = False
    dense_bias: Switch = False
    placed: Literal["all", "after_dense", "stepped"] = "all"


@dataclass(frozen=True)
class Traits:
    """One decoder architecture: its defaults, and which parts it has."""

    family: str
    hf_class: str
    defaults: Mapping[str, Any]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixer: Literal["attention", "mla", "delta_hybrid"] = "attention"
    qkv_bias: Switch = False
    out_bias: Switch = False
    mlp_bias: Switch = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_key: str = ""  # a flag that has to be set for the norm to be there
    layer_norms: int = 2  # norm vectors of the model width in one layer
    final_norms: int = 1
    gated: bool = True
    window: Window = "none"
    sinks: bool = False
    output_gate: bool = False
    heads_divide_hidden: bool = False
    moe: MoeTraits | None = None
    activation_key: str = "hidden_act"


_ATTENTION = {"attention_bias": False}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_SILU = {"hidden_act": "silu", "tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": None}
_MTP = {"num_nextn_predict_layers": ("num_mtp_layers", "mtp_num_hidden_layers")}
_ALL_ATTENTION: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_WINDOWED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "num_experts_per_tok": 8}
_DELTA = {
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
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
_GLM_MOE = MoeTraits("n_routed_experts", shared="number", balance_bias=True, placed="after_dense")
_GLM = {
    **_SILU,
    **_ATTENTION,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
}
_QWEN3_MOE = MoeTraits("num_local_experts", placed="stepped")
_LOCAL = {"num_local_experts": ("num_experts",)}
_ROUTED = {"n_routed_experts": ("num_local_experts",), **_MTP}

TRAITS: dict[str, Traits] = {
    "llama": Traits(
        "llama",
        "LlamaForCausalLM",
        {**_SILU, **_BIASES, "max_position_embeddings": 2048},
        **_ALL_ATTENTION,
        mlp_bias="mlp_bias",
        heads_divide_hidden=True,
    ),
    "mistral": Traits(
        "mistral",
        "MistralForCausalLM",
        {**_SILU, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window="every",
    ),
    "ministral": Traits(
        "ministral",
        "MinistralForCausalLM",
        {
            **_SILU,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "layer_types": None,
        },
        window="typed_every",
    ),
    "ministral3": Traits(
        "ministral",
        "Ministral3ForCausalLM",
        {
            **_SILU,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        window="every",
    ),
    "mixtral": Traits(
        "mixtral",
        "MixtralForCausalLM",
        {
            **_SILU,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        aliases=_LOCAL,
        window="every",
        moe=MoeTraits("num_local_experts", "intermediate_size"),
    ),
    "qwen2": Traits(
        "qwen",
        "Qwen2ForCausalLM",
        {**_SILU, **_WINDOWED, "num_key_value_heads": 32, "max_position_embeddings": 32768},
        qkv_bias=True,
        window="upper",
    ),
    "qwen2_5_vl_text": Traits(
        "qwen",
        "Qwen2_5_VLForConditionalGeneration",
        {**_SILU, **_WINDOWED, "num_key_value_heads": 8, "max_window_layers": 80, "max_position_embeddings": 32768},
        qkv_bias=True,
        window="upper",
    ),
    "qwen3": Traits(
        "qwen",
        "Qwen3ForCausalLM",
        {
            **_SILU,
            **_ATTENTION,
            **_WINDOWED,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        **_ALL_ATTENTION,
        qk_norm="head",
        window="upper",
    ),
    "qwen3_vl_text": Traits(
        "qwen",
        "Qwen3VLForConditionalGeneration",
        {**_SILU, **_ATTENTION, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000},
        **_ALL_ATTENTION,
        qk_norm="head",
    ),
    "qwen3_moe": Traits(
        "qwen",
        "Qwen3MoeForCausalLM",
        {
            **_SILU,
            **_ATTENTION,
            **_SPARSE,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
        aliases=_LOCAL,
        **_ALL_ATTENTION,
        qk_norm="head",
        window="switched",
        moe=_QWEN3_MOE,
    ),
    "qwen3_vl_moe_text": Traits(
        "qwen",
        "Qwen3VLMoeForConditionalGeneration",
        {
            **_SILU,
            **_ATTENTION,
            **_SPARSE,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 128000,
        },
        aliases=_LOCAL,
        **_ALL_ATTENTION,
        qk_norm="head",
        moe=_QWEN3_MOE,
    ),
    "qwen3_next": Traits(
        "qwen",
        "Qwen3NextForCausalLM",
        {
            **_SILU,
            **_ATTENTION,
            **_SPARSE,
            **_DELTA,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 10,
            "shared_expert_intermediate_size": 512,
        },
        aliases={**_MTP, "num_experts": ("num_local_experts",)},
        **_ALL_ATTENTION,
        mixer="delta_hybrid",
        qk_norm="head",
        output_gate=True,
        moe=MoeTraits(shared="width", shared_gate=True, placed="stepped"),
    ),
    "qwen3_5_text": Traits(
        "qwen",
        "Qwen3_5ForCausalLM",
        {**_SILU, **_ATTENTION, **_DELTA, "num_key_value_heads": 4},
        aliases=_MTP,
        **_ALL_ATTENTION,
        mixer="delta_hybrid",
        qk_norm="head",
        output_gate=True,
    ),
    "qwen3_5_moe_text": Traits(
        "qwen",
        "Qwen3_5MoeForCausalLM",
        {
            **_SILU,
            **_ATTENTION,
            **_DELTA,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
        },
        aliases={**_MTP, "num_experts": ("num_local_experts",)},
        **_ALL_ATTENTION,
        mixer="delta_hybrid",
        qk_norm="head",
        output_gate=True,
        moe=MoeTraits(shared="width", shared_gate=True),
    ),
    "deepseek_v2": Traits(
        "deepseek",
        "DeepseekV2ForCausalLM",
        {
            **_SILU,
            **_BIASES,
            **_MLA,
            "max_position_embeddings": 2048,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 0,
        },
        aliases={"n_routed_experts": ("num_experts", "num_local_experts"), **_MTP},
        mixer="mla",
        mlp_bias="mlp_bias",
        moe=MoeTraits("n_routed_experts", shared="number", dense_bias="mlp_bias", placed="after_dense"),
    ),
    "deepseek_v3": Traits(
        "deepseek",
        "DeepseekV3ForCausalLM",
        {
            **_SILU,
            **_ATTENTION,
            **_MLA,
            "max_position_embeddings": 4096,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
        },
        aliases=_ROUTED,
        mixer="mla",
        moe=MoeTraits("n_routed_experts", shared="number", balance_bias=True, placed="after_dense"),
    ),
    "glm4_moe": Traits(
        "glm",
        "Glm4MoeForCausalLM",
        {**_GLM, "max_position_embeddings": 131072, "use_qk_norm": False, "num_nextn_predict_layers": 1},
        aliases=_ROUTED,
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        moe=_GLM_MOE,
    ),
    "glm4v_moe_text": Traits(
        "glm",
        "Glm4vMoeForConditionalGeneration",
        {**_GLM, "attention_bias": True, "max_position_embeddings": 65536, "num_nextn_predict_layers": 0},
        aliases=_ROUTED,
        qkv_bias="attention_bias",
        moe=_GLM_MOE,
    ),
    "gemma2": Traits(
        "gemma",
        "Gemma2ForCausalLM",
        {
            **_ATTENTION,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "layer_types": None,
        },
        **_ALL_ATTENTION,
        layer_norms=4,
        window="alternate",
        activation_key="hidden_activation",
    ),
    "gemma3_text": Traits(
        "gemma",
        "Gemma3ForCausalLM",
        {
            **_ATTENTION,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
        },
        aliases={"sliding_window_pattern": ("_sliding_window_pattern",)},
        **_ALL_ATTENTION,
        qk_norm="head",
        layer_norms=4,
        window="pattern",
        activation_key="hidden_activation",
    ),
    "olmoe": Traits(
        "olmoe",
        "OlmoeForCausalLM",
        {**_SILU, **_ATTENTION, "max_position_embeddings": 4096, "num_experts_per_tok": 8, "num_experts": 64},
        aliases={"num_experts": ("num_local_experts",)},
        **_ALL_ATTENTION,
        qk_norm="full",
        moe=MoeTraits(width="intermediate_size"),
    ),
    "olmo2": Traits(
        "olmo",
        "Olmo2ForCausalLM",
        {**_SILU, **_ATTENTION, "max_position_embeddings": 2048},
        **_ALL_ATTENTION,
        qk_norm="full",
        heads_divide_hidden=True,
    ),
    "gpt_oss": Traits(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **_SILU,
            "attention_bias": True,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "layer_types": None,
        },
        aliases={"num_local_experts": ("num_experts",), "num_experts_per_tok": ("experts_per_token",)},
        **_ALL_ATTENTION,
        sinks=True,
        window="alternate",
        moe=MoeTraits("num_local_experts", "intermediate_size", router_bias=True, bias=True),
    ),
    "phi3": Traits(
        "phi",
        "Phi3ForCausalLM",
        {**_SILU, "max_position_embeddings": 4096, "sliding_window": None},
        window="every",
        heads_divide_hidden=True,
    ),
    "granite": Traits(
        "granite",
        "GraniteForCausalLM",
        {**_SILU, **_BIASES, "max_position_embeddings": 2048},
        **_ALL_ATTENTION,
        mlp_bias="mlp_bias",
        heads_divide_hidden=True,
    ),
    "smollm3": Traits(
        "smollm",
        "SmolLM3ForCausalLM",
        {
            **_SILU,
            **_BIASES,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
        },
        **_ALL_ATTENTION,
        mlp_bias="mlp_bias",
        window="no_rope",
    ),
    "seed_oss": Traits(
        "seed_oss",
        "SeedOssForCausalLM",
        {
            **_SILU,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
        },
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "starcoder2": Traits(
        "starcoder",
        "Starcoder2ForCausalLM",
        {
            **_SILU,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "use_bias": True,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "sliding_window": None,
        },
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        layer_norms=4,
        final_norms=2,
        gated=False,
        window="every",
    ),
}

# The same architecture under another name.
SAME_AS = {"kimi_k2": "deepseek_v3", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

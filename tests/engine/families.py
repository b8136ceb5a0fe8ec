"""A tiny model of every family: the real structure, a few thousand weights, and a wide initialization."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {**BASE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}
DELTA: dict[str, Any] = {
    "initializer_range": 0.03,  # exponentials of sums of gates: wider ones exceed the precision of fp32
    "mtp_num_hidden_layers": 1,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **BASE},
    "qwen2": {"model_type": "qwen2", **BASE},
    "qwen3": {"model_type": "qwen3", **BASE, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **BASE, **SLIDING, "tie_word_embeddings": True, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **BASE,
        **SLIDING,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 8,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 64,
        "vocab_size": 64,
        "n_positions": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **{k: v for k, v in MOE.items() if k not in ("num_experts", "moe_intermediate_size")},
        **SLIDING,
        "num_local_experts": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {"model_type": "mixtral", **BASE, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {
        "model_type": "olmoe",
        **BASE,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        "topk_method": "group_limited_greedy",
        "aux_loss_alpha": 0.0,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **{k: v for k, v in LATENT.items() if "lora" not in k},
        "num_key_value_heads": 2,
        "n_group": 1,
    },
    "qwen3_next": {"model_type": "qwen3_next", **MOE, **DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **MOE, **DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_5": {"model_type": "qwen3_5_text", **BASE, **DELTA},
    "nemotron_h": {
        "model_type": "nemotron_h",
        **{k: v for k, v in MOE.items() if k not in ("num_hidden_layers", "num_experts")},
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 4,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "moe_shared_expert_intermediate_size": 16,
        "n_shared_experts": 1,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "num_nextn_predict_layers": 1,
    },
}

ALL = tuple(FAMILIES)
SPARSE = tuple(
    name for name, config in FAMILIES.items() if {"num_experts", "n_routed_experts", "num_local_experts"} & set(config)
)
DENSE = tuple(name for name in FAMILIES if name not in SPARSE)
LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3")
BALANCE_BIAS = ("deepseek_v3", "glm4_moe", "nemotron_h")  # the router has a balancing bias
SHARED_EXPERTS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe", "nemotron_h")

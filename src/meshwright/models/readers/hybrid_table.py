"""Decoders with scans, short convolutions or linear attention; the sweep compares every row with transformers."""

from __future__ import annotations

from typing import Any

from . import derived
from .traits import ALL_ATTENTION, MoeTraits, Traits, row

_SCAN_OR_ATTENTION = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",
    "attention": "attention",
}
_NO_LIMIT = {"max_position_embeddings": 1_048_576}  # a scan has no positions
_MAMBA: dict[str, Any] = {"layer_norms": 1, "has_ffn": False, "defaults": _NO_LIMIT}

HYBRID: dict[str, Traits] = {
    "mamba": row("mamba", "MambaForCausalLM", **_MAMBA, mixers={"mamba": "mamba"}, derive=derived.mamba),
    "falcon_mamba": row(
        "falcon", "FalconMambaForCausalLM", **_MAMBA, mixers={"mamba": "mamba"}, derive=derived.mamba
    ),
    "mamba2": row("mamba", "Mamba2ForCausalLM", **_MAMBA, mixers={"mamba2": "mamba2"}, derive=derived.mamba2),
    "jamba": row(
        "jamba", "JambaForCausalLM",
        mixers={"attention": "attention", "mamba": "mamba"},
        moe=MoeTraits(width="intermediate_size", placed="derived"),
        derive=derived.jamba,
    ),
    "bamba": row(
        "bamba", "BambaForCausalLM", **ALL_ATTENTION,
        mlp_bias="mlp_bias",
        mixers=_SCAN_OR_ATTENTION,
        ignored=("attention_bias",),  # read by attention layers, if there are any
        derive=derived.bamba,
    ),
    "granitemoehybrid": row(
        "granite", "GraniteMoeHybridForCausalLM", **ALL_ATTENTION,
        aliases={"num_local_experts": ("num_experts",)},
        mixers=_SCAN_OR_ATTENTION,
        ignored=("attention_bias",),
        width="shared_intermediate_size",
        moe=MoeTraits(
            "num_local_experts", "intermediate_size", shared="width", shared_width="shared_intermediate_size",
            placed="derived",
        ),
        derive=derived.granite_hybrid,
    ),
    "falcon_h1": row(
        "falcon", "FalconH1ForCausalLM", **ALL_ATTENTION,
        mlp_bias="mlp_bias",
        mixers={"hybrid": "mamba2"},
        beside="attention",
        only={"mamba_proj_bias": (False,), "projectors_bias": (False,)},
        derive=derived.falcon_h1,
    ),
    "lfm2": row(
        "lfm2", "Lfm2ForCausalLM",
        defaults={"block_ffn_dim_multiplier": 1.0},
        aliases={"intermediate_size": ("block_ff_dim",), "tie_word_embeddings": ("tie_embedding",)},
        qk_norm="head",
        mixers={"conv": "short_conv", "full_attention": "attention"},
        width="adjusted_width",
        derive=derived.lfm2,
        activation_key="=silu",
    ),
    "lfm2_moe": row(
        "lfm2", "Lfm2MoeForCausalLM",
        aliases={"num_experts": ("num_local_experts",), "tie_word_embeddings": ("tie_embedding",)},
        qk_norm="head",
        mixers={"conv": "short_conv", "full_attention": "attention"},
        moe=MoeTraits(balance_bias=True, placed="derived"),
        derive=derived.lfm2_moe,
        activation_key="=silu",
    ),
    "minimax": row(
        "minimax", "MiniMaxForCausalLM",
        aliases={"num_local_experts": ("num_experts",)},
        mixers={"full_attention": "attention", "linear_attention": "lightning"},
        moe=MoeTraits("num_local_experts", "intermediate_size"),
        derive=derived.minimax,
    ),
    "kimi_linear": row(
        "kimi", "KimiLinearForCausalLM",
        aliases={"num_experts_per_tok": ("num_experts_per_token",), "max_position_embeddings": ("model_max_length",)},
        defaults={
            "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_output_gate": False, "attn_res_block_size": None,
            "routed_expert_hidden_size": None, "latent_moe_use_norm": False,
        },
        mixers={"linear_attention": "kda", "full_attention": "mla"},
        layer_matmul="layer_linears",
        layer_vectors="layer_vectors",
        extra_params="residual_vectors",
        moe=MoeTraits(
            shared="number", shared_number="num_shared_experts", balance_bias=True, placed="listed",
            latent="routed_expert_hidden_size",
        ),
        derive=derived.kimi_linear,
        is_tied=False,  # transformers' class has no tied weights
    ),
    "olmo_hybrid": row(
        "olmo", "OlmoHybridForCausalLM", **ALL_ATTENTION,
        qk_norm="full",
        mixers={"linear_attention": "delta", "full_attention": "attention"},
        derive=derived.listed_types(4),
    ),
}  # fmt: skip

"""Further decoders with a mixture of experts; the sweep compares every row with transformers."""

from __future__ import annotations

from typing import Any

from . import derived
from .traits import ALL_ATTENTION, MTP, MoeTraits, Traits, row

_LOCAL: dict[str, Any] = {"aliases": {"num_local_experts": ("num_experts",)}}
_EXPERTS: dict[str, Any] = {"aliases": {"num_experts": ("num_local_experts",)}}
_ROUTED: dict[str, Any] = {"aliases": {"n_routed_experts": ("num_local_experts", "num_experts"), **MTP}}
_FULL_OR_SLIDING = {"full_attention": "attention", "sliding_attention": "sliding"}
_LISTED = {"first_k_dense_replace": 1}
_DSA: dict[str, Any] = {
    **_ROUTED,
    "defaults": {"num_nextn_predict_layers": 0},
    "moe": MoeTraits("n_routed_experts", shared="number", balance_bias=True, placed="listed"),
    "only": {"mlp_bias": (False,), "moe_layer_freq": (1,)},
}

EXPERTS: dict[str, Traits] = {
    "qwen2_moe": row(
        "qwen",
        "Qwen2MoeForCausalLM",
        **_EXPERTS,
        qkv_bias="qkv_bias",
        window="upper",
        moe=MoeTraits(shared="width", shared_gate=True, placed="stepped"),
    ),
    "granitemoe": row(
        "granite", "GraniteMoeForCausalLM", **_LOCAL, **ALL_ATTENTION,
        moe=MoeTraits("num_local_experts", "intermediate_size"),
    ),
    "granitemoeshared": row(
        "granite", "GraniteMoeSharedForCausalLM", **_LOCAL, **ALL_ATTENTION,
        moe=MoeTraits(
            "num_local_experts", "intermediate_size", shared="width", shared_width="shared_intermediate_size"
        ),
    ),
    "granitemoe_swa": row(
        "granite", "GraniteMoeSWAForCausalLM", **_LOCAL, **ALL_ATTENTION,
        defaults={"sliding_window_pattern": 4},
        sinks=True,
        window="pattern_first",
        moe=MoeTraits(
            "num_local_experts", "intermediate_size", shared="width", shared_width="shared_intermediate_size"
        ),
    ),
    "minimax_m2": row(
        "minimax", "MiniMaxM2ForCausalLM", **_LOCAL, qk_norm="full",
        only={"use_qk_norm": (True,)},
        moe=MoeTraits("num_local_experts", "intermediate_size", balance_bias=True),
    ),
    "dots1": row(
        "dots", "Dots1ForCausalLM", **_ROUTED, **ALL_ATTENTION,
        qk_norm="head",
        window="typed_upper",
        moe=MoeTraits("n_routed_experts", shared="number", balance_bias=True, placed="after_dense"),
    ),
    "aria_text": row(
        "aria", "AriaTextForCausalLM", **ALL_ATTENTION,
        moe=MoeTraits(
            "moe_num_experts", "intermediate_size", topk="moe_topk", shared="number",
            shared_number="moe_num_shared_experts", dense_bias="mlp_bias",
        ),
    ),
    "afmoe": row(
        "afmoe", "AfmoeForCausalLM",
        aliases={
            "num_experts": ("num_local_experts",),
            "sliding_window_pattern": ("global_attn_every_n_layers",),
            "first_k_dense_replace": ("num_dense_layers",),
        },
        defaults={"sliding_window_pattern": 4, "first_k_dense_replace": 1},
        qk_norm="head",
        output_gate=True,
        layer_norms=4,
        window="pattern",
        only={"attention_bias": (False,)},
        moe=MoeTraits(
            shared="number", shared_number="num_shared_experts", router_bias=True, balance_bias=True,
            placed="after_dense",
        ),
    ),
    "flex_olmo": row(
        "olmo", "FlexOlmoForCausalLM", **_EXPERTS, **ALL_ATTENTION, qk_norm="full",
        moe=MoeTraits(width="intermediate_size"),
    ),
    "mellum": row(
        "mellum", "MellumForCausalLM", **_LOCAL, **ALL_ATTENTION,
        defaults={"first_k_dense_replace": 0},
        qk_norm="head",
        mixers=_FULL_OR_SLIDING,
        moe=MoeTraits("num_local_experts", placed="listed"),
    ),
    "solar_open": row(
        "solar", "SolarOpenForCausalLM", **_ROUTED, qkv_bias="attention_bias",
        moe=MoeTraits("n_routed_experts", shared="number", balance_bias=True),
    ),
    "ernie4_5_moe": row(
        "ernie", "Ernie4_5_MoeForCausalLM",
        aliases={"moe_num_experts": ("num_experts", "num_local_experts"), "moe_k": ("num_experts_per_tok",)},
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        moe=MoeTraits(
            "moe_num_experts", topk="moe_k", shared="number", shared_number="moe_num_shared_experts",
            router_bias=True, balance_bias=True, dense_bias="use_bias", placed="derived",
        ),
        derive=derived.stepped_experts,
    ),
    "exaone_moe": row(
        "exaone", "ExaoneMoeForCausalLM", **_EXPERTS, qk_norm="head", window="pattern",
        moe=MoeTraits(shared="number", shared_number="num_shared_experts", balance_bias=True, placed="listed"),
        derive=derived.exaone,
    ),
    "hunyuan_v1_moe": row(
        "hunyuan", "HunYuanMoEV1ForCausalLM", **_EXPERTS, **ALL_ATTENTION,
        qk_norm="head",
        moe=MoeTraits(width="intermediate_size", topk="moe_topk", shared="width", shared_width="intermediate_size"),
        derive=derived.first_of_list("num_experts", "moe_topk"),
    ),
    "hy_v3": row(
        "hunyuan", "HYV3ForCausalLM", **_EXPERTS, **ALL_ATTENTION,
        defaults=_LISTED,
        qk_norm="head",
        mlp_bias="mlp_bias",
        moe=MoeTraits(
            shared="number", shared_number="num_shared_experts", balance_bias=True, dense_bias="mlp_bias",
            placed="listed",
        ),
    ),
    "laguna": row(
        "laguna", "LagunaForCausalLM", **_EXPERTS, **ALL_ATTENTION,
        defaults=_LISTED,
        qk_norm="head",
        head_gate=True,
        mixers=_FULL_OR_SLIDING,
        moe=MoeTraits(shared="width", router_bias=True, balance_bias=True, placed="listed"),
        only={"gating": (True,)},
        inspected=("gating",),
        derive=derived.layer_heads,
    ),
    "llama4_text": row(
        "llama", "Llama4ForCausalLM", **ALL_ATTENTION,
        aliases={"num_local_experts": ("num_experts",), "moe_places": ("moe_layers",)},
        mixers={"full_attention": "attention", "chunked_attention": "chunked"},
        width="intermediate_size_mlp",
        ignored=("use_qk_norm",),  # queries and keys are normalized without a weight
        moe=MoeTraits(
            "num_local_experts", "intermediate_size", shared="width", shared_width="intermediate_size",
            placed="derived",
        ),
        derive=derived.llama4,
    ),
    "glm4_moe_lite": row(
        "glm", "Glm4MoeLiteForCausalLM", **_ROUTED,
        defaults={**_LISTED, "num_nextn_predict_layers": 0},
        mixer="mla",
        moe=MoeTraits("n_routed_experts", shared="number", balance_bias=True, placed="listed"),
    ),
    "deepseek_v32": row("deepseek", "DeepseekV32ForCausalLM", **_DSA, mixers={"deepseek_sparse_attention": "dsa"}),
    "glm_moe_dsa": row(
        "glm", "GlmMoeDsaForCausalLM", **_DSA,
        mixers={"full_indexer": "dsa", "shared_indexer": "dsa_shared"},
        derive=derived.shared_indexers,
    ),
}  # fmt: skip

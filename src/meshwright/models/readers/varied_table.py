"""Decoders whose layers differ in sizes or parts, or that have further linears; the sweep compares every row."""

from __future__ import annotations

from typing import Any

from . import varied
from .traits import ALL_ATTENTION, MTP, SILU, MoeTraits, Traits, row

_FULL_OR_SLIDING = {"full_attention": "attention", "sliding_attention": "sliding"}
_GEMMA: dict[str, Any] = {
    **ALL_ATTENTION,
    "qk_norm": "head",
    "mixers": _FULL_OR_SLIDING,
    "reused_kv": "reuses_keys",
    "layer_norms": "norms",
    "layer_matmul": "layer_linears",
    "extra_params": "input_tables",
    "activation_key": "hidden_activation",
}
_GEMMA4: dict[str, Any] = {
    **_GEMMA,
    "defaults": {"global_head_dim": 512, "num_global_key_value_heads": None},
    "shared_kv": "keys_are_values",
    "layer_vectors": "router_vectors",
    "moe": MoeTraits(topk="top_k_experts", parallel="intermediate_size", placed="derived"),
    "derive": varied.gemma4,
}
_UNIFIED = {**_GEMMA4["defaults"], "enable_moe_block": False, "hidden_size_per_layer_input": 0}
_ROUTED = {"n_routed_experts": ("num_local_experts", "num_experts"), **MTP}

VARIED: dict[str, Traits] = {
    "gemma4_text": row("gemma", "Gemma4ForCausalLM", **_GEMMA4),
    "gemma4_unified_text": row("gemma", "Gemma4UnifiedForCausalLM", **{**_GEMMA4, "defaults": _UNIFIED}),
    "gemma3n_text": row("gemma", "Gemma3nForCausalLM", **_GEMMA, residuals="altup_num_inputs", derive=varied.gemma3n),
    "deepseek_v4": row(
        "deepseek", "DeepseekV4ForCausalLM",
        aliases={**_ROUTED, "moe_intermediate_size": ("intermediate_size",)},  # every layer has experts
        defaults={"num_nextn_predict_layers": 1},
        mixers={
            "sliding_attention": "window_only",
            "compressed_sparse_attention": "sparsely_compressed",
            "heavily_compressed_attention": "heavily_compressed",
        },
        only={"attention_bias": (False,), "mlp_bias": (False,), "n_shared_experts": (1,)},
        ignored=("first_k_dense_replace",),
        layer_matmul="layer_linears",
        layer_vectors="layer_vectors",
        extra_params="stream_head",
        residuals="hc_mult",
        moe=MoeTraits("n_routed_experts", shared="number", balance_bias=True),
        derive=varied.deepseek_v4,
    ),
    "mimo_v2_flash": row(
        "mimo", "MiMoV2FlashForCausalLM",
        aliases=_ROUTED,
        qkv_bias="attention_bias",
        sinks="has_sinks",
        v_dim="v_head_dim",
        mixers=_FULL_OR_SLIDING,
        only={
            "n_shared_experts": (None, 0),
            "add_full_attention_sink_bias": (False,),
            "add_swa_attention_sink_bias": (True,),
        },
        moe=MoeTraits("n_routed_experts", balance_bias=True, placed="listed"),
        derive=varied.mimo_v2,
    ),
    "hy_v4": row(
        "hunyuan", "HYV4ForCausalLM",
        aliases=_ROUTED,
        defaults={"first_k_dense_replace": 1, "index_topk_freq": 4},
        mixers={"full_indexer": "dsa", "shared_indexer": "dsa_shared"},
        only={"mlp_bias": (False,), "attention_bias": (False,)},
        layer_matmul="layer_linears",
        layer_vectors="layer_vectors",
        extra_params="stream_head",
        residuals="hc_mult",
        moe=MoeTraits("n_routed_experts", shared="number", balance_bias=True, placed="listed"),
        derive=varied.hy_v4,
    ),
    "axk1": row(
        "axk", "AXK1ForCausalLM",
        aliases=_ROUTED,
        mixer="mla",
        layer_norms="norms",
        moe=MoeTraits("n_routed_experts", shared="number", balance_bias=True, placed="after_dense"),
        derive=varied.norm_after_experts,
    ),
    "minimax_m3_vl_text": row(
        "minimax", "MiniMaxM3VLForCausalLM",
        defaults={"num_nextn_predict_layers": 0},
        aliases={"num_local_experts": ("num_experts",), **MTP},
        qk_norm="head",
        mixers={"full_attention": "attention", "minimax_m3_sparse": "block_sparse"},
        width="dense_intermediate_size",
        only={"n_shared_experts": (1,), "use_qk_norm": (True,), "attention_output_gate": (False,)},
        moe=MoeTraits(
            "num_local_experts", "intermediate_size", shared="width", shared_width="shared_intermediate_size",
            balance_bias=True, placed="listed",
        ),
        activation_key="=silu",  # whatever the file says: the class computes its own
        derive=varied.minimax_m3,
    ),
    # Without a decoder class in transformers: their own code is on the hub, and the counts are those of the published
    # weights. Of step3p7 it has the model with an image encoder.
    "mimo": Traits(
        "mimo", "MiMoForCausalLM",
        {**SILU, "attention_bias": True, "max_position_embeddings": 32768, "num_nextn_predict_layers": 1,
         "use_sliding_window": False, "sliding_window": None, "max_window_layers": 0, "layer_types": None},
        aliases=MTP,
        qkv_bias="attention_bias",
        window="upper",
    ),
    "step3p7": Traits(
        "step", "Step3p7FlashForCausalLM",
        {**SILU, "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 128000, "layer_types": None,
         "sliding_window": None, "first_k_dense_replace": 3, "mlp_layer_types": None, "num_nextn_predict_layers": 0,
         "share_expert_dim": 1280, "num_sliding_attention_heads": None},
        aliases={
            **MTP,
            "num_key_value_heads": ("num_attention_groups",),
            "num_experts": ("moe_num_experts", "n_routed_experts", "num_local_experts"),
            "num_experts_per_tok": ("moe_top_k",),
            "share_expert_dim": ("share_expert_dims",),
        },
        mixers=_FULL_OR_SLIDING,
        qk_norm="head",
        head_gate=True,
        only={"attention_bias": (False,), "mlp_bias": (False,), "n_shared_experts": (1,)},
        moe=MoeTraits(shared="width", shared_width="share_expert_dim", balance_bias=True, placed="listed"),
        derive=varied.step3p7,
    ),
    "nemotron-nas": Traits(
        "nemotron", "DeciLMForCausalLM",
        {**SILU, "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 131072},
        only={"attention_bias": (False,), "mlp_bias": (False,)},
        mixers={"full_attention": "attention", varied.NO_MIXER: "none"},
        has_ffn="has_block",
        layer_norms="norms",
        derive=varied.block_configs,
    ),
}  # fmt: skip

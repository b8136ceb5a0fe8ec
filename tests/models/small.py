"""Small random configs of every architecture the reader knows."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from meshwright.models.readers.architectures import BY_CLASS, SAME_AS, TRAITS, TYPES_WITHOUT_CLASS, WITHOUT_CLASS
from meshwright.models.readers.wrappers import WRAPPERS

# Types with their config class's defaults are proven from those, and key by key (test_decoders.py).
DECODERS = sorted(
    {*TRAITS, *SAME_AS} - {"kimi_k2"} - set(WRAPPERS) - set(BY_CLASS) - {*WITHOUT_CLASS, *TYPES_WITHOUT_CLASS}
)
TEXT_ONLY = [kind for kind in DECODERS if kind not in {text for wrapper in WRAPPERS.values() for text in wrapper.text}]
STANDALONE = sorted({*TEXT_ONLY, "gemma3_text", "mistral", "ministral3", "qwen3_5_text", "qwen3_5_moe_text"})
FLAGS = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qk_norm", "tie_word_embeddings")


@st.composite
def decoder(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """A small valid config of one decoder architecture, with any of its switches set."""
    traits = TRAITS[kind]
    kv_heads = draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    head_dim = 16
    layers = draw(st.integers(1, 8))
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": heads * head_dim
        if traits.heads_divide_hidden or traits.head_dim_follows
        else draw(st.sampled_from([2, 3])) * heads * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if traits.mixer == "mla" else kv_heads,
        "intermediate_size": draw(st.integers(1, 70)),
        "vocab_size": draw(st.integers(300, 500)),
        # so that no default token lies outside the small vocabulary
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if traits.mixer != "mla":
        config["head_dim"] = head_dim
    for flag in FLAGS:
        if flag in traits.defaults and draw(st.booleans()):
            config[flag] = draw(st.booleans())
    if traits.mixer == "mla":
        config |= draw(_latent())
    if traits.mixer == "delta_hybrid":
        config |= draw(_linear_attention())
    if traits.moe:
        config |= draw(_experts(kind, layers))
    return config


@st.composite
def _latent(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kv_lora_rank": draw(st.integers(1, 40)),
        "q_lora_rank": draw(st.none() | st.integers(1, 40)),
        "qk_nope_head_dim": draw(st.integers(1, 20)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 8)),
        "v_head_dim": draw(st.integers(1, 20)),
    }


@st.composite
def _linear_attention(draw: st.DrawFn) -> dict[str, Any]:
    k_heads = draw(st.integers(1, 3))
    return {
        "full_attention_interval": draw(st.integers(1, 4)),
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": k_heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.integers(1, 20)),
        "linear_value_head_dim": draw(st.integers(1, 20)),
        "linear_conv_kernel_dim": draw(st.integers(1, 5)),
    }


@st.composite
def _experts(draw: st.DrawFn, kind: str, layers: int) -> dict[str, Any]:
    traits = TRAITS[kind].moe
    assert traits is not None
    experts = draw(st.integers(2, 6))
    config: dict[str, Any] = {
        traits.experts: experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        traits.width: draw(st.integers(1, 50)),
    }
    if kind in ("qwen3_moe", "qwen3_next"):
        config["decoder_sparse_step"] = draw(st.integers(1, 3))
        config["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), unique=True))
    if traits.shared == "width":
        config["shared_expert_intermediate_size"] = draw(st.integers(1, 50))
    if traits.shared == "number":
        config["n_shared_experts"] = draw(st.integers(1, 3))
        config["first_k_dense_replace"] = draw(st.integers(0, layers))
        config |= {"n_group": 1, "topk_group": 1}
    return config


@st.composite
def nemotron(draw: st.DrawFn) -> dict[str, Any]:
    """A small valid Nemotron-H config with a random pattern."""
    experts, groups = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    return {
        "model_type": "nemotron_h",
        "hidden_size": draw(st.integers(1, 40)),
        "hybrid_override_pattern": draw(st.text("M*-E", min_size=1, max_size=8)),
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.integers(1, 20)),
        "intermediate_size": draw(st.integers(1, 60)),
        "vocab_size": draw(st.integers(10, 100)),
        "mamba_num_heads": groups * draw(st.integers(1, 3)),
        "mamba_head_dim": draw(st.integers(1, 12)),
        "n_groups": groups,
        "ssm_state_size": draw(st.integers(1, 12)),
        "conv_kernel": draw(st.integers(1, 5)),
        "use_conv_bias": draw(st.booleans()),
        "use_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.integers(1, 40)),
        "moe_shared_expert_intermediate_size": draw(st.integers(1, 40)),
        "moe_latent_size": draw(st.none() | st.integers(1, 30)),
    }

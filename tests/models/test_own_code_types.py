"""Types whose code is in their repositories: the parameters of published checkpoints, by their config.json."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import models
from meshwright.errors import InputError

LLAMA = {"num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 32}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "internlm/internlm2-7b": (
        7_737_708_544,
        {**LLAMA, "model_type": "internlm2", "num_key_value_heads": 8, "intermediate_size": 14336,
         "vocab_size": 92544, "bias": False},
    ),
    "internlm/internlm3-8b-instruct": (
        8_804_241_408,
        {**LLAMA, "model_type": "internlm3", "num_key_value_heads": 2, "intermediate_size": 10240, "head_dim": 128,
         "num_hidden_layers": 48, "vocab_size": 128512, "qkv_bias": False, "bias": False},
    ),
    "baichuan-inc/Baichuan2-7B-Base": (
        7_505_973_248,
        {**LLAMA, "model_type": "baichuan", "intermediate_size": 11008, "vocab_size": 125696,
         "max_position_embeddings": 4096, "model_max_length": 4096},
    ),
    "Qwen/Qwen-7B": (
        7_721_324_544,
        {**LLAMA, "model_type": "qwen", "intermediate_size": 22016, "vocab_size": 151936, "kv_channels": 128,
         "seq_length": 8192, "max_position_embeddings": 8192, "no_bias": True},
    ),
    "THUDM/chatglm3-6b": (
        6_243_584_000,
        {"model_type": "chatglm", "hidden_size": 4096, "num_layers": 28, "num_attention_heads": 32,
         "ffn_hidden_size": 13696, "padded_vocab_size": 65024, "kv_channels": 128, "seq_length": 8192,
         "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True, "add_bias_linear": False},
    ),
    "openbmb/MiniCPM-2B-sft-bf16": (
        2_724_880_896,
        {"model_type": "minicpm", "hidden_size": 2304, "num_hidden_layers": 40, "num_attention_heads": 36,
         "num_key_value_heads": 36, "intermediate_size": 5760, "vocab_size": 122753},
    ),
    "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct": (
        7_818_448_896,
        {"model_type": "exaone", "hidden_size": 4096, "num_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 102400, "head_dim": 128,
         "activation_function": "silu"},
    ),
    "deepseek-ai/deepseek-moe-16b-base": (
        16_375_728_128,
        {"model_type": "deepseek", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "vocab_size": 102400},
    ),
    "inclusionAI/Ling-lite-1.5": (
        16_801_974_272,
        {"model_type": "bailing_moe", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 4, "intermediate_size": 1408, "moe_intermediate_size": 1408, "num_experts": 64,
         "num_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 0, "vocab_size": 126464,
         "use_bias": False, "use_qkv_bias": False, "norm_head": False},
    ),
    # the checkpoint's total is 16,255,643,392: with the routing biases of 19 layers of 256 experts, which no gradient
    # updates
    "inclusionAI/Ling-mini-2.0": (
        16_255_643_392 - 19 * 256,
        {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "hidden_size": 2048,
         "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
         "intermediate_size": 5120, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
         "num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
         "num_nextn_predict_layers": 0, "vocab_size": 157184, "use_qk_norm": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoint(name: str) -> None:
    total, config = PUBLISHED[name]
    assert models.spec_from_config(config, name).params.total == total


def test_every_type_has_a_published_checkpoint() -> None:
    from meshwright.models.readers.own_code_table import OWN_CODE

    assert {config["model_type"] for _, config in PUBLISHED.values()} == set(OWN_CODE)


def test_values_that_make_other_shapes_are_refused() -> None:
    for name, changes in (
        ("Qwen/Qwen-7B", {"no_bias": False}),
        ("Qwen/Qwen-7B", {"intermediate_size": 22015}),
        ("THUDM/chatglm3-6b", {"rmsnorm": False}),
        ("openbmb/MiniCPM-2B-sft-bf16", {"num_experts": 8}),
        ("deepseek-ai/deepseek-moe-16b-base", {"moe_layer_freq": 2}),
    ):
        with pytest.raises(InputError):
            models.spec_from_config({**PUBLISHED[name][1], **changes}, name)


KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear", "hidden_act": "situ", "hidden_size": 7168, "intermediate_size": 33792,
        "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96, "vocab_size": 163840,
        "max_position_embeddings": 1048576, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
        "attn_res_block_size": 12, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 3072, "num_experts": 896,
        "num_experts_per_token": 16, "num_shared_experts": 2, "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93], "head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
    },
    "vision_config": {
        "vt_hidden_size": 1024, "vt_intermediate_size": 4096, "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27,
        "qkv_hidden_size": 1536, "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2], "mm_projector_type": "patchmergerv2", "norm_type": "rmsnorm",
    },
}  # fmt: skip


def test_kimi_k3_has_the_modules_that_vllm_builds() -> None:
    """As in vllm/models/kimi_k3 and kimi_k25_vit.py; published as 2.8 T parameters."""
    hidden, inner, latent = 7168, 96 * 128, 3584
    kda = hidden * (4 * inner + 128 + 96) + 128 * inner + inner * hidden + 3 * inner * 4 + inner + 96 + 128
    mla = hidden * (1536 + 512 + 64) + 1536 * 96 * 192 + 512 * 96 * 256 + 2 * inner * hidden + 1536 + 512
    experts = 896 * (3 * latent * 3072 + hidden) + 2 * hidden * latent + latent + 3 * hidden * 2 * 3072
    dense = 3 * hidden * 33792
    layers = 69 * kda + 24 * mla + dense + 92 * experts + 93 * 6 * hidden
    text = layers + 3 * hidden + 2 * 163840 * hidden
    encoder = 27 * (4 * 1024 * 1536 + 2 * 1024 * 4096 + 2 * 1024) + (3 * 14**2 + 64 * 64 + 1) * 1024
    projector = 4096 * 4096 + 4096 * hidden + hidden
    found = models.spec_from_config(KIMI_K3, "k3")
    assert found.params.total == text + encoder + projector
    assert found.params.total / 1e12 == pytest.approx(2.8, abs=0.05)

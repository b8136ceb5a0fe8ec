"""Decoders whose layers differ, and their vision-language wrappers: counts that transformers 5.17 or a hub page has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.each import each

from meshwright.costs.flops import core_flops
from meshwright.errors import InputError
from meshwright.models import Attention, find, inspection, spec_from_config

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("decoders.json").read_text("utf-8"))
WRAPPED: dict[str, Any] = json.loads(Path(__file__).with_name("wrapped.json").read_text("utf-8"))
V4_FLASH = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "vocab_size": 129280, "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 512, "sliding_window": 128, "num_hash_layers": 3, "hc_mult": 4, "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
}  # fmt: skip
BLOCK: dict[str, Any] = {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"ffn_mult": 3.0, "no_op": False}}
NAS = {
    "model_type": "nemotron-nas", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": None, "intermediate_size": None, "vocab_size": 1000, "max_position_embeddings": 256,
    "block_configs": [
        BLOCK,
        {**BLOCK, "attention": {"n_heads_in_group": None, "no_op": True}},
        {**BLOCK, "ffn": {"ffn_mult": None, "no_op": True}},
        {**BLOCK, "ffn": {"ffn_mult": 0.5, "no_op": False}},
    ],
}  # fmt: skip


@each("name", WRAPPED)
def test_a_wrapped_decoder_has_the_count_that_transformers_builds(name: str) -> None:
    params = spec_from_config(WRAPPED[name]["config"], name).params
    assert [params.total, params.routed] == WRAPPED[name]["params"]


def test_a_file_without_vision_config_is_the_decoder_alone() -> None:
    config = WRAPPED["llama4"]["config"]
    alone = spec_from_config({**config, "vision_config": None}, "alone")
    assert (alone.kind, alone.vision) == ("causal_lm", None)
    assert alone.params.total < WRAPPED["llama4"]["params"][0]


def test_deepseek_v4_flash_has_284_billion_parameters_and_13_active() -> None:
    params = spec_from_config(V4_FLASH, "v4").params
    assert (params.total, params.active) == (284_332_230_231, 13_799_622_231)


def test_compressed_attention_grows_far_slower_than_full_attention() -> None:
    spec = spec_from_config(V4_FLASH, "v4")
    mixers = [mixer for mixer, _ in spec.mixers(Attention) if isinstance(mixer, Attention)]
    heavy = next(one for one in mixers if one.compressor and one.compressor.topk is None)
    seq = 131_072
    whole = core_flops(msgspec.structs.replace(heavy, window=None, compressor=None), seq, "causal")
    assert whole / 110 < core_flops(heavy, seq, "causal") < whole / 95
    window = msgspec.structs.replace(heavy, compressor=None)
    keys = core_flops(heavy, seq, "causal") - core_flops(window, seq, "causal")
    assert keys == pytest.approx(2 * 2 * heavy.q_width * seq / 128 / 2)


def test_nemotron_nas_leaves_out_blocks() -> None:
    spec = spec_from_config(NAS, "nas")
    hidden, width, narrow = 512, 1024, 256
    attention = 2 * hidden * hidden + 2 * hidden * 128
    blocks = [
        attention + 3 * hidden * width + 2 * hidden,
        3 * hidden * width + hidden,
        attention + hidden,
        attention + 3 * hidden * narrow + 2 * hidden,
    ]
    assert [layer.params(hidden) for layer in spec.layers] == blocks
    assert spec.params.total == sum(blocks) + 2 * 1000 * hidden + hidden


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (NAS, "block_configs", [BLOCK]),
        (NAS, "block_configs", [1, 2, 3, 4]),
        (NAS, "block_configs", [{**BLOCK, "ffn": {"ffn_mult": "wide"}}] * 4),
        (NAS, "block_configs", [{**BLOCK, "attention": {"n_heads_in_group": 3}}] * 4),
        (NAS, "block_configs", [{**BLOCK, "attention": {"replace_with_linear": True}}] * 4),
        (V4_FLASH, "compress_ratios", [0, 4]),
        (V4_FLASH, "compress_ratios", [7] * 43),
        (V4_FLASH, "compress_ratios", -1),
        (V4_FLASH, "o_groups", 7),
        (CASES["gemma4_text"]["config"], "num_kv_shared_layers", 99),
        (CASES["gemma4_text"]["config"], "per_layer_config", {"99": {}}),
        (CASES["gemma4_text"]["config"], "per_layer_config", {"5": {"hidden_size": 7}}),
        (CASES["gemma4_text"]["config"], "layer_types", -1),
        (CASES["gemma3n_text"]["config"], "intermediate_size", [96]),
        (CASES["mimo_v2_flash"]["config"], "n_shared_experts", 1),
    ],
)
def test_a_value_that_contradicts_the_architecture_names_its_key(config: Any, key: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        spec_from_config({**config, key: value}, "mine")
    assert key in str(caught.value)


def test_an_audio_encoder_is_left_to_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="audio_config") as caught:
        spec_from_config({**WRAPPED["gemma4"]["config"], "audio_config": {"hidden_size": 64}}, "mine")
    assert "transformers" in caught.value.fix[0]


@each("name", ("deepseek-v6", "deepseek-ai/DeepSeek-V5", "qwen4"))
def test_the_error_for_an_unknown_model_names_the_other_way_in(name: str) -> None:
    with pytest.raises(InputError, match="unknown model") as caught:
        find(name)
    assert "config.json" in str(caught.value)

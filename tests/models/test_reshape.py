"""Reshaping equals reading a config with the new sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.models import MLA, Attention, Dense, MoE, config_of, find, reshape, spec_from_config


@pytest.mark.parametrize(
    ("name", "sizes", "keys"),
    [
        ("llama3_8b", {"layers": 4}, {"num_hidden_layers": 4}),
        ("llama3_8b", {"layers": 99}, {"num_hidden_layers": 99}),
        ("llama3_8b", {"hidden": 1024}, {"hidden_size": 1024}),
        ("llama3_8b", {"heads": 8, "kv_heads": 2}, {"num_attention_heads": 8, "num_key_value_heads": 2}),
        ("llama3_8b", {"ffn": 256, "vocab": 1000}, {"intermediate_size": 256, "vocab_size": 1000}),
        ("llama2_7b", {"heads": 16}, {"num_attention_heads": 16, "num_key_value_heads": 16}),
        ("qwen3_8b", {"head_dim": 64}, {"head_dim": 64}),
        ("qwen3_600m", {"hidden": 256}, {"hidden_size": 256}),
        ("qwen3_30b_a3b", {"experts": 8, "topk": 2}, {"num_experts": 8, "num_experts_per_tok": 2}),
        ("qwen3_30b_a3b", {"ffn": 64}, {"moe_intermediate_size": 64}),
        ("deepseek_v3", {"layers": 5, "hidden": 128}, {"num_hidden_layers": 5, "hidden_size": 128}),
        ("deepseek_v3", {"layers": 80, "ffn": 100}, {"num_hidden_layers": 80, "intermediate_size": 100}),
        ("deepseek_v3", {"heads": 16}, {"num_attention_heads": 16}),
        ("gemma3_1b", {"layers": 7}, {"num_hidden_layers": 7}),
        ("gemma3_1b", {"layers": 31}, {"num_hidden_layers": 31}),
        ("gpt_oss_20b", {"layers": 3, "experts": 4}, {"num_hidden_layers": 3, "num_local_experts": 4}),
        ("qwen3_next_80b_a3b", {"layers": 8, "heads": 4}, {"num_hidden_layers": 8, "num_attention_heads": 4}),
        ("nemotronh_8b", {"layers": 9}, {"num_hidden_layers": 9, "hybrid_override_pattern": "M-M-M-M*-"}),
        ("gpt3_175b", {"layers": 2, "ffn": 64}, {"n_layer": 2, "n_inner": 64}),
        ("gpt3_175b", {"hidden": 96, "heads": 4}, {"n_embd": 96, "n_head": 4, "n_inner": 49152}),
        ("wan_14b", {"layers": 3}, {"num_layers": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_reshaping_is_reading_the_changed_config(name: str, sizes: dict[str, int], keys: dict[str, Any]) -> None:
    reshaped = reshape(find(name), **sizes)  # type: ignore[arg-type]  # the sizes are all ints
    read = spec_from_config({**config_of(name), **keys}, name)
    assert reshaped.layers == read.layers
    assert reshaped.params == read.params


@pytest.mark.parametrize(
    ("name", "sizes", "field"),
    [
        ("llama3_8b", {"experts": 4}, "experts"),
        ("llama3_8b", {"topk": 4}, "topk"),
        ("llama3_8b", {"layers": 0}, "layers"),
        ("llama3_8b", {"layers": -1}, "layers"),
        ("llama3_8b", {"layers": 10**9}, "layers"),
        ("llama3_8b", {"hidden": 1000}, "heads"),
        ("llama3_8b", {"heads": 12}, "kv_heads"),
        ("llama3_8b", {"vocab": True}, "vocab"),
        ("deepseek_v3", {"layers": 3}, "layers"),
        ("deepseek_v3", {"kv_heads": 8}, "kv_heads"),
        ("deepseek_v3", {"head_dim": 64}, "head_dim"),
        ("qwen3_30b_a3b", {"experts": 4}, "topk"),
        ("nemotronh_47b", {"layers": 99}, "layers"),
        ("qwen3_vl_8b", {"hidden": 1024}, "hidden"),
        ("wan_14b", {"hidden": 1024}, "hidden"),
        ("flux_12b", {"layers": 20}, "layers"),
        ("gpt3_175b", {"head_dim": 64}, "head_dim"),
    ],
)
def test_ambiguous_changes_are_errors(name: str, sizes: dict[str, int], field: str) -> None:
    with pytest.raises(InputError) as caught:
        reshape(find(name), **sizes)  # type: ignore[arg-type]  # one of them is wrong on purpose
    assert caught.value.field == field


def test_no_sizes_change_nothing() -> None:
    assert reshape(find("llama3_8b")) is find("llama3_8b")


def test_mtp_modules_take_the_new_sizes() -> None:
    small = reshape(find("deepseek_v3"), hidden=256, experts=16)
    assert small.mtp_layer is not None
    assert isinstance(small.mtp_layer.ffn, MoE)
    assert small.mtp_layer.ffn.experts == 16
    assert small.mtp_layer.norm_params == 512


def test_a_vision_language_model_keeps_its_encoder() -> None:
    spec = find("qwen3_vl_8b")
    small = reshape(spec, layers=2)
    assert small.vision == spec.vision
    assert small.num_layers == 2


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    layers=st.integers(4, 100),
    heads=st.integers(1, 8),
    dim=st.integers(1, 32),
    ffn=st.integers(1, 500),
    experts=st.integers(8, 30),
)
def test_reshaped_sizes_are_the_requested_ones(layers: int, heads: int, dim: int, ffn: int, experts: int) -> None:
    spec = reshape(find("deepseek_v3"), layers=layers, heads=heads, hidden=dim * 8, ffn=ffn, experts=experts)
    assert spec.num_layers == layers
    assert [isinstance(layer.ffn, Dense) for layer in spec.layers] == [True] * 3 + [False] * (layers - 3)
    assert all(isinstance(layer.mixer, MLA) and layer.mixer.heads == heads for layer in spec.layers)
    assert spec.layers[0].ffn == Dense(ffn)
    assert spec.moe is not None
    assert spec.moe.experts == experts
    dense = reshape(find("llama3_8b"), layers=layers, heads=heads, kv_heads=1, hidden=dim * heads)
    assert dense.groups[0].layer.mixer == Attention(heads, 1, dim)

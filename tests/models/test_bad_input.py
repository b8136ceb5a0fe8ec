"""Every invalid config raises an InputError that names the problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.models import ModelSpec, config_of, find, load_config, names, spec_from_config

LLAMA = config_of("llama3_8b")


def refused(**changes: Any) -> InputError:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    with pytest.raises(InputError) as caught:
        spec_from_config(config, "x")
    return caught.value


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_missing_key_is_named(key: str) -> None:
    error = refused(**{key: "absent"})
    assert error.field == key
    assert key in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [0, -1, 4096.0, "4096", True, None, [], {}, 10**15])
def test_a_nonsense_size_is_named_with_its_value(key: str, value: Any) -> None:
    error = refused(**{key: value})
    assert error.field == key
    assert key in str(error)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"num_key_value_heads": 5}, "num_key_value_heads", "not divisible"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33}, "num_attention_heads", "hidden_size=4096"),
        ({"attention_bias": "yes"}, "attention_bias", "true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
        ({"model_type": "foo"}, "model_type", "unknown architecture 'foo'"),
        ({"model_type": "absent"}, "model_type", "no model_type"),
        ({"model_type": 7}, "model_type", "unknown architecture"),
        ({"model_type": "t5"}, "model_type", "no decoder"),
        ({"num_experts": 8}, "num_experts", "another architecture"),
        ({"kv_lora_rank": 512}, "kv_lora_rank", "another architecture"),
        ({"block_configs": [{}]}, "block_configs", "another architecture"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types", "one type of layer"),
        ({"hidden_act": 3}, "hidden_act", "string"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], field: str, reason: str) -> None:
    error = refused(**changes)
    assert error.field == field
    assert reason in str(error)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("qwen3_30b_a3b", {"num_experts_per_tok": 200}, "num_experts_per_tok"),
        ("qwen3_30b_a3b", {"num_local_experts": 64}, "num_experts"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [48]}, "mlp_only_layers"),
        ("qwen3_30b_a3b", {"mlp_only_layers": "0"}, "mlp_only_layers"),
        ("gemma2_2b", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2_2b", {"layer_types": ["other"] * 26}, "layer_types"),
        ("nemotronh_8b", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern"),
        ("nemotronh_8b", {"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        ("nemotronh_8b", {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        ("nemotronh_8b", {"num_hidden_layers": 51}, "num_hidden_layers"),
        ("nemotronh_8b", {"attention_bias": True}, "attention_bias"),
        ("nemotronh_8b", {"n_groups": 7}, "n_groups"),
        ("qwen3_next_80b_a3b", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_vl_8b", {"vision_config": None}, "vision_config"),
        ("qwen3_vl_8b", {"text_config": None}, "text_config"),
        ("qwen3_vl_8b", {"text_config": [1]}, "text_config"),
        ("gpt3_175b", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt3_175b", {"n_head": 7}, "n_head"),
        ("wan_14b", {"patch_size": [1, 2]}, "patch_size"),
        ("wan_14b", {"image_dim": 1280}, "image_dim"),
        ("wan_14b", {"_class_name": "UNet2DModel"}, "_class_name"),
        ("deepseek_v3", {"moe_layer_freq": 0}, "moe_layer_freq"),
    ],
)
def test_keys_of_another_architecture_are_named(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        spec_from_config({**config_of(name), **changes}, "x")
    assert field in (caught.value.field or str(caught.value))


def test_a_nested_key_is_named_with_its_section() -> None:
    config = config_of("qwen3_vl_8b")
    config["vision_config"]["out_hidden_size"] = 1
    with pytest.raises(InputError, match=r"vision_config\.out_hidden_size=1: "):
        spec_from_config(config, "x")
    config = config_of("qwen3_vl_8b")
    config["text_config"]["model_type"] = "llama"
    with pytest.raises(InputError, match=r"text_config\.model_type=llama"):
        spec_from_config(config, "x")


def test_a_config_that_is_not_an_object_is_rejected() -> None:
    with pytest.raises(InputError):
        spec_from_config([], "x")  # type: ignore[arg-type]  # what a careless caller may pass


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        json.dumps(LLAMA).encode()[:-9],
        b"hello",
        b"\x00\x93\xff\xfe\x01",
        b"[1, 2]",
        b'"llama"',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "truncated", "words", "binary", "list", "string", "nested"],
)
def test_a_file_that_is_not_a_config_is_rejected(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    for path in (file, tmp_path):
        with pytest.raises(InputError) as caught:
            find(str(path))
        assert caught.value.exit_code == 2
        assert str(file) in str(caught.value)


def test_a_huge_file_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as out:
        out.truncate(6_000_000)
    with pytest.raises(InputError, match="6000000 bytes"):
        load_config(file)


@pytest.mark.parametrize("path", ["nothing/config.json", "nothing.json", "./nothing", "/nothing/at/all"])
def test_a_missing_file_is_rejected(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        find(path)


def test_a_folder_without_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder has no config\.json"):
        load_config(tmp_path)


ODD = st.sampled_from([0, -3, 1, 2, 7, 10**12, 1.5, float("nan"), "x", "", True, None, [], ["a"], [1], {}, {"a": 1}])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_corrupted_config_gives_a_spec_or_an_input_error(data: st.DataObject) -> None:
    config = config_of(data.draw(st.sampled_from(names())))
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from(sections))
        key = data.draw(st.sampled_from(sorted(section)) if section else st.just("model_type"))
        if data.draw(st.booleans()):
            section.pop(key, None)
        else:
            section[key] = data.draw(ODD)
    try:
        spec = spec_from_config(config, "spoilt")
    except InputError:
        return
    assert isinstance(spec, ModelSpec)
    assert spec.params.total > 0

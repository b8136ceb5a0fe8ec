"""Config files of own architectures that cannot be built: the field, the value, the reason and a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright import models
from meshwright.errors import InputError
from meshwright.models.readers.computed import ACTIVATIONS, OLD_TYPES, ROPE_TYPES, check_computed

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": LLAMA3,
    "tie_word_embeddings": True, "vocab_size": 64000,
}  # fmt: skip
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "act": ({"hidden_act": "swish2"}, ("hidden_act=swish2", "unknown activation", '"hidden_act": "swish"')),
    "act_typo": ({"hidden_act": "silo"}, ("hidden_act=silo", '"hidden_act": "silu"')),
    "rope": (
        {"rope_scaling": {"rope_type": "yarn2", "factor": 4.0}},
        ("rope_scaling.rope_type=yarn2", "unknown type of RoPE", '"rope_type": "yarn"', "longrope"),
    ),
    "rope2": (
        {"rope_scaling": {"type": "yarn", "factor": "4"}},
        ("rope_scaling.factor='4'", "must be a number", '"factor": 4'),
    ),
    "rope3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ("rope_scaling.low_freq_factor", "missing", "high_freq_factor"),
    ),
    "rope_parameters": (
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        ("rope_parameters.factor", "missing"),
    ),
    "rope_text": ({"rope_scaling": "yarn"}, ("rope_scaling='yarn'", "must be an object")),
    "rope_untyped": ({"rope_scaling": {"factor": 4.0}}, ("rope_scaling.rope_type", "the factor has no effect")),
    "rope_bands": (
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}},
        ("rope_scaling.high_freq_factor=0.5", "low_freq_factor=1.0"),
    ),
    "rope_zero": ({"rope_scaling": {**LLAMA3, "factor": 0}}, ("rope_scaling.factor=0", "greater than 0")),
    "hd": ({"head_dim": 63}, ("head_dim=63", "must be even", '"head_dim": 64')),
    "heads": (
        {"head_dim": None, "hidden_size": 2016},
        ("num_attention_heads=32", "heads of 63 channels", '"head_dim": 64'),
    ),
    "eps": ({"rms_norm_eps": "1e-5"}, ("rms_norm_eps='1e-5'", "must be a number")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_cannot_be_built_is_refused(meshwright: Any, name: str) -> None:
    """Check said ok, estimate that it fits, and train ended with a stack."""
    changes, expected = BAD[name]
    Path("bad.json").write_text(json.dumps({**CONFIG, **changes}))
    found = meshwright("check", "bad.json", "--gpus", "8xA100-80")
    assert found.code != 0
    for text in expected:
        assert text in found.err


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "bad.json", "--gpus", "8xA100-80"),
        ("recommend", "bad.json", "--gpus", "8xA100-80", "--goal", "pretrain"),
        ("models", "./bad.json"),
        ("train", "bad.json", "--tiny", "train.steps=2"),
    ],
)
def test_every_command_refuses_it(meshwright: Any, words: tuple[str, ...]) -> None:
    Path("bad.json").write_text(json.dumps({**CONFIG, "hidden_act": "swish2"}))
    found = meshwright(*words)
    assert found.code != 0
    assert "hidden_act=swish2" in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "dynamic", "factor": 2}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2] * 32}},
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"model_type": "gpt2", "head_dim": 63, "rope_theta": None, "rope_scaling": None},
    ],
)
def test_a_valid_value_is_accepted(changes: dict[str, Any]) -> None:
    check_computed({**CONFIG, **changes}, ("text_config",))


def test_the_sections_of_a_vision_language_config_are_checked() -> None:
    text = {**CONFIG, "hidden_act": "swish2"}
    with pytest.raises(InputError, match=r"text_config\.hidden_act=swish2"):
        check_computed({"model_type": "llava", "text_config": text}, ("text_config", "vision_config"))


def test_all_catalogue_and_kept_configs_are_accepted() -> None:
    kept = Path(__file__).parents[1] / "models"
    for file in ("decoders.json", "wrapped.json"):
        for case in json.loads((kept / file).read_text("utf-8")).values():
            check_computed(case["config"], ("text_config", "vision_config"))
    for name in models.names():
        check_computed(models.config_of(name), ("text_config", "vision_config"))


def test_the_names_are_those_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    assert sorted(ACTIVATIONS) == sorted(activations.ACT2FN)
    assert sorted({*ROPE_TYPES} - {"default"}) == sorted({*rope.ROPE_INIT_FUNCTIONS} - {"default"})
    assert {*OLD_TYPES.values()} <= {*ROPE_TYPES}


def test_a_version_that_no_model_has_is_not_found_in_sizes(meshwright: Any) -> None:
    """`models glm-5` listed GLM-4.5, because its name contains a 5, when there was no GLM-5."""
    found = meshwright("models", "glm-7")
    assert found.code != 0
    assert "unknown model glm-7" in found.err
    assert "config.json" in found.err
    assert "glm45_355b" in meshwright("models", "glm-4.5").out
    assert "llama31_8b" in meshwright("models", "llama 3").out


@pytest.mark.parametrize("verb", ["recommend", "size"])
def test_an_unknown_model_is_reported_before_a_missing_goal(meshwright: Any, verb: str) -> None:
    found = meshwright(verb, "llama9", "--gpus", "64xH100")
    assert found.code != 0
    assert "model=llama9: unknown model llama9" in found.err
    assert "give its config.json" in found.err
    known = meshwright(verb, "llama3-8b", "--gpus", "64xH100")
    assert "--goal required" in known.err


@pytest.mark.parametrize("key", ["tie_word_embeddings", "model.tie_word_embeddings"])
def test_a_key_of_config_json_is_named_as_one(meshwright: Any, key: str) -> None:
    Path("mine.json").write_text(json.dumps(CONFIG))
    found = meshwright("estimate", "mine.json", "--gpus", "8xA100-80", f"{key}=false")
    assert found.code != 0
    assert "tie_word_embeddings is a key of the model's config.json: change it there" in found.err


def test_a_missing_key_is_named_in_all_its_spellings(meshwright: Any) -> None:
    config = {**CONFIG, "model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    Path("mine.json").write_text(json.dumps(config))
    found = meshwright("check", "mine.json", "--gpus", "8xA100-80")
    assert "missing the key 'num_local_experts' (or 'num_experts')" in found.err


def test_a_json_list_of_numbers_is_not_a_dataset(meshwright: Any) -> None:
    Path("list.json").write_text("[1,2]")
    found = meshwright("check", "list.json", "--gpus", "8xA100-80")
    assert found.code != 0
    assert "dataset" not in found.err
    assert "must be a table of keys at the top level, not a list" in found.err

"""Further decoder types: parameter counts that transformers 5.17 builds, and refusals of what changes shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.each import each

from meshwright.errors import InputError
from meshwright.models import LinearMixer, spec_from_config

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("decoders.json").read_text("utf-8"))


@each("name", CASES)
def test_the_count_is_the_one_that_transformers_builds(name: str) -> None:
    case = CASES[name]
    params = spec_from_config(case["config"], name).params
    assert [params.total, params.routed] == case["params"]


@each("name", CASES)
def test_a_shape_key_of_another_architecture_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="block_configs"):
        spec_from_config({**CASES[name]["config"], "block_configs": [1]}, name)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama4_text", "no_rope_layers", -1),
        ("gpt_neo", "attention_layers", -1),
        ("jamba", "attn_layer_period", 0),
        ("bamba", "attn_layer_indices", [99]),
        ("mamba", "time_step_rank", [8]),
        ("lfm2", "block_ffn_dim_multiplier", "1"),
        ("exaone4", "sliding_window_pattern", "GLLL"),
        ("glm_moe_dsa", "indexer_types", ["full"]),
        ("granitemoehybrid", "layer_types", -1),
        ("laguna", "num_attention_heads_per_layer", [8]),
        ("hunyuan_v1_moe", "moe_topk", [1, 2]),
        ("cohere", "num_attention_heads", 0),
    ],
)
def test_a_value_that_contradicts_the_architecture_names_its_key(name: str, key: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        spec_from_config({**CASES[name]["config"], key: value}, name)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value"), [("minimax_m2", "use_qk_norm", True), ("glm_moe_dsa", "moe_layer_freq", 1)]
)
def test_a_key_that_says_what_the_architecture_has_anyway_is_read(name: str, key: str, value: Any) -> None:
    params = spec_from_config({**CASES[name]["config"], key: value}, name).params
    assert params.total == CASES[name]["params"][0]


def test_an_error_names_the_key_as_the_file_spells_it() -> None:
    with pytest.raises(InputError) as caught:
        spec_from_config({**CASES["gptj"]["config"], "n_embd": "wide"}, "gptj")
    assert caught.value.field == "n_embd"


def test_a_scan_counts_as_a_hybrid_whose_width_follows_from_the_file() -> None:
    from meshwright.models import reshape

    spec = spec_from_config(CASES["jamba"]["config"], "jamba")
    assert spec.mixers(LinearMixer)
    with pytest.raises(InputError, match="hidden"):
        reshape(spec, hidden=256)

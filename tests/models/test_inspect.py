"""`meshwright inspect`: what a model is made of, what it costs per token, how it can be split and who trains it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli.conftest import Answer, meshwright  # noqa: F401  # a fixture
from tests.each import each

import meshwright as mw
from meshwright.costs import flops_per_token
from meshwright.errors import InputError
from meshwright.json_text import decode_float
from meshwright.models import ModelSpec, config_of, find, inspection, names, parts, spec_from_config

Call = Callable[..., Answer]


@each("name", names())
def test_the_parts_add_up_to_the_model(name: str) -> None:
    model = find(name)
    assert sum(parts.parameters_by_part(model).values()) == model.params.total
    assert sum(times * len(groups) for times, groups in parts.layer_runs(model)) == model.num_layers


def test_a_dense_model_is_one_run_of_equal_layers(meshwright: Call) -> None:  # noqa: F811
    answer = meshwright("inspect", "llama3-8b", "--json").json
    assert answer["picture"] == ["32 × [full attention, dense MLP]"]
    assert answer["way"] == "table"
    assert answer["parameters"]["total"] == 8_030_261_248
    assert answer["cache_bytes"]["per_token"] == 2 * 2 * 32 * 8 * 128  # bf16, key and value, layers, heads, width
    assert all(one["trains"] for one in answer["trainers"])
    largest = {one["axis"]: one for one in answer["splits"] if one["engine"] == "meshwright"}
    assert (largest["tp"]["largest"], largest["pp"]["largest"], largest["ep"]["largest"]) == (32, 32, 1)
    assert "not divisible by tp=64" in largest["tp"]["limit"]


def test_layers_of_several_kinds_are_shown_in_their_order(meshwright: Call) -> None:  # noqa: F811
    shown = meshwright("inspect", "gemma3-27b", "--seq", "128k").out
    assert "10 × (5 × [sliding attention, dense MLP] [full attention, dense MLP])" in shown
    assert "window 1,024" in shown
    assert "131,072 tokens" in shown
    experts = meshwright("inspect", "deepseek-v3").out
    assert "3 × [latent attention, dense MLP]" in experts
    assert "58 × [latent attention, experts]" in experts
    assert "256 experts of 2,048, top 8" in experts
    assert "expert (ep) up to 256" in experts
    assert "1 × multi-token prediction" in experts


def test_flops_are_those_of_the_cost_model_at_this_length() -> None:
    short, long = mw.inspect("qwen3-30b-a3b", seq=1024), mw.inspect("qwen3-30b-a3b", seq="32k")
    assert long.flops.training > short.flops.training
    assert long.flops.training == 3 * long.flops.forward
    plan = mw.estimate("qwen3_30b_a3b_pretrain_config", "16xH100", overrides=["data.seq_length=32768"])
    assert float(flops_per_token(plan.case)) == long.flops.training


def test_the_cache_of_windows_and_states_does_not_grow() -> None:
    delta = mw.inspect("qwen3-next-80b-a3b", seq=4096).cache
    assert delta.state > 0
    assert delta.at_length == 4096 * delta.per_token + delta.windows + delta.state
    full = mw.inspect("gemma3-27b", seq=512).cache
    wide = mw.inspect("gemma3-27b", seq=4096).cache
    assert full.windows == 0 < wide.windows
    assert wide.per_token < full.per_token


def test_a_config_says_which_defaults_were_taken(tmp_path: Path, meshwright: Call) -> None:  # noqa: F811
    config = config_of("llama3_8b")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "max_position_embeddings"}))
    answer = meshwright("inspect", str(file), "--json").json
    assert any("max_position_embeddings=" in one for one in answer["assumed"])
    assert answer["model"]["source"] == str(file)


def test_who_cannot_train_it_says_why(meshwright: Call, tmp_path: Path) -> None:  # noqa: F811
    cases = json.loads(Path(__file__).with_name("decoders.json").read_text("utf-8"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(cases["jamba"]["config"]))
    answer = meshwright("inspect", str(file), "--json").json
    no = {one["name"]: one["why"] for one in answer["trainers"] if not one["trains"]}
    assert no
    assert all(no.values())
    assert any("Mamba" in one for one in answer["picture"])


def test_a_plot_of_the_layers_is_written(meshwright: Call, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    file = tmp_path / "model.svg"
    assert meshwright("inspect", "gemma3-27b", "--plot", str(file)).code == 0
    assert "<svg" in file.read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("no-such-model",), "model"),
        (("llama3-8b", "--seq", "0"), "seq"),
        (("llama3-8b", "--seq", "-1"), "seq"),
        (("llama3-8b", "--plot", "x.pdf"), "plot"),
        (("missing/config.json",), "model"),
        ((), "model"),
    ],
)
def test_bad_input_is_one_error(meshwright: Call, words: tuple[str, ...], field: str) -> None:  # noqa: F811
    answer = meshwright("inspect", *words)
    assert answer.code == 2
    assert field in answer.err.lower()
    assert "Traceback" not in answer.err


def test_the_python_verb_prints_a_summary() -> None:
    found: Any = mw.inspect("mixtral-8x7b")
    assert "32 × [full attention, experts]" in str(found)
    with pytest.raises(InputError):
        mw.inspect("mixtral-8x7b", seq="long")


RENAMED = ("llama4_text", "gpt_neo", "jamba", "mamba2", "kimi_linear", "glm_moe_dsa", "minimax", "lfm2", "diffllama",
           "dbrx")  # fmt: skip


@pytest.mark.parametrize("name", RENAMED)
def test_a_type_that_the_tables_do_not_know_has_the_same_counts_and_flops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from meshwright.costs import layer_flops
    from meshwright.engine.architecture import describe

    def flops(spec: ModelSpec, seq: int) -> float:
        pairs = ((layer_flops(group.layer, spec, seq, "causal"), group.count) for group in spec.groups)
        return 2.0 * spec.hidden * spec.vocab + sum(count * (matmul + float(core)) for (matmul, core), count in pairs)

    config = json.loads(Path(__file__).with_name("decoders.json").read_text("utf-8"))[name]["config"]
    monkeypatch.setattr(inspection, "_described", lambda text: describe(json.loads(text, object_hook=decode_float)))
    read, found = spec_from_config(config, name), inspection.inspected_spec(config, name)
    assert (found.params.total, found.params.active) == (read.params.total, read.params.active)
    for seq in (512, 32768):
        assert flops(found, seq) == pytest.approx(flops(read, seq), rel=0.01)


@pytest.mark.parametrize(("name", "picture"), [("jetmoe", "full attention, experts"), ("longcat_flash", "latent")])
def test_experts_of_several_kinds_are_counted(name: str, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from meshwright.engine.architecture import describe

    config = json.loads(transformers.AutoConfig.for_model(name).to_json_string(use_diff=False))
    monkeypatch.setattr(inspection, "_described", lambda text: describe(json.loads(text, object_hook=decode_float)))
    found = inspection.inspected_spec(config, name)
    assert picture in parts.kind_of_layer(found.groups[0].layer)
    assert found.params.active < 0.3 * found.params.total


def _all_configs() -> dict[str, dict[str, Any]]:
    """One config of every type that a reader knows."""
    here = Path(__file__)
    found = {name: case["config"] for file in ("decoders.json", "wrapped.json")
             for name, case in json.loads(here.with_name(file).read_text("utf-8")).items()}  # fmt: skip
    for name in names():
        config = config_of(name)
        found.setdefault(str(config.get("model_type") or config["_class_name"]), config)
    return found


CONFIGS = _all_configs()
ODD = st.sampled_from(
    [0, -1, 1, 7, 10_001, 10**9, 10**30, 1.5, float("nan"), float("inf"), "x", "", "8", True, False, None, [], [-1],
     ["a"], [1.5], [[]] * 6, [{}] * 6, [None] * 6, ["full_attention"] * 6, [10**9] * 6, {}, {"a": {"b": []}},
     {"rope_type": {}}, {"factor": "x"}]
)  # fmt: skip
FURTHER = ("layer_types", "rope_scaling", "quantization_config", "num_experts", "architectures", "text_config")


@settings(max_examples=300, deadline=10_000, derandomize=True)
@given(data=st.data())
def test_any_value_of_any_key_gives_a_model_or_one_error_with_its_field(data: st.DataObject) -> None:
    config = copy.deepcopy(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    section = data.draw(st.sampled_from(sections))
    kept = [key for key in section if key not in ("model_type", "_class_name")]
    section[data.draw(st.sampled_from([*sorted(kept), *FURTHER]))] = data.draw(ODD)
    with patch.object(inspection, "_described", side_effect=InputError("not built here", "model_type")):
        try:
            spec = spec_from_config(config, "odd")
        except InputError as error:
            found: str | ModelSpec = error.field
        else:
            found = spec
    assert found if isinstance(found, str) else sum(parts.parameters_by_part(found).values()) == found.params.total > 0


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("llama", "num_hidden_layers", 10_001, "num_hidden_layers=10001"),
        ("llama", "hidden_size", 0, "hidden_size=0"),
        ("llama", "vocab_size", float("nan"), "vocab_size=nan"),
        ("qwen3_moe", "num_experts_per_tok", -8, "num_experts_per_tok=-8"),
        ("mimo_v2_flash", "layer_types", -1, "layer_types=-1"),
        ("laguna", "num_attention_heads_per_layer", [[]] * 6, "num_attention_heads_per_layer"),
        ("gemma3n_text", "intermediate_size", [{}] * 6, "intermediate_size"),
        ("llama4_text", "no_rope_layers", [[]] * 6, "no_rope_layers"),
        ("llama", "rope_scaling", [1, 2], "rope_scaling"),
        ("llama", "num_attention_heads", 33, "num_attention_heads=33"),
    ],
)
def test_a_bad_config_file_is_one_error_with_field_and_value(
    name: str, key: str, value: Any, said: str, tmp_path: Path, meshwright: Call  # noqa: F811
) -> None:  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIGS[name], key: value}))
    answer = meshwright("inspect", str(file))
    assert answer.code == 2
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_ten_thousand_layers_are_inspected_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIGS["llama"], "num_hidden_layers": 10_000}))
    found = mw.inspect(str(file))
    assert [run.times for run in found.runs] == [10_000]


def test_a_flat_step_file_is_read_and_equal_rope_factors_are_allowed() -> None:
    step = {"model_type": "step3p7", "num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 700, "intermediate_size": 320,
            "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
            "moe_intermediate_size": 96, "share_expert_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
            "attention_other_setting": {"num_attention_heads": 4}}  # fmt: skip
    assert spec_from_config(step, "step").params.total == 1_875_968  # of transformers' Step3p7ForConditionalGeneration
    rope = {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    assert spec_from_config({**CONFIGS["llama4_text"], "rope_scaling": rope}, "scout").num_layers

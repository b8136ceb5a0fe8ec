"""`meshwright inspect`: what a model is made of, what it costs per token, how it can be split and who trains it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Answer, meshwright  # noqa: F401  # a fixture
from tests.each import each

import meshwright as mw
from meshwright.costs import flops_per_token
from meshwright.errors import InputError
from meshwright.models import config_of, decode_float, find, names, parts

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


RENAMED = ("llama4_text", "gpt_neo", "jamba", "mamba2", "kimi_linear", "glm_moe_dsa", "minimax", "lfm2", "diffllama")


@pytest.mark.parametrize("name", RENAMED)
def test_a_type_that_the_tables_do_not_know_has_the_same_counts_and_flops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from meshwright.costs import layer_flops
    from meshwright.engine.architecture import describe
    from meshwright.models import ModelSpec, inspection, spec_from_config

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
    from meshwright.models import inspection

    config = json.loads(transformers.AutoConfig.for_model(name).to_json_string(use_diff=False))
    monkeypatch.setattr(inspection, "_described", lambda text: describe(json.loads(text, object_hook=decode_float)))
    found = inspection.inspected_spec(config, name)
    assert picture in parts.kind_of_layer(found.groups[0].layer)
    assert found.params.active < 0.3 * found.params.total

"""An own architecture: plans and their trade-off, the same layout in every command, keys that are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as library
from meshwright.display import parameter_count
from meshwright.models import catalogue
from meshwright.models.reader import known_architectures, spec_from_config
from meshwright.models.readers.unread import collect_unread
from meshwright.notes import collected_notes

from .mistakes import call

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 9216, "max_position_embeddings": 40960,
    "mlp_only_layers": [0], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 64, "num_experts_per_tok": 6, "num_hidden_layers": 24, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
DENSE = {
    "architectures": ["LabFormerForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 6912, "num_attention_heads": 20, "num_key_value_heads": 5, "num_hidden_layers": 28,
    "vocab_size": 64000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(config: dict[str, Any], name: str = "own") -> str:
    Path(name).mkdir(exist_ok=True)
    Path(name, "config.json").write_text(json.dumps(config))
    return name


@pytest.mark.parametrize(
    ("config", "gpus"), [(MOE, "2x8xH100"), (DENSE, "2x8xH100"), (DENSE, "8xA100-80"), (MOE, "8xA100-80")]
)
def test_no_layout_of_the_trade_is_beaten_by_a_plan(config: dict[str, Any], gpus: str) -> None:
    answer = call("plan", written(config), "--gpus", gpus, "--goal", "pretrain", "--seq", "8k", "--top", "3").json
    plans = [(p["estimate"]["step_s"], p["estimate"]["memory_gib"]["total"]) for p in answer["plans"]]
    trade = [(c["step_s"], c["total_gib"]) for c in answer["pareto"]]
    beaten = [(c, p) for c in trade for p in plans if p[0] < 0.999 * c[0] and p[1] < 0.999 * c[1]]
    assert not beaten
    first = plans[0]
    assert any(c[0] <= 1.001 * first[0] and c[1] <= 1.001 * first[1] for c in trade)  # it, or one that beats it
    assert trade == sorted(trade, key=lambda c: (c[0], -c[1]))


@pytest.mark.parametrize("name", ["qwen3_30b_a3b_peft_config", "llama3_8b_peft_config"])
def test_sequence_parallelism_of_a_tiny_run_follows_tp(name: str) -> None:
    pytest.importorskip("torch")
    from meshwright.engine.model_families import family_of
    from meshwright.engine.tiny import tiny_recipe
    from meshwright.recipes import overrides
    from meshwright.recipes.index import load

    def layout(*typed: str) -> Any:
        recipe = load(name)
        pinned = overrides.requested(recipe, typed)
        recipe = overrides.apply(recipe, typed)
        return tiny_recipe(recipe, family_of(recipe).config_for(recipe), 2, pinned)[0].layout

    assert layout("layout.tp=2").sp
    assert not layout("layout.tp=2", "layout.sp=false").sp
    with collected_notes() as notes:
        assert not layout("layout.tp=1").sp
    assert "is for 2 data-parallel ranks; add it to a trial on other ranks" in " ".join(notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_key_value_heads": None, "num_key_value_head": 5},
            "num_key_value_head (did you mean num_key_value_heads?)",
        ),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window, use_sliding_window"),
        ({"qk_norm": True, "attention_gate": True}, "qk_norm, attention_gate"),
        ({"rope_thetta": 1e6, "rope_theta": None}, "rope_thetta (did you mean rope_theta?)"),
    ],
)
def test_keys_that_are_not_read_are_named(changes: dict[str, Any], said: str) -> None:
    config = {key: value for key, value in {**DENSE, **changes}.items() if value is not None}
    name = written(config, "-".join(changes))
    answer = call("inspect", f"{name}/config.json")
    assert answer.code == 0
    assert f"llama models have no {said}: all numbers are computed without th" in answer.err


def test_a_shared_expert_that_the_type_does_not_have_is_named() -> None:
    answer = call("recommend", written({**MOE, "shared_expert_intermediate_size": 1536}, "shared"), "--gpus", "8xH100")
    assert "qwen3_moe models have no shared_expert_intermediate_size" in answer.err + json.dumps(answer.json)
    off = call("inspect", written({**MOE, "shared_expert_intermediate_size": 0}, "off"))
    assert "not read" not in off.err


def test_published_files_have_no_unread_keys() -> None:
    for name in catalogue.names():
        with collect_unread() as unread:
            spec_from_config(catalogue.config_of(name), name)
        assert unread == [], name


def test_the_published_keys_of_a_second_rope_base_are_read() -> None:
    published = {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    with collect_unread() as unread:
        spec_from_config({**catalogue.config_of("gemma3_1b"), **published}, "gemma")
    assert unread == []


def test_files_that_transformers_writes_have_no_unread_keys() -> None:
    configurations = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    extra = {
        "temperature": 1.0, "top_k": 50, "no_repeat_ngram_size": 3, "max_window_layers": 28, "pretraining_tp": 1,
        "use_sliding_window": False, "sliding_window": 4096, "attn_implementation": "sdpa", "num_beams": 4,
        "_flash_attn_2_enabled": True, "model_max_length": 4096, "use_logn_attn": True, "return_dict": True,
    }  # fmt: skip
    for model_type in known_architectures():
        if model_type not in configurations:
            continue
        try:
            config = json.loads(json.dumps(configurations[model_type]().to_dict(), default=str))
        except Exception:  # a class without defaults for every key
            continue
        with collect_unread() as unread:
            try:
                spec_from_config({**extra, **config}, model_type)
            except library.InputError:
                continue
        assert unread == [], model_type


def test_torchtitan_says_why_it_has_no_flavor() -> None:
    answer = call("export", written(MOE), "--to", "torchtitan")
    assert "its qwen3 repeats one kind of layer, where this model has several (full attention, dense MLP" in answer.err


def test_a_dense_plan_does_not_mention_experts() -> None:
    hybrid = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28, "vocab_size": 151936,
        "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True,
    }  # fmt: skip
    typed = ("--gpus", "8xA100-80", "--goal", "pretrain")
    for command in (("recommend", written(hybrid)), ("recommend", "nemotronh-8b")):
        assert "shared_expert_overlap" not in json.dumps(call(*command, *typed).json["changes"])


def test_a_config_in_python_is_written_to_a_file_first() -> None:
    with pytest.raises(library.InputError, match="takes a name or a path, not the config itself") as found:
        library.inspect(MOE)  # type: ignore[arg-type]
    assert found.value.fix == ('json.dump(config, open("config.json", "w"))', 'model="config.json"')


def test_code_of_a_repository_is_never_run() -> None:
    own = {**DENSE, "model_type": "labformer", "auto_map": {"AutoConfig": "configuration_labformer.LabFormerConfig"}}
    assert "the code that auto_map names (trust_remote_code) is never run" in call("inspect", written(own)).err


def test_pareto_is_explained() -> None:
    assert call("explain", "pareto").json["meaning"] == call("explain", "trade").json["meaning"]


def test_the_last_norm_of_an_inspected_model_is_a_norm() -> None:
    pytest.importorskip("transformers")
    own = {**DENSE, "model_type": "labformer", "architectures": ["LlamaForCausalLM"]}
    parameters = call("inspect", written(own)).json["parameters"]
    assert (parameters["norms"], parameters["other"]) == (57 * 2560, 0)


def test_a_tiny_model_has_a_size() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}
    tiny = {**DENSE, **sizes, "num_attention_heads": 4, "num_key_value_heads": 4}
    answer = call("inspect", written({key: one for key, one in tiny.items() if key != "head_dim"}, "tiny"))
    assert "0.0 M" not in json.dumps(answer.json)
    assert [parameter_count(one) for one in (300, 37_412, 112_448, 12.3e6, 137e6, 8.03e9)] == [
        *("300", "37.41 k", "0.11 M", "12.30 M", "0.14 B", "8.03 B"),
    ]  # fmt: skip

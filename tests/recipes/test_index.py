"""Find recipes by name, words, model and similarity."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.errors import InputError
from meshwright.models import find
from meshwright.recipes import closest, entries, for_model, is_known, load, names, resolve, search
from meshwright.recipes.index import IndexEntry, architecture_class


@pytest.mark.parametrize(
    "alias", ["llama3_8b_sft_config", "llama3_8b_sft", "llama3-8b-sft", "Llama3 8B SFT", "LLAMA3_8B_SFT_CONFIG"]
)
def test_a_name_in_any_usual_form(alias: str) -> None:
    assert is_known(alias)
    assert load(alias).name == "llama3_8b_sft_config"


def test_names_with_capitals_and_odd_ends_are_found() -> None:
    assert resolve("wan-1-3b-pretrain") == "wan_1_3B_pretrain_config"
    assert resolve("deepseek_v3_pretrain_config_32nodes") == "deepseek_v3_pretrain_config_32nodes"


def test_a_near_miss_gets_did_you_mean() -> None:
    assert not is_known("lama3_8b_sft")
    with pytest.raises(InputError, match="did you mean llama3_8b_sft_config"):
        load("lama3_8b_sft")


def test_names_differ_even_without_case_and_suffix() -> None:
    assert len({name.lower().removesuffix("_config") for name in names()}) == len(names())


def test_search_prefers_exact_names_then_words_then_similarity() -> None:
    assert [entry.name for entry in search("llama3_8b_sft")] == ["llama3_8b_sft_config"]
    by_words = [entry.name for entry in search("llama3 70b 64k")]
    assert by_words == ["llama3_70b_64k_pretrain_config"]
    assert search("quen3 8b sft", benchmark=False)[0].name == "qwen3_8b_sft_config"
    assert search("llama3_8b", benchmark=False)[0].name.startswith("llama3_8b")
    assert search("no such thing at all zzz") == []


def test_search_filters() -> None:
    assert {entry.goal for entry in search(goal="peft")} == {"peft"}
    assert {entry.family for entry in search(family="Gemma")} == {"gemma"}
    assert {entry.family for entry in search(family="qwen")} == {"qwen", "qwen_moe", "qwen_vl"}
    with pytest.raises(InputError, match="did you mean gemma"):
        search(family="gema")
    assert all(entry.benchmark for entry in search("llama3", benchmark=True))
    assert all(entry.gpus <= 8 for entry in search(max_gpus=8))
    assert all(entry.seq_length >= 65536 for entry in search(seq=65536))
    assert len(search()) == len(entries())


def test_recipes_of_one_model() -> None:
    found = for_model("llama3_8b", "pretrain")
    assert [entry.seq_length for entry in found] == [8192, 16384, 65536, 131072]
    assert not for_model("llama3_8b", "pretrain")[0].benchmark
    assert for_model("gemma3_vl_4b", "pretrain") == []


def test_the_closest_recipe_of_a_model_that_has_one_is_its_own() -> None:
    for entry in entries():
        if not entry.benchmark and entry.family not in ("kempner", "sizes"):
            spec = find(entry.model)
            near = find(closest(spec, entry.goal, entry.seq_length).model)
            assert architecture_class(near) == architecture_class(spec)
            assert near.family == spec.family


@pytest.mark.parametrize(
    ("model", "goal", "family"),
    [
        ("llama32_1b", "pretrain", "sizes"),  # 1.3B is nearer than Llama 2 7B, head start and all
        ("llama32_3b", "sft", "qwen"),
        ("llama31_8b", "peft", "llama"),
        ("nemotron_3_ultra", "pretrain", "nemotron"),
    ],
)
def test_the_closest_recipe_has_the_same_architecture_type(model: str, goal: str, family: str) -> None:
    assert closest(find(model), goal).family == family  # type: ignore[arg-type]  # goals as plain strings


def test_the_closest_recipe_considers_the_sequence_length() -> None:
    spec = find("llama31_8b")
    assert closest(spec, "pretrain", 131072).name == "llama3_8b_128k_pretrain_config"
    assert closest(spec, "pretrain", 8192).name == "llama3_8b_pretrain_config"


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ("8xH100", lambda entry: (entry.gpus, entry.gpu) == (8, "H100")),
        ("4x8xH100", lambda entry: (entry.gpus, entry.gpu) == (32, "H100")),
        ("h200", lambda entry: entry.gpu == "H200"),
        ("qwen3 moe", lambda entry: "qwen3" in entry.name and find(entry.model).moe),
        ("vision", lambda entry: find(entry.model).kind == "vision_language"),
        ("lora", lambda entry: entry.goal == "peft"),
        ("gemma peft", lambda entry: entry.goal == "peft" and entry.family == "gemma"),
        ("128k", lambda entry: entry.seq_length == 131072),
        ("llama 64xH100 pretraining", lambda entry: entry.family == "llama" and entry.gpus == 64),
    ],
)
def test_words_match_more_than_the_name(query: str, matches: Callable[[IndexEntry], bool]) -> None:
    found = search(query, benchmark=False)
    assert found
    assert {e.name for e in found} == {e.name for e in entries(False) if matches(e)}


def test_name_matches_come_first() -> None:
    names_of = [entry.name for entry in search("qwen moe", benchmark=False)]
    assert "qwen3_30b_a3b_sft_config" in names_of
    found = search("moe", benchmark=False)
    named = ["moe" in entry.name for entry in found]
    assert named == sorted(named, reverse=True)
    assert any(named)


def test_a_gpu_without_recipes_is_not_a_typo() -> None:
    assert search("gb200", benchmark=False) == []
    assert search("8xGB300", benchmark=False) == []
    assert {entry.gpu for entry in search("gb200", benchmark=True)} == {"GB200"}
    assert search("_", benchmark=False) == search("...", benchmark=False) == []

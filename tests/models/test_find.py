"""Find models by name in any usual form or path; ambiguity and did-you-mean."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.each import each

from meshwright.errors import InputError
from meshwright.models import all_specs, catalogue, config_of, find, names

SPELLINGS = {
    "llama3-8b": "llama3_8b",
    "LLAMA3_8B": "llama3_8b",
    "llama 3 8b": "llama3_8b",
    "Llama-3-8B-Instruct": "llama3_8b",
    "meta-llama/Meta-Llama-3-8B": "llama3_8b",
    "meta-llama/Llama-3.1-8B": "llama31_8b",
    "Llama 3.1 405B": "llama31_405b",
    "llama-3.1-405b": "llama31_405b",
    "llama31_405b": "llama31_405b",
    "meta-llama/Llama-3.2-1B": "llama32_1b",
    "Llama-2-7b-hf": "llama2_7b",
    "llama 3.3 70b": "llama31_70b",
    "Qwen2.5-0.5B": "qwen25_500m",
    "qwen2.5 1.5b": "qwen25_1p5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen25_7b",
    "qwen2-0.5b": "qwen2_500m",
    "qwen3-0.6b": "qwen3_600m",
    "Qwen3 600M": "qwen3_600m",
    "qwen3_1.7b": "qwen3_1p7b",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "Qwen3 30B-A3B": "qwen3_30b_a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3_235b_a22b",
    "Qwen3-Next": "qwen3_next_80b_a3b",
    "Qwen3-Next 80B-A3B": "qwen3_next_80b_a3b",
    "Qwen3-VL 30B-A3B": "qwen3_vl_30b_a3b",
    "Qwen3.5-9B": "qwen35_9b",
    "qwen35_vl_800m": "qwen35_800m",
    "qwen35_vl_397b_a17b": "qwen35_397b_a17b",
    "Qwen3.5-35B-A3B-Base": "qwen35_35b_a3b",
    "qwen2.5-vl-7b": "qwen25_vl_7b",
    "deepseek v3": "deepseek_v3",
    "DeepSeek V3 (671B MoE)": "deepseek_v3",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek_v2_lite",
    "kimi-k2": "kimi_k2",
    "Kimi K2 (1T MoE)": "kimi_k2",
    "moonlight": "moonlight_16b",
    "GLM-4.5": "glm45_355b",
    "glm 4.5 air": "glm45_air_106b",
    "GLM-4.5V": "glm_45v",
    "gemma 2 9b": "gemma2_9b",
    "gemma-3-1b-it": "gemma3_1b",
    "gemma 3 27b": "gemma3_vl_27b",
    "NemotronH 56B": "nemotronh_56b",
    "Nemotron-H-8B-Base-8K": "nemotronh_8b",
    "Nemotron 3 Super": "nemotron_3_super",
    "nemotron 3.5 lightning": "nemotron_3_5_lightning",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "nemotron_nano_9b_v2",
    "gpt-oss-20b": "gpt_oss_20b",
    "GPT-OSS 120B": "gpt_oss_120b",
    "gpt3-175b": "gpt3_175b",
    "vanilla gpt": "vanilla_gpt",
    "megatron 1.3b": "megatron_1p3b",
    "Ministral 3 8B": "ministral3_8b",
    "olmoe": "olmoe_7b",
    "wan_1_3B": "wan_1_3b",
    "wan 1.3b": "wan_1_3b",
    "wan_14B": "wan_14b",
    "FLUX.1-dev": "flux_12b",
}


@each(("text", "name"), SPELLINGS.items())
def test_usual_names_find_the_model(text: str, name: str) -> None:
    assert find(text).name == name


@each("name", names())
def test_every_name_id_and_alias_finds_its_own_model(name: str) -> None:
    spec = find(name)
    for alias in (name, name.upper(), name.replace("_", "-"), spec.hf_id, *spec.aliases):
        if alias:
            other = catalogue.with_organization(alias)  # the hub id of other weights with this shape
            weights = other if "/" in other else spec.hf_id
            assert weights == alias or "/" not in alias
            assert find(alias) == msgspec.structs.replace(spec, hf_id=weights)


@pytest.mark.parametrize(
    "text", ["llama3", "llama", "qwen3", "Qwen", "gemma3", "nemotron 3", "deepseek", "ministral 3"]
)
def test_an_ambiguous_name_lists_the_matches(text: str) -> None:
    with pytest.raises(InputError, match="matches several models") as caught:
        find(text)
    assert len(caught.value.fix) > 1
    assert set(caught.value.fix) <= set(names())


def test_llama3_means_the_two_sizes_of_llama_3() -> None:
    with pytest.raises(InputError) as caught:
        find("llama3")
    assert list(caught.value.fix) == ["llama3_8b", "llama3_70b"]


@pytest.mark.parametrize(
    ("text", "near"),
    [("lama3-8b", "llama3_8b"), ("qwen3_30b_a3", "qwen3_30b_a3b"), ("deepsek_v3", "deepseek_v3"), ("llama 3 18b", "")],
)
def test_an_unknown_name_gets_did_you_mean(text: str, near: str) -> None:
    with pytest.raises(InputError, match="unknown model") as caught:
        find(text)
    assert caught.value.exit_code == 2
    assert near in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "()",
        "-",
        "🦙",
        "x" * 10_000,
        "\x00",
        "qwen3_3",
        "8b",
        "x" * 9_999 + ".json",
        "\x00.json",
        "~nobody/x",
    ],
)
def test_nonsense_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError):
        find(text)


def test_a_config_file_and_its_folder_are_models(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_8b")))
    (tmp_path / "other.json").write_text(json.dumps(config_of("qwen3_8b")))
    shipped = find("qwen3_8b")
    for path, name in ((folder, "my-model"), (folder / "config.json", "my-model"), (tmp_path / "other.json", "other")):
        spec = find(str(path))
        assert spec.name == name
        assert spec.groups == shipped.groups
        assert spec.params == shipped.params


def test_a_folder_named_without_separator_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps(config_of("llama3_8b")))
    assert find("mine").params.total == find("llama3_8b").params.total


def test_no_name_matches_two_models() -> None:
    meanings: dict[tuple[str, ...], set[str]] = {}
    for spec in all_specs():
        for alias in (spec.name, spec.hf_id, *spec.aliases):
            if alias:
                meanings.setdefault(catalogue._normalize(alias), set()).add(spec.name)
    assert {alias: found for alias, found in meanings.items() if len(found) > 1} == {}


def test_a_config_can_be_changed_without_changing_the_catalogue() -> None:
    config_of("llama3_8b")["hidden_size"] = 1
    assert config_of("llama3_8b")["hidden_size"] == 4096


def test_finding_a_model_is_quick_and_needs_no_heavy_library() -> None:
    program = (
        "import sys, time\n"
        "import meshwright.models as models\n"
        "began = time.process_time()\n"
        "models.find('Qwen3 30B-A3B')\n"
        "print(time.process_time() - began)\n"
        "print([name for name in ('torch', 'transformers', 'diffusers') if name in sys.modules])\n"
    )
    times = []
    for _ in range(3):  # the best of three: another process may take the core for a while
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds, heavy = ran.stdout.splitlines()
        times.append(float(seconds))
        assert heavy == "[]"
    assert min(times) < 0.02
    began = time.process_time()
    for name in SPELLINGS:
        find(name)
    assert (time.process_time() - began) / len(SPELLINGS) < 0.005


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("1.3b", "megatron_1p3b"),
        ("1p3B", "megatron_1p3b"),
        ("7B", "megatron_7b"),
        ("13b", "megatron_13b"),
        ("70B", "megatron_70b"),
        ("175B", "megatron_175b"),
    ],
)
def test_a_common_size_alone_is_a_model(text: str, name: str) -> None:
    assert find(text).name == name


@pytest.mark.parametrize(
    ("text", "some"), [("8B", "llama3_8b"), ("8 b", "qwen3_8b"), ("30b", "qwen3_30b_a3b"), ("600m", "qwen3_600m")]
)
def test_another_size_alone_lists_the_models_of_about_that_size(text: str, some: str) -> None:
    with pytest.raises(InputError, match="several models have about this size") as caught:
        find(text)
    assert some in caught.value.fix
    size = float(text.lower().rstrip("bm ")) * (1e6 if "m" in text else 1e9)
    assert all(abs(find(name).params.total / size - 1) <= 0.25 for name in caught.value.fix)


@pytest.mark.parametrize("text", ["9000b", "0b", "1m"])
def test_an_unknown_size_names_the_nearest_model(text: str) -> None:
    with pytest.raises(InputError, match="the nearest is"):
        find(text)


@pytest.mark.parametrize("text", ["NemotronNano v2", "nemotron nano v2"])
def test_a_name_with_a_size_left_out_in_the_middle_is_ambiguous(text: str) -> None:
    with pytest.raises(InputError, match="matches several models") as caught:
        find(text)
    assert {"nemotron_nano_9b_v2", "nemotron_nano_12b_v2", "nemotron_nano_v2_vl_12b"} == set(caught.value.fix)


@pytest.mark.parametrize("text", ["nope", "foo", "abc", "zzz"])
def test_a_few_letters_of_nonsense_suggest_nothing(text: str) -> None:
    with pytest.raises(InputError, match="unknown model") as caught:
        find(text)
    assert list(caught.value.fix) == []


@pytest.mark.parametrize("kind", ["vit", "t5", "whisper", "clip", "modernbert"])
def test_a_type_that_is_no_decoder_is_named_as_such(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 768}))
    with pytest.raises(InputError, match=f"model_type={kind}: no decoder: .* encoders") as caught:
        find(str(tmp_path))
    assert any("Trainer of transformers" in one for one in caught.value.fix)


def test_an_unknown_architecture_names_the_ways_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama3_8b") | {"model_type": "no_such_type"}))
    with pytest.raises(InputError, match=r"unknown architecture .* docs/models.md lists the known types") as caught:
        find(str(tmp_path))
    other_name, newer, as_known, as_a_row = caught.value.fix
    assert 'that class in "architectures"' in other_name
    assert "pip install -U transformers" in newer
    assert '"model_type": "llama", if it computes what llama does' in as_known
    assert "CONTRIBUTING.md, Add a model" in as_a_row
    assert str(tmp_path) in str(caught.value)


def test_a_wrong_value_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama3_8b") | {"hidden_size": -1}))
    with pytest.raises(InputError, match=r"config\.json") as caught:
        find(str(tmp_path / "config.json"))
    assert caught.value.field == "hidden_size"


@pytest.mark.parametrize("file", ["x.toml", "deep/x.yaml", "./x.yml", "recipe.json"])
def test_a_recipe_file_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.json").write_text('{"base": "llama3_8b_sft_config"}')
    with pytest.raises(InputError, match="is a recipe file") as caught:
        find(file)
    assert f"meshwright check {file}" in caught.value.fix

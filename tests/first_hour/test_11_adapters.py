"""Adapters as Hugging Face users type them: `peft.targets` takes peft's names; LoRA that does not fit offers QLoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine import folder_cases
from tests.engine.families import FAMILIES
from tests.engine.saved_folders import import_models

from meshwright.errors import InputError
from meshwright.recipes.adapter_targets import groups_of, is_target
from meshwright.recipes.types import Peft

TRAIN = ("--dataset", "mock", "--json", "train.steps=1", "train.global_batch_size=1", "data.seq_length=32")


def test_adapters_on_hugging_face_names_keep_them(meshwright: Any, tmp_path: Path) -> None:
    import_models("qwen3")
    folder = folder_cases.write(tmp_path / "in", "qwen3")
    words = ("train", "llama3_8b_peft_config", "--model", str(folder), "--out", str(tmp_path / "run"), *TRAIN)
    answer = meshwright(*words, "peft.targets=q_proj,v_proj", "peft.rank=4", "layout.tp=1")
    assert answer.code == 0, answer.out + answer.err
    written = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["q_proj", "v_proj"]
    names = folder_cases.tensors(tmp_path / "run" / "model")
    assert {name.split(".")[-3] for name in names} == {"q_proj", "v_proj"}
    elsewhere = [str(tmp_path / "other") if word == str(tmp_path / "run") else word for word in words]
    wrong = meshwright(*elsewhere, "peft.targets=c_attn", "peft.rank=4", "layout.tp=1")
    assert wrong.code == 2
    assert "q_proj" in wrong.json["error"]["message"]
    assert "o_proj" in wrong.json["error"]["message"]


def test_an_unknown_name_lists_the_valid_ones(meshwright: Any) -> None:
    answer = meshwright("estimate", "llama3_8b_peft_config", "--gpus", "8xH100", "--json", "peft.targets=q_prj")
    assert answer.code == 2
    error = answer.json["error"]
    assert error["field"] == "peft.targets"
    assert "all-linear" in error["message"]
    assert error["fix"][0] == "peft.targets=q_proj"
    broken = meshwright("estimate", "llama3_8b_peft_config", "--gpus", "8xH100", "--json", "peft.targets=(q_proj")
    assert broken.code == 2
    assert "regular expression" in broken.json["error"]["message"]


@pytest.mark.parametrize(
    ("targets", "groups"),
    [
        (("q_proj", "v_proj"), ("qkv",)),
        (("o_proj", "qkv"), ("qkv", "proj")),
        (("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2")),
        (("w1", "w2", "w3"), ("fc1", "fc2")),
        (("c_attn", "c_proj"), ("qkv", "proj", "fc2")),
        ((r".*\.self_attn\.(q|k)_proj",), ("qkv",)),
        ((r".*_proj",), ("qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out")),
        (("kv_a_proj_with_mqa",), ("qkv",)),
    ],
)
def test_names_belong_to_groups(targets: tuple[str, ...], groups: tuple[str, ...]) -> None:
    assert groups_of(Peft(targets=targets).targets) == groups


def test_names_match_the_end_of_a_path_and_patterns_all_of_it() -> None:
    path = "model.layers.3.self_attn.q_proj"
    assert is_target(path, ("q_proj",))
    assert is_target(path, ("self_attn.q_proj",))
    assert not is_target(path, ("proj",))
    assert not is_target(path, ("k_proj",))
    assert is_target(path, (r".*layers\.[0-3]\..*q_proj",))
    assert not is_target(path, (r"q_.*",))
    assert not is_target("lm_head", ("all-linear",))
    with pytest.raises(InputError):
        Peft(targets=("lm_haed",))


def test_all_linear_is_priced_as_every_group_of_the_model(meshwright: Any) -> None:
    def adapters(targets: str) -> float:
        words = ("estimate", "llama3_8b_peft_config", "--gpus", "8xH100", "--json", "layout.tp=1", targets)
        return float(meshwright(*words).json["estimate"]["memory_gib"]["optimizer"])

    assert adapters("peft.targets=all-linear") == adapters("peft.targets=qkv,proj,fc1,fc2")
    assert adapters("peft.targets=q_proj") < adapters("peft.targets=all-linear")


@pytest.mark.parametrize("verb", ["recommend", "plan"])
def test_lora_that_does_not_fit_offers_qlora_that_fits(verb: str, meshwright: Any) -> None:
    words = ("llama3-70b", "--gpus", "1xH100", "--goal", "peft", "--json")
    answer = meshwright(verb, *words)
    assert answer.code == 0  # with frozen weights in host memory
    plan = answer.json if verb == "recommend" else answer.json["plans"][0]
    offered = next(s for s in plan["suggestions"] if s["title"] == "QLoRA")
    assert "peft.method=qlora" in offered["overrides"]
    tried = meshwright("recommend", *words, *offered["overrides"])
    assert tried.code == 0, tried.out
    total = tried.json["estimate"]["memory_gib"]["total"]
    assert f"{total:.1f} of" in offered["why"]


def test_estimate_names_a_fix_that_fits_and_qlora_as_an_option(meshwright: Any) -> None:
    words = ("estimate", "llama3_70b_peft_config", "--gpus", "1xH200", "layout.tp=1", "layout.sp=false", "--json")
    answer = meshwright(*words).json
    finding = next(f for f in answer["findings"] if f["rule"] == "memory.peak")
    assert "layout.offload=optimizer" in finding["fix"]  # the trained weights stay the same
    assert meshwright(*words, *finding["fix"]).json["estimate"]["fits"]
    four_bit = next(one for one in answer["options"] if one["title"] == "QLoRA")
    assert four_bit["kind"] == "contract"
    assert meshwright(*words, *four_bit["overrides"]).json["estimate"]["fits"]


def test_where_qlora_does_not_help_it_says_so(meshwright: Any) -> None:
    words = ("recommend", "llama3-70b", "--goal", "peft", "--json", "--gpus")
    small = next(s for s in meshwright(*words, "1xRTX3060").json["suggestions"] if s["title"] == "QLoRA")
    assert small["overrides"] == []
    assert "do not fit either" in small["why"]
    other = meshwright(*words, "1xH100", "--engine", "megatron").json["suggestions"]
    assert "does not support method=qlora" in next(s for s in other if s["title"] == "QLoRA")["why"]
    assert "QLoRA:" in meshwright(*(w for w in words if w != "--json"), "1xRTX3060").out


def test_the_adviser_says_that_a_folder_is_quantized(meshwright: Any, tmp_path: Path) -> None:
    def ask(method: str, *more: str) -> Any:
        settings = {**FAMILIES["llama"], "quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return meshwright("recommend", str(tmp_path), "--gpus", "1xH100", "--goal", "sft", *more)

    assert "fp8: they are read as bf16" in ask("fp8").out
    assert "fp8" in ask("fp8", "--json").json["notes"][0]
    refused = ask("gptq", "--json")
    assert refused.code == 1
    assert "weights.quantized" in [f["rule"] for f in refused.json["findings"]]

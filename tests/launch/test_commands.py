"""Launch commands: entry point, dataset and overrides reproduce the plan."""

from __future__ import annotations

import shlex

import pytest

from meshwright import check, recipe, recommend
from meshwright.api import export
from meshwright.frameworks.megatron_bridge.plans import _published_kernels
from meshwright.launch import commands_of, left_out
from meshwright.launch.plan_commands import CONFIGS


def overrides_in(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(text) if "=" in word and not word.startswith("--"))


@pytest.mark.parametrize(
    ("model", "gpus", "goal", "seq"),
    [
        ("llama3-8b", "8xH100", "sft", None),
        ("llama3-70b", "64xH100", "pretrain", None),
        ("qwen3-30b-a3b", "4x8xH100", "pretrain", 32768),
        ("deepseek-v3", "1024xH100", "pretrain", None),
        ("gemma3-vl-12b", "8xH200", "peft", None),
    ],
)
def test_our_command_rebuilds_the_plan(model: str, gpus: str, goal: str, seq: int | None) -> None:
    plan = recommend(model, gpus, goal, seq=seq)
    words = shlex.split(commands_of(plan)["meshwright"])
    name = words[words.index("train") + 1]
    overrides = [w for w in words[words.index("train") :] if "=" in w and not w.startswith("--")]
    rebuilt = recipe(name, overrides)
    for section in ("data", "train", "layout", "kernels", "optimizer", "precision"):
        assert getattr(rebuilt, section) == getattr(plan.recipe, section)


def test_several_nodes_use_torchrun() -> None:
    text = commands_of(recommend("llama3-70b", "8x8xH100", "pretrain"))["meshwright"]
    assert text.startswith("torchrun --nproc-per-node=8 --nnodes=8")


def test_bridge_sets_the_sequence_length_that_takes_effect() -> None:
    text = commands_of(recommend("llama3-8b", "32xH100", "pretrain", seq=32768, engine="megatron"))["megatron-bridge"]
    assert overrides_in(text)["dataset.seq_length"] == "32768"
    assert "model.seq_length" not in overrides_in(text)


def bridge(model: str, gpus: str, goal: str) -> str:
    return commands_of(recommend(model, gpus, goal, engine="megatron"))["megatron-bridge"]


def test_bridge_needs_a_converted_checkpoint_for_fine_tuning() -> None:
    assert "checkpoint.pretrained_checkpoint" in overrides_in(bridge("llama3-8b", "8xH100", "sft"))
    assert "checkpoint.pretrained_checkpoint" not in overrides_in(bridge("llama3-8b", "8xH100", "pretrain"))


@pytest.mark.parametrize("goal", ["pretrain", "sft", "peft"])
@pytest.mark.parametrize(
    ("model", "gpus"), [("llama3-8b", "8xH100"), ("qwen3-30b-a3b", "16xH100"), ("qwen3-8b", "64xA100-40")]
)
def test_a_printed_bridge_command_passes_the_megatron_rules(model: str, gpus: str, goal: str) -> None:
    plan = recommend(model, gpus, goal)
    if "megatron-bridge" in commands_of(plan):
        assert check(_published_kernels(plan), gpus=gpus, engine="megatron").ok
    else:
        assert left_out(plan)["megatron-bridge"]


def test_a_plan_that_does_not_fit_has_no_command() -> None:
    plan = recommend("llama3.1-405b", "8xH100", "pretrain")
    assert not plan.ok
    assert commands_of(plan) == {}


@pytest.mark.parametrize(("model", "goal"), [("qwen2.5-3b", "sft"), ("qwen2-14b", "pretrain"), ("llama3.2-1b", "sft")])
def test_bridge_has_no_command_for_what_it_has_no_recipe_for(model: str, goal: str) -> None:
    assert "megatron-bridge" not in commands_of(recommend(model, "8xH100", goal))


def test_bridge_overrides_contain_the_layout() -> None:
    plan = recommend(
        "llama3-70b", "64xH100", "pretrain", overrides=["layout.tp=4", "layout.pp=4", "layout.cp=2"], engine="megatron"
    )
    values = overrides_in(commands_of(plan)["megatron-bridge"])
    assert values["model.tensor_model_parallel_size"] == "4"
    assert values["model.context_parallel_size"] == "2"


@pytest.mark.parametrize(("engine", "framework"), list(CONFIGS.items()))
def test_a_plan_for_another_engine_has_an_export_command(engine: str, framework: str) -> None:
    plan = recommend("llama3_8b", "8xH100", "pretrain", engine=engine)
    if not plan.ok:
        pytest.skip("no layout fits there")
    words = shlex.split(commands_of(plan)[framework])
    assert words[:2] == ["meshwright", "export"]
    exported = export(words[2], framework, gpus=words[6], overrides=words[9:])
    assert exported.checked.ok
    assert exported.checked.recipe.layout == plan.recipe.layout
    assert exported.written.files

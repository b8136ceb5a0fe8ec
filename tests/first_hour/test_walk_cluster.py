"""What an engineer who plans a training for a SLURM cluster types in the first hour."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright import check, recommend
from meshwright.api import export
from meshwright.launch import commands_of, left_out
from meshwright.parsing import price_per_hour
from meshwright.planner.scaling import divisible_batches

DENSE = ("recommend", "llama2-13b", "--goal", "pretrain", "--gpus")


def test_a_plan_for_megatron_prints_only_commands_that_start(meshwright: Any) -> None:
    plan = meshwright(*DENSE, "12x8xH100", "--engine", "megatron-lm", "--json").json
    assert "meshwright" not in plan["commands"]
    assert "zero1" in plan["no_command"]["meshwright"]
    words = shlex.split(plan["commands"]["megatron-lm"])
    assert words[:5] == ["meshwright", "export", "llama2_7b_pretrain_config", "--model", "llama2_13b"]
    found = meshwright(*words[1 : words.index("--out")], *words[words.index("--out") + 2 :], "--json")
    assert found.code == 0
    assert found.json["ok"]
    assert "--pipeline-model-parallel-layout" in found.json["command"]


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "automodel", "deepspeed"])
def test_the_engine_asked_for_has_a_command_or_a_reason(engine: str) -> None:
    plan = recommend("llama2-13b", "64xH100", "pretrain", engine=engine)
    framework = "megatron-lm" if engine == "megatron" else engine
    commands, reasons = commands_of(plan), left_out(plan)
    assert (framework in commands) != (framework in reasons)
    assert ("meshwright" in commands) == check(plan.recipe, gpus="64xH100").ok


def test_the_reason_is_shown_under_run(meshwright: Any) -> None:
    shown = meshwright(*DENSE, "64xH100", "--engine", "torchtitan").out
    assert "Run      not meshwright: " in shown
    assert "not torchtitan: torchtitan has no model of this shape" in shown


def test_export_takes_another_model(meshwright: Any) -> None:
    written, checked = export("llama2_7b_pretrain_config", "megatron-lm", gpus="8xH100", model="llama2-13b")
    assert checked.recipe.model == "llama2_13b"
    assert "--num-layers 40" in next(iter(written.files.values()))
    twice = meshwright("export", "llama2-13b", "--goal", "pretrain", "--model", "llama2-7b", "--to", "megatron-lm")
    assert twice.code == 2
    assert "the target is a model itself" in twice.err


def test_a_job_of_another_framework_takes_another_model(meshwright: Any, tmp_path: Path) -> None:
    words = ("launch", "llama2_7b_pretrain_config", "--model", "llama2-13b", "--to", "megatron-lm")
    ended = meshwright(*words, "--scheduler", "slurm", "--gpus", "8x8xH100", "--write", str(tmp_path))
    assert ended.code == 0
    (job,) = tmp_path.glob("*.sbatch")
    assert "--num-layers 40 --hidden-size 5120" in job.read_text()


def test_a_budget_says_which_steps_train_it(meshwright: Any) -> None:
    words = (*DENSE, "12x8xH100", "--tokens", "250B", "--json")
    (note,) = meshwright(*words).json["budget"]["notes"]
    assert note == "the recipe trains for 1,168,251 steps: add train.steps=119210 to train these tokens"
    assert meshwright(*words, "train.steps=119210").json["budget"]["notes"] == []


def test_a_budget_below_one_step_names_the_unit(meshwright: Any) -> None:
    (note,) = meshwright(*DENSE, "8xH100", "--tokens", "250", "--json").json["budget"]["notes"]
    assert "less than one step" in note
    assert "250B" in note


@pytest.mark.parametrize(
    ("batch", "world", "near"),
    [
        (1024, 90, [990, 1080]),
        (512, 60, [480, 540]),
        (512, 96, [480, 576]),
        (512, 64, []),
        (512, 1024, []),
        (8, 90, []),
    ],
)
def test_batches_near_the_recipe_s(batch: int, world: int, near: list[int]) -> None:
    assert divisible_batches(batch, world) == near


@pytest.mark.parametrize(("model", "gpus"), [("qwen3-30b-a3b", "90xH100"), ("llama2-13b", "60xH100")])
def test_odd_counts_get_a_batch_that_divides(model: str, gpus: str) -> None:
    plan = recommend(model, gpus, "pretrain")
    (found,) = [one for one in plan.suggestions if one.title == "fit the batch to the GPUs"]
    other = recommend(model, gpus, "pretrain", overrides=list(found.overrides))
    assert other.ok
    gain = 1 - float(plan.estimate.tokens_per_s_per_gpu) / float(other.estimate.tokens_per_s_per_gpu)
    assert f"estimated {gain:.0%} less time per token" in found.why


def test_even_counts_do_not() -> None:
    titles = [one.title for one in recommend("llama2-13b", "64xH100", "pretrain").suggestions]
    assert "fit the batch to the GPUs" not in titles


def test_a_bubble_that_a_v_schedule_removes_has_that_fix() -> None:
    plan = recommend("qwen3-30b-a3b", "12x8xH100", "pretrain")
    (found,) = [one for one in plan.findings if one.rule == "schedule.no-interleaving"]
    assert found.fix == ("layout.vp=2", "layout.pp_schedule=zbv")
    assert recommend("qwen3-30b-a3b", "12x8xH100", "pretrain", overrides=list(found.fix)).ok


def test_a_fix_that_is_slower_is_named_as_such(meshwright: Any) -> None:
    shown = meshwright("recommend", "llama3-70b", "--gpus", "8x8xH100", "--goal", "pretrain").out
    assert "resolves it, but is not faster here" in shown
    assert "no setting resolves it" not in shown


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (("recommend", "--gpus", "12", "nodes", "of", "8", "H100"), "--gpus '12 nodes of 8 H100'"),
        (("plan", "--gpus", "6", "x", "4", "L40S", "tp=2"), "--gpus '6 x 4 L40S'"),
        (("size", "--gpu", "4", "L40S"), "--gpu '4 L40S'"),
    ],
)
def test_a_cluster_without_quotes(meshwright: Any, typed: tuple[str, ...], fix: str) -> None:
    ended = meshwright(typed[0], "llama2-13b", *typed[1:], "--goal", "pretrain")
    assert ended.code == 2
    assert f"fix:   {fix}" in ended.err
    assert "quote a value with spaces" in ended.err


def test_a_default_that_is_asked_for_is_not_turned_off(meshwright: Any) -> None:
    ended = meshwright("launch", "llama3_8b_sft_config", "--scheduler", "slurm", "--requeue")
    assert ended.code == 2
    assert "it is the default, and --no-requeue turns it off" in ended.err
    assert "did you mean" not in ended.err


@pytest.mark.parametrize("typed", ["2.10 €/GPU-hour", "2.10 EUR per GPU-hour", "€2.10/GPU/h", "2.10EUR per hour"])
def test_prices_with_their_unit(typed: str) -> None:
    assert price_per_hour(typed) == (2.1, "EUR")


def test_a_decimal_comma_gets_its_own_number_as_the_fix(meshwright: Any) -> None:
    ended = meshwright(*DENSE, "8xH100", "--tokens", "1B", "--price", "€2,10")
    assert ended.code == 2
    assert "fix:   --price €2.10" in ended.err


@pytest.mark.parametrize(
    ("written", "refused"),
    [
        ('"100 Gb/s"', ""),
        ("12.5", ""),
        ("400", 'network_gb_s = "400 Gb/s" (that is 50 GB/s)'),
        ('"fast"', "GB/s per GPU: one 100"),
    ],
)
def test_the_unit_of_a_network(written: str, refused: str, meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(f'gpu = "H100"\nnodes = 12\ngpus_per_node = 8\nnetwork_gb_s = {written}\n')
    ended = meshwright(*DENSE, str(file))
    assert ended.code == (2 if refused else 0)
    assert refused in ended.err


def test_a_network_with_its_unit_is_the_same_network(meshwright: Any, tmp_path: Path) -> None:
    answers = []
    for written in ('"100 Gb/s"', '"0.1 Tbps"', "12.5"):
        file = tmp_path / "ours.toml"
        file.write_text(f'gpu = "H100"\nnodes = 12\ngpus_per_node = 8\nnetwork_gb_s = {written}\n')
        answers.append(meshwright(*DENSE, str(file), "--json").json["estimate"]["step_s"])
    assert len(set(answers)) == 1


def test_an_option_of_another_command_names_that_command(meshwright: Any) -> None:
    ended = meshwright("plan", "llama3-8b", "--gpus", "8xH100", "--tokens", "1T")
    assert ended.code == 2
    assert "commands that take it: recommend, size, estimate" in ended.err

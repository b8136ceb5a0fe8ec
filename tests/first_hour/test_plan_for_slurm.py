"""Plans for a SLURM cluster: commands that start, budgets, batches that divide, bubbles."""

from __future__ import annotations

import re
import shlex
import subprocess
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
    assert words[:5] == ["meshwright", "export", "llama3_8b_pretrain_config", "--model", "llama2_13b"]
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
    assert "not meshwright: " in shown
    assert "Run      torchtitan  meshwright export " in shown  # as a flavor of its own
    other = meshwright("recommend", "gemma2-9b", *DENSE[2:], "64xH100", "--engine", "torchtitan").out
    assert "not torchtitan: torchtitan has no model of this shape" in other


def test_export_takes_another_model(meshwright: Any) -> None:
    exported = export("llama3_8b_pretrain_config", "megatron-lm", gpus="8xH100", model="llama2-13b")
    assert exported.checked.recipe.model == "llama2_13b"
    assert "--num-layers 40" in next(iter(exported.written.files.values()))
    twice = meshwright("export", "llama2-13b", "--goal", "pretrain", "--model", "llama2-7b", "--to", "megatron-lm")
    assert twice.code == 2
    assert "the target is a model itself" in twice.err


def test_a_job_of_another_framework_takes_another_model(meshwright: Any, tmp_path: Path) -> None:
    words = ("launch", "llama3_8b_pretrain_config", "--model", "llama2-13b", "--to", "megatron-lm")
    ended = meshwright(*words, "--scheduler", "slurm", "--gpus", "8x8xH100", "--write", str(tmp_path))
    assert ended.code == 0
    (job,) = tmp_path.glob("*.sbatch")
    assert "--num-layers 40 --hidden-size 5120" in job.read_text()


def test_a_budget_says_which_steps_train_it(meshwright: Any) -> None:
    words = (*DENSE, "12x8xH100", "--tokens", "250B", "--json")
    found = meshwright(*words).json
    (change,) = (one for one in found["changes"] if one["field"] == "train.steps")
    assert (change["from"], change["to"]) == (1_168_251, 119_210)  # the plan trains the requested tokens
    assert found["budget"]["notes"] == []
    (note,) = meshwright(*words, "train.steps=500").json["budget"]["notes"]  # typed steps stay
    assert note == "the recipe trains for 500 steps: add train.steps=119210 to train these tokens"


def test_a_budget_below_one_step_names_the_unit(meshwright: Any) -> None:
    notes = meshwright(*DENSE, "8xH100", "--tokens", "250", "--json").json["budget"]["notes"]
    (note,) = [one for one in notes if "less than one step" in one]
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
    promised = float(found.why.split("%")[0].split()[-1]) / 100
    # Asked again, the search may find a layout that is still faster, and other kernels for it.
    assert promised - 0.03 <= gain <= promised + 0.06


def test_even_counts_do_not() -> None:
    titles = [one.title for one in recommend("llama2-13b", "64xH100", "pretrain").suggestions]
    assert "fit the batch to the GPUs" not in titles


def test_a_bubble_that_a_v_schedule_removes_has_that_fix() -> None:
    plan = recommend("qwen3-30b-a3b", "12x8xH200", "pretrain")
    assert "schedule.no-interleaving" not in [one.rule for one in plan.findings]  # the search has found the schedule
    plain = ["layout.pp=6", "layout.vp=1", "layout.pp_schedule=1f1b"]
    pinned = recommend("qwen3-30b-a3b", "12x8xH200", "pretrain", overrides=plain)
    (found,) = [one for one in pinned.findings if one.rule == "schedule.no-interleaving"]
    assert [one.partition("=")[0] for one in found.fix] == ["layout.vp", "layout.pp_schedule"]
    fixed = recommend("qwen3-30b-a3b", "12x8xH200", "pretrain", overrides=[plain[0], *found.fix])
    assert fixed.ok
    assert fixed.estimate.step_s < pinned.estimate.step_s


def test_a_fix_that_is_slower_is_named_as_such(meshwright: Any) -> None:
    shown = meshwright("recommend", "llama3-70b", "--gpus", "8x8xH100", "--goal", "pretrain", "layout.pp=4").out
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
    ended = meshwright("plan", "llama3-8b", "--gpus", "8xH100", "--max-gpus", "30")
    assert ended.code == 2
    assert "commands that take it: size" in ended.err


SLURM = ("--scheduler", "slurm", "--overwrite", "--write")
WIDE = ("layout.tp=1", "layout.pp=1", "layout.cp=1", "layout.recompute=full")


@pytest.fixture
def a100(tmp_path: Path) -> str:
    file = tmp_path / "a100.toml"
    file.write_text('gpu = "A100-40GB"\nnodes = 6\ngpus_per_node = 4\nnetwork_gb_s = 25\nprice = 0.9\n')
    return str(file)


@pytest.mark.parametrize(
    ("framework", "flag", "variable"),
    [
        ("megatron-lm", "--pretrained-checkpoint ", "PRETRAINED_CHECKPOINT"),
        ("megatron-bridge", "checkpoint.pretrained_checkpoint=", "CONVERTED_CHECKPOINT"),
    ],
)
def test_a_fine_tuning_job_starts_from_weights(
    framework: str, flag: str, variable: str, meshwright: Any, tmp_path: Path
) -> None:
    words = ("launch", "llama3_8b_sft_config", "--to", framework, "--gpus", "8xH100", *SLURM, str(tmp_path))
    answer = meshwright(*words, "--framework-dir", "/shared/checkout")
    assert answer.code == 0
    assert "convert" in answer.err
    (job,) = tmp_path.glob("*.sbatch")
    assert f'{flag}"${{{variable}:?' in job.read_text()
    bash = ("bash", "-c", job.read_text().replace("/shared/checkout", str(tmp_path / "checkout")))
    name = "pretrain_gpt.py" if framework == "megatron-lm" else "scripts/training/run_recipe.py"
    script = tmp_path / "checkout" / name
    script.parent.mkdir(parents=True)
    script.write_text("")
    ended = subprocess.run(bash, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert ended.returncode == 2
    assert f"set {variable}" in ended.stderr
    exported = meshwright("export", "llama3_8b_sft_config", "--to", framework, "--gpus", "8xH100", "--json").json
    assert f'{flag}"${{{variable}:?' in exported["command"]
    given = meshwright(*words, "--env", f"{variable}=/data/converted")
    assert given.code == 0
    assert f"{flag}/data/converted" in job.read_text()
    remote = meshwright(*words[:6], "--scheduler", "kubernetes", "--image", "an/image")
    assert remote.code == 2
    assert f"--env {variable}=" in remote.err


def test_weights_of_the_hub_are_converted_first(meshwright: Any, tmp_path: Path) -> None:
    words = ("launch", "qwen3_14b_pretrain_config", "--to", "megatron-lm", "--gpus", "8xH200", *SLURM, str(tmp_path))
    hub = meshwright(*words, "checkpoint.pretrained=Qwen/Qwen3-14B-Base")
    assert "convert Qwen/Qwen3-14B-Base to Megatron-LM format" in hub.err
    (job,) = tmp_path.glob("*.sbatch")
    assert "${PRETRAINED_CHECKPOINT:?" in job.read_text()
    assert "--pretrained-checkpoint Qwen" not in job.read_text()
    folder = meshwright(*words, "checkpoint.pretrained=/data/base")
    assert "--pretrained-checkpoint /data/base" in job.read_text()
    assert "/data/base must be a checkpoint in Megatron-LM format" in folder.err
    titan = meshwright(
        "export", "llama3_8b_pretrain_config", "--to", "torchtitan", "checkpoint.pretrained=meta-llama/Meta-Llama-3-8B"
    )
    assert "checkpoint.initial_load_path must be a folder: download meta-llama/Meta-Llama-3-8B" in titan.out


def test_a_fine_tuning_script_without_weights_is_found(meshwright: Any, tmp_path: Path) -> None:
    exported = meshwright("export", "llama3_8b_sft_config", "--to", "megatron-lm", "--gpus", "8xH100", "--json").json
    ((name, text),) = exported["files"].items()
    script = tmp_path / name
    found = []
    weights = '--pretrained-checkpoint "${PRETRAINED_CHECKPOINT'
    line = next(one for one in text.splitlines() if weights in one)
    for written in (text, text.replace(line, ""), text.replace(line, "--finetune")):
        script.write_text(written)
        rules = {one["rule"] for one in meshwright("check", str(script), "--json").json["findings"]}
        found.append("megatron-lm.no-initial-weights" in rules)
    assert found == [False, True, False]


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge", "deepspeed", "accelerate", "kempnerforge"])
def test_a_job_finds_the_checkout_where_it_is_submitted(framework: str, meshwright: Any, tmp_path: Path) -> None:
    asked = ("launch", "llama3_8b_pretrain_config", "--to", framework, "--gpus", "4x8xH100", *WIDE)
    answer = meshwright(*asked, *SLURM, str(tmp_path / "job"))
    assert answer.code == 0, answer.err
    assert "or run sbatch in the folder that has it" in answer.err
    (job,) = (tmp_path / "job").glob("*.sbatch")
    (script,) = re.findall(r"^# (\S+) is a file of", answer.err, re.MULTILINE)
    checkout = tmp_path / "checkout"
    (checkout / script).parent.mkdir(parents=True)
    (checkout / script).write_text("")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in (("srun", 'echo "srun $*"'), ("scontrol", "echo node1"), ("squeue", "true"), ("scancel", "true")):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_PER_TASK": "8"}
    for where, code in ((checkout, 0), (tmp_path, 2)):
        env = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(where), **slurm}
        ended = subprocess.run(["bash", str(job)], capture_output=True, text=True, check=False, env=env)
        assert ended.returncode == code, ended.stderr
        assert (f"{checkout}/{script}" in ended.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("slurm",), "sbatch {folder}/llama3_8b_pretrain_config.sbatch"),
        (("kubernetes", "--image", "an/image"), "kubectl apply -f {folder}/llama3-8b-pretrain-config.yaml"),
        (("skypilot",), "sky launch {folder}/llama3-8b-pretrain-config.yaml"),
        (("skypilot", "--to", "automodel"), "cd {folder} && sky launch llama3-8b-pretrain-config.yaml"),
    ],
)
def test_the_printed_command_works_where_it_was_typed(
    words: tuple[str, ...], command: str, meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("launch", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--scheduler", *words)
    answer = meshwright(*asked, "--write", "jobs/x", *(("--out", "runs/x") if "--to" not in words else ()))
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1] == command.format(folder="jobs/x")


def test_a_command_names_its_config_by_its_path(meshwright: Any, tmp_path: Path) -> None:
    asked = ("launch", "llama3_8b_pretrain_config", "--to", "deepspeed", "--gpus", "8xH100", *WIDE)
    answer = meshwright(*asked, "--scheduler", "torchrun", "--write", str(tmp_path), "--json").json
    assert f"--deepspeed {tmp_path}/ds_config.json" in answer["commands"][0]


@pytest.mark.parametrize("to", [(), ("--to", "megatron-lm"), ("--to", "automodel")])
def test_a_job_on_random_tokens_says_so(to: tuple[str, ...], meshwright: Any, tmp_path: Path) -> None:
    asked = ("launch", "llama3_8b_pretrain_config", "--gpus", "8xH100", *to, *SLURM, str(tmp_path), "--json")
    asked = (*asked, *(() if to else ("--out", "runs/x")))
    random = "the job trains on random tokens (data.dataset=mock): add --dataset DATA to train on data"
    assert random in meshwright(*asked).json["notes"]
    assert random not in meshwright(*asked, "--dataset", "/data/corpus").json["notes"]


def test_no_batch_is_suggested_where_none_was_found(meshwright: Any, a100: str) -> None:
    asked = ("recommend", "llama3.1-70b", "--gpus", a100, "--goal", "sft", "--seq", "32k")
    answer = meshwright(*asked, "--json").json
    assert [one for one in answer["suggestions"] if "nan" in one["why"] or "batch_size=0" in str(one)] == []
    assert "nan" not in meshwright(*asked).out


def test_needs_keeps_the_nodes_and_agrees_with_size(meshwright: Any, a100: str) -> None:
    words = ("llama3.1-70b", "--goal", "sft", "--seq", "32k")
    answer = meshwright("recommend", *words, "--gpus", a100, "--json").json
    smallest = meshwright("size", *words, "--gpu", a100, "--json").json["smallest"]
    assert answer["smallest_that_fits"] == smallest["gpus"]
    assert answer["smallest_cluster"] == f"{smallest['nodes']}xA100-40"
    shown = meshwright("recommend", *words, "--gpus", "2x4xA100-40").out
    assert f"Needs    --gpus {smallest['nodes']}xA100-40 would fit" in shown
    assert meshwright("recommend", *words, "--gpus", f"{smallest['nodes']}xA100-40", "--json").json["estimate"]["fits"]

"""Planning: repairs that keep what was typed, advice that gains something, GPUs typed in other ways, failure rates."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest


def questions_file(folder: Path, rows: int = 400) -> str:
    path = folder / "qa.jsonl"
    lines = [{"prompt": f"What is {n} plus 1?", "response": f"The answer is {n + 1}. " * 9} for n in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def findings(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["rule"]: one for one in answer["findings"]}


def test_few_steps_are_repaired_by_shorter_samples_and_the_command_has_them(meshwright: Any, tmp_path: Path) -> None:
    words = ("recommend", "gemma3-1b", "--gpus", "8xA100-40", "--goal", "sft", "--dataset", questions_file(tmp_path))
    answer = meshwright(*words, "train.epochs=3", "--json").json
    found, repair = findings(answer), answer["repair"]
    assert "no_fix" not in found["data.few-steps"]
    assert any(one.startswith("data.seq_length=") for one in repair["overrides"])
    assert set(repair["overrides"]) <= set(shlex.split(answer["commands"]["meshwright"]))
    assert (repair["planned"], repair["undoes"]) == (True, [])
    assert "scale the batch" not in [one["title"] for one in answer["suggestions"]]  # fewer steps still
    repaired = meshwright(*words, "train.epochs=3", *repair["overrides"], "--json").json
    assert "data.few-steps" not in findings(repaired)
    assert repaired["commands"] == answer["commands"]
    typed = meshwright(*words, "train.epochs=3", "data.seq_length=16384", "train.global_batch_size=32", "--json").json
    assert findings(typed)["data.few-steps"]["undoes"]  # nothing else resolves it


def test_a_larger_batch_is_suggested_only_for_a_gain(meshwright: Any) -> None:
    def suggested(model: str, gpus: str, goal: str) -> list[str]:
        answer = meshwright("recommend", model, "--gpus", gpus, "--goal", goal, "--json").json
        return [one["why"] for one in answer["suggestions"] if one["title"] == "scale the batch"]

    assert not suggested("llama3-8b", "128xH100", "pretrain")  # 0.1 % faster
    (why,) = suggested("llama3.1-8b", "32xH100", "sft")
    assert re.search(r"[2-9]\d% less time per token", why)


def test_a_requested_length_stays(meshwright: Any) -> None:
    words = ("recommend", "llama2-7b", "--gpus", "8xA100-80", "--goal", "sft", "--seq", "32k")
    found = findings(meshwright(*words, "--json").json)["sequence.beyond-model"]
    assert found["fix"] == ["architecture.rope_theta=82700.0"]
    longer = meshwright(*words, *found["fix"], "--json").json
    assert "sequence.beyond-model" not in findings(longer)
    checked = meshwright("check", "llama3_8b_sft_config", "--gpus", "8xH100", "data.seq_length=32768", "--json").json
    assert findings(checked)["sequence.beyond-model"]["fix"][0].startswith("architecture.rope_theta=")
    words = ("recommend", "gemma3-1b", "--gpus", "8xA100-40", "--goal", "sft", "--seq", "64k")  # two bases of RoPE
    found = findings(meshwright(*words, "--json").json)["sequence.beyond-model"]
    assert (found["fix"], found["undoes"]) == (["data.seq_length=32768"], ["data.seq_length"])
    assert "changes your data.seq_length: nothing else resolves it" in meshwright(*words).out


def test_a_repair_of_typed_values_is_not_run(meshwright: Any) -> None:
    words = ("recommend", "gemma3-1b", "--gpus", "8xH100", "--goal", "sft", "optimizer.lr=1e-2", "train.steps=1000")
    ended = meshwright(*words, "schedule.warmup_steps=5000")
    assert "without the repair, which would change your schedule.warmup_steps, optimizer.lr" in ended.out
    answer = meshwright(*words, "schedule.warmup_steps=5000", "--json").json
    assert answer["repair"]["undoes"]
    assert "optimizer.lr=0.01" in answer["commands"]["meshwright"]


def test_a_typed_degree_stays_if_another_can_change(meshwright: Any) -> None:
    words = ("estimate", "llama3-70b", "--gpus", "8xH100", "--goal", "pretrain", "layout.tp=8", "--json")
    repair = meshwright(*words).json["repair"]
    assert not repair["undoes"]
    assert not any(one.startswith("layout.tp=") for one in repair["overrides"])


@pytest.mark.parametrize(("model", "gpus"), [("llama3.1-70b", "8xH100"), ("llama3.1-8b", "1xA100-40")])
def test_adapters_as_an_option_are_as_fast_as_recommended(meshwright: Any, model: str, gpus: str) -> None:
    words = ("recommend", model, "--gpus", gpus, "--goal")
    (option,) = [one for one in meshwright(*words, "sft", "--json").json["options"] if one["title"] == "LoRA"]
    asked = meshwright(*words, "lora", "--json").json["estimate"]["step_s"]
    typed = meshwright(*shlex.split(option["command"])[1:], "--json").json["estimate"]["step_s"]
    assert option["step_s"] == pytest.approx(asked) == pytest.approx(typed)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("recommend llama3-8b --goal pretrain --gpus 128 --gpu h100", "--gpus 128xH100"),
        ("estimate llama3-8b --goal pretrain --gpu-type a100-80 --gpus 16", "--gpus 16xA100-80"),
        ("plan llama3-8b --goal pretrain --gpus 2x8xH100 --gpu h200", "--gpus 2x8xH200"),
        ("plan llama3-8b --goal pretrain --gpus 8xH100 --gpu h100", "without --gpu"),
        ("size llama3-8b --goal pretrain --gpus 16 --gpu h100", "--gpu h100 --max-gpus 16"),
        ("recommend llama3-8b --goal pretrain --nodes 4 --gpus cluster.toml", "--gpus 4xcluster.toml"),
        ("recommend llama3-8b --goal pretrain --nodes 2 --gpus cluster.toml", "without --nodes"),
        (
            "estimate llama3-8b --goal pretrain --gpus-per-node 8 --gpus cluster.toml",
            "gpus_per_node = 8 in cluster.toml",
        ),
    ],
)
def test_gpus_in_two_options_are_joined(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(
        'gpu = "A100-80"\nnodes = 2\ngpus_per_node = 4\nnetwork_gb_s = "200 Gb/s per GPU"\n'
    )
    typed = words.split()
    ended = meshwright(*typed, "--json")
    assert (ended.code, ended.json["error"]["fix"]) == (2, [fix])
    if fix.startswith("--"):  # and typed, it works
        kept = [
            one
            for place, one in enumerate(typed)
            if not one.startswith(("--gpu", "--nodes")) and typed[place - 1][:5] not in ("--gpu", "--nod")
        ]
        assert meshwright(*kept, *fix.split(), "--json").code == 0


def test_the_failure_rate_is_named_and_can_be_set(meshwright: Any) -> None:
    words = ("llama3-8b", "--goal", "pretrain", "--tokens", "1T")
    for verb, gpus in (("recommend", ("--gpus", "128xH100")), ("estimate", ("--gpus", "128xH100"))):
        usual = meshwright(verb, *words, *gpus, "--json").json["budget"]["goodput"]
        assert "Llama 3 405B" in usual["mtbf_from"]
        asked = meshwright(verb, *words, *gpus, "--mtbf-hours", "2000", "--json").json["budget"]["goodput"]
        assert (asked["mtbf_hours"], asked["mtbf_from"]) == (2000.0, "requested")
        assert asked["failures_per_day"] == pytest.approx(24 * 128 / 2000)
        assert asked["share"] < usual["share"]
        assert "--mtbf-hours sets it" in meshwright(verb, *words, *gpus).out
    sized = meshwright("size", *words, "--gpu", "H100", "--max-gpus", "8", "--mtbf-hours", "2000")
    assert "a GPU fails every 2,000 hours, as requested" in sized.out


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("tokens=1T", "--tokens 1T"),
        ("mtbf_hours=3000", "--mtbf-hours 3000"),
        ("failure_rate=0.1", "--mtbf-hours HOURS"),
        ("--failure-rate 0.1", "--mtbf-hours HOURS"),
        ("--mtbf 2000", "--mtbf-hours 2000"),
    ],
)
def test_options_typed_as_keys_and_by_other_names(meshwright: Any, words: str, fix: str) -> None:
    ended = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", *words.split(), "--json")
    assert (ended.code, ended.json["error"]["fix"]) == (2, [fix])


def test_engines_are_compared_compiled_and_ours_says_what_it_never_ran(meshwright: Any) -> None:
    words = ("compare", "llama3-8b", "--engines", "all", "--goal", "pretrain")
    answer = meshwright(*words, "--gpus", "16xH100", "--json").json
    sides = {one["name"]: one for one in answer["sides"]}
    compiled = {name for name, one in sides.items() if "kernels.compile" in [c["field"] for c in one["changes"]]}
    assert {"meshwright", "torchtitan", "fsdp1", "kempnerforge"} <= compiled
    assert "never run on several GPUs" in answer["answer"]
    assert any("never run on several GPUs" in why for why in sides["meshwright"]["reasons"])
    out = meshwright(*words, "--gpus", "16xH100").out
    assert next(line for line in out.splitlines() if "  fsdp1  " in line).count("fsdp1") == 2  # not as fsdp2
    assert "never run" not in meshwright(*words, "--gpus", "1xH200", "--json").json["answer"]


def test_runs_without_validation_say_so(meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.first_hour.test_compare_runs import falling, write_run

    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", falling(24), "data.dataset=mock")
    write_run(tmp_path / "two", falling(24, end=4.0), "data.dataset=mock")
    write_run(tmp_path / "three", falling(24, end=4.5), "data.dataset=mock", validation=[5.1])
    assert "no run logged a validation loss" in meshwright("compare", "one", "two", "--json").json["answer"]
    assert "two logged no validation loss" in meshwright("compare", "two", "three", "--json").json["answer"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("recommend llama3-8b --goal pretrain --gpus 8xH100 --tokens 1T --deadline 30", "--days 30"),
        ("launch llama3_8b_pretrain_config --gpus 16xH100 --scheduler slurm --tokens 1T", "train.steps=238419"),
        ("estimate llama3-8b --goal pretrain --gpus 8xH100 layout.pp=100000000", "layout.pp=1"),
    ],
)
def test_small_stumbles_have_a_fix(meshwright: Any, words: str, fix: str) -> None:
    ended = meshwright(*words.split(), "--json")
    assert (ended.code, ended.json["error"]["fix"]) == (2, [fix])


def test_several_gpu_types_are_labelled(meshwright: Any) -> None:
    words = ("size", "llama3-8b", "--goal", "pretrain", "--gpu", "H100,B200", "--max-gpus", "8")
    out = meshwright(*words).out
    assert "GPUs (H100)" in out
    assert "! H100: offload is planned on 1" in out


def test_a_job_names_only_files_that_it_writes(meshwright: Any, tmp_path: Path) -> None:
    words = ("launch", "llama3_8b_pretrain_config", "--to", "torchtitan", "--gpus", "16xH100", "--scheduler", "slurm")
    answer = meshwright(*words, "--write", str(tmp_path / "job"), "--json").json
    assert "run_0.3.0.sh" not in str(answer)
    assert "--namespace NAME" in meshwright("launch", "--help").out


@pytest.mark.parametrize(("dry", "says"), [(40.0, True), (54.0, False)])
def test_a_dry_run_that_differs_says_which_to_trust(dry: float, says: bool) -> None:
    from meshwright.cli.dryrun_report import _trust

    answer = {"difference_gib": {"total": dry - 55.0}, "estimate_gib": {"total": 55.0}}
    assert bool(_trust(answer)) is says
    assert not says or "-27% of the estimate of the same layout: trust the dry run" in _trust(answer)[0]

"""Commands that an answer prints keep the options that it was asked with: typed, they answer for the same training."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

SFT = ("llama3_8b_sft_config", "--model", "qwen3-8b", "--gpus", "4xA100-40", "layout.tp=1", "layout.sp=false")
SMALL = ("layout.micro_batch_size=1", "layout.recompute=full")


PROFILE = 'gpu = "H100"\nsource = "fitted to 6 runs of own.csv"\nclock = 0.76\nengines = ["torchtitan"]\nruns = 6\n'


def printed(text: str, verb: str) -> list[list[str]]:
    """Return the words of the commands of a verb that a text prints."""
    found = re.findall(rf"meshwright ({verb} .*?)(?: gives a count|\)| searches layouts|$)", text, re.MULTILINE)
    return [shlex.split(one) for one in found]


@pytest.mark.parametrize("verb", ["estimate", "check"])
def test_options_of_a_recipe_with_another_model(meshwright: Any, verb: str) -> None:
    answer = meshwright(verb, *SFT, *SMALL)
    own = [one for one in printed(answer.out, "estimate") if "peft" not in one]
    assert own, answer.out
    for words in own:
        assert words[1:4] == ["llama3_8b_sft_config", "--model", "qwen3_8b"], words


def test_a_printed_option_answers_with_its_figures(meshwright: Any) -> None:
    answer = meshwright("recommend", *SFT, *SMALL)
    words = next(one for one in printed(answer.out, "recommend") if "precision.moments=bf16" in one)
    gib = re.search(r"bf16 moments \(contract\): ([\d.]+) GiB", answer.out)
    assert gib is not None
    typed = meshwright(*words).out
    assert "qwen3_8b (8.19 B parameters)" in typed
    assert f"Memory   {gib[1]} of 40.0 GiB" in typed


def test_prices_lengths_and_engines_are_kept(meshwright: Any) -> None:
    options = ("--seq", "16k", "--engine", "fsdp1", "--gpus", "2xA100-40", "--price", "2", "--mtbf-hours", "50000")
    answer = meshwright("recommend", "qwen3-8b", "--goal", "sft", *options)
    for words in printed(answer.out, "recommend"):
        assert "--seq 16384 --engine fsdp1 --price 2 --mtbf-hours 50000" in " ".join(words), words


def test_a_file_keeps_its_samples(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nmodel = "qwen3_8b"\ngoal = "sft"\ncluster = "2xA100-40"\nengine = "fsdp1"\n'
        "[data]\nseq_length = 4096\n[train]\nglobal_batch_size = 12\n"
    )
    file = str(tmp_path / "mine.toml")
    answer = meshwright("recommend", file)
    own = [one for one in printed(answer.out, "recommend") if "peft" not in one]
    assert own, answer.out
    assert all(one[:2] == ["recommend", file] and "--engine fsdp1" in " ".join(one) for one in own)


def test_a_model_is_named_with_its_goal(meshwright: Any) -> None:
    answer = meshwright("check", "qwen3-8b", "--goal", "sft", "--gpus", "1xA100-40", "data.seq_length=4096")
    words = printed(answer.out, "recommend")[0]
    assert words[:6] == ["recommend", "qwen3_8b", "--gpus", "1xA100-40", "--goal", "sft"]
    assert "data.seq_length=4096" in words
    assert meshwright(*words).code == 0


def test_a_slow_estimate_names_the_search_of_the_same_training(meshwright: Any) -> None:
    slow = ("layout.recompute=full", "layout.tp=8", "layout.sp=true", "train.global_batch_size=16")
    answer = meshwright("estimate", "llama3_8b_sft_config", "--model", "qwen3-0.6b", "--gpus", "8xH100", *slow)
    (words,) = printed(answer.out, "plan")
    assert words[:4] == ["plan", "llama3_8b_sft_config", "--model", "qwen3_600m"], words
    assert "train.global_batch_size=16" in words
    assert not any(one.startswith("layout.") for one in words)


def test_a_faster_layout_than_the_repair_is_of_the_same_model(meshwright: Any) -> None:
    own = ("layout.tp=1", "layout.sp=false", "layout.dp_shard=-1", "train.global_batch_size=16")
    words = ("qwen3_8b_sft_config", "--model", "qwen3-8b", "--gpus", "4xA100-40", *own, "layout.micro_batch_size=1")
    found = printed(meshwright("check", *words).out.partition("Notes")[2], "recommend")
    assert found
    assert "--model qwen3-8b" in " ".join(found[0]), found


def size_in(answer: Any) -> str:
    """Return the options of the size command that a finding prints."""
    found = re.search(r"\((meshwright size .+?) gives a count\)", " ".join(map(no_fix, answer.json["findings"])))
    assert found, answer.out
    return found[1]


def no_fix(finding: dict[str, Any]) -> str:
    return str(finding.get("no_fix", ""))


@pytest.mark.parametrize("verb", ["estimate", "check"])
def test_the_size_command_of_a_finding_keeps_the_calibration(meshwright: Any, verb: str, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(PROFILE)
    (tmp_path / "own.toml").write_text('name = "own"\nmodel = "llama3-70b"\ngoal = "sft"\ncluster = "2xL40S"\n')
    answer = meshwright(verb, str(tmp_path / "own.toml"), "--calibration", str(profile), "--json")
    command = size_in(answer)
    assert f"--calibration {profile}" in command
    assert meshwright(*shlex.split(command)[1:], "--max-gpus", "32").code == 0
    assert all(f"--calibration {profile}" in one["command"] for one in answer.json.get("options") or ())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--tokens", "1B", "--price", "2EUR"), "--tokens 1B --price 2EUR"),
        (("--mtbf-hours", "50000", "--price", "2"), "--mtbf-hours 50000"),  # size prices a length
    ],
)
def test_the_size_command_of_a_finding_keeps_budgets(meshwright: Any, options: tuple[str, ...], kept: str) -> None:
    words = ("estimate", "llama3-70b", "--goal", "pretrain", "--gpus", "2xL40S")
    command = size_in(meshwright(*words, *options, "--json"))
    assert command.endswith(f"--engine meshwright {kept}")
    assert meshwright(*shlex.split(command)[1:], "--max-gpus", "64").code == 0


def test_a_file_for_another_engine_keeps_what_was_typed(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    typed = ("--model", "llama3-8b", "--gpus", "2xH100", "--engine", "torchtitan", "train.global_batch_size=4")
    refused = meshwright("check", str(tmp_path / "fsdp.yaml"), *typed)
    own = "--gpus 2xH100 --engine torchtitan --model llama3-8b train.global_batch_size=4"
    assert f"meshwright estimate {tmp_path / 'fsdp.yaml'} {own}" in refused.err


def test_the_size_of_a_recipe_keeps_the_users_options(meshwright: Any) -> None:
    given = ("--goal", "sft", "--gpu", "A100-40", "--max-gpus", "16", "--mtbf-hours", "50000")
    refused = meshwright("size", "qwen3_8b_sft_config", *given)
    assert "--max-gpus 16" in refused.err
    assert "--mtbf-hours 50000" in refused.err


def test_an_option_of_recommend_is_pointed_to_with_the_whole_line(meshwright: Any) -> None:
    words = ("qwen3-0.6b", "--gpus", "1xH100", "--goal", "sft", "--epochs", "3", "train.global_batch_size=8")
    found = meshwright("plan", *words, "--top", "3", "--save", "best.toml")
    assert f"meshwright recommend {' '.join(words)} --save best.toml" in found.err
    assert meshwright("recommend", *words, "--dataset", "squad", "--save", "best.toml").code == 0
    assert Path("best.toml").is_file()


def test_the_command_of_adapters_keeps_the_data_and_the_length_of_a_file(meshwright: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 400
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--goal", "sft", "--gpus", "2xH100", "--dataset", "chats.jsonl", "--epochs", "3", "--save", "full.toml")
    meshwright("recommend", "qwen3-8b", *words, "train.global_batch_size=8")
    options = meshwright("recommend", "full.toml", "--gpus", "1xA100-80", "--json").json["options"]
    command = next(one["command"] for one in options if one["title"] == "LoRA")
    found = meshwright(*shlex.split(command.removeprefix("meshwright ")), "--json").json
    assert (found["contract"]["dataset"], found["contract"]["epochs"]) == ("chats.jsonl", 3)
    assert "--dataset chats.jsonl" in found["commands"]["meshwright"]

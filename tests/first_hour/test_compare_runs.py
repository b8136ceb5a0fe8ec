"""Comparing runs, a second stage from adapters, too high a learning rate."""

from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meshwright as mw
from meshwright.recipes import index, overrides

DATA = "data.dataset=chats.jsonl"
BASE = "qwen2_500m_peft_config"


def write_run(folder: Path, losses: Sequence[float], *changes: str, validation: Sequence[float] = ()) -> Path:
    """Write the metrics.jsonl of a run as `train` writes it on a CPU."""
    recipe = overrides.apply(index.load(BASE), [f"train.steps={len(losses)}", *changes])
    header = {"kind": "header", "recipe": folder.name, "settings": msgspec.to_builtins(recipe), "gpus": "1xH100"}
    header |= {"steps": len(losses), "world": 1, "tokens_per_step": 1024, "peak_flops": None}
    header |= {"validation": {"dataset": "held-out.jsonl", "samples": 6}} if validation else {}
    lines: list[dict[str, Any]] = [header]
    for step, loss in enumerate(losses, 1):
        lines.append({"kind": "step", "step": step, "loss": loss, "lr": recipe.optimizer.lr, "grad_norm": 1.0})
        lines[-1] |= {"step_s": 0.2, "tokens_per_s_per_gpu": 5000.0, "memory_gib": {"peak": 0.4}}
    lines += [{"kind": "validation", "step": 5 * (at + 1), "loss": loss} for at, loss in enumerate(validation)]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines))
    return folder


def falling(count: int, start: float = 6.2, end: float = 5.2) -> list[float]:
    return [start + (end - start) * step / count for step in range(count)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "slow", falling(24), "optimizer.lr=1e-4", DATA, validation=[5.9, 5.3, 5.4])
    write_run(tmp_path / "fast", falling(24, end=4.0), "optimizer.lr=3e-4", DATA, validation=[5.8, 5.1, 5.2])
    return tmp_path


@pytest.mark.parametrize(
    "words", [("slow", "fast"), ("./slow", "./fast"), ("slow/metrics.jsonl", "fast"), ("slow/", "fast/metrics.jsonl")]
)
def test_runs_are_compared_side_by_side(meshwright: Any, runs: Path, words: tuple[str, str]) -> None:
    answer = meshwright("compare", *words, "--json")
    assert answer.code == 0
    found = answer.json
    assert found["of"] == "runs"
    slow, fast = found["runs"]
    assert (slow["first_loss"], slow["best_validation_loss"], slow["best_validation_step"]) == (6.2, 5.3, 10)
    assert (slow["last_validation_loss"], fast["rank"], slow["rank"]) == (5.4, 1, 2)
    assert (slow["step_s"], slow["tokens_per_s_per_gpu"], slow["memory_gib"]) == (0.2, 5000.0, 0.4)
    assert [(one["field"], one["values"]) for one in found["differences"]] == [("optimizer.lr", [1e-4, 3e-4])]
    assert words[1] in found["answer"]
    text = meshwright("compare", *words).out
    assert "best validation loss" in text
    assert "optimizer.lr" in text


def test_runs_of_other_data_are_not_ranked(meshwright: Any, runs: Path) -> None:
    write_run(runs / "other", falling(24), "data.dataset=other.jsonl")
    found = meshwright("compare", "slow", "other", "--json").json
    assert [one["rank"] for one in found["runs"]] == [None, None]
    assert "not ranked" in found["answer"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("slow",), "name a second one"),
        (("slow", "fats"), "did you mean ./fast"),
        (("slow", "llama3-8b"), "is not a run"),
        (("slow", "fast", "--gpus", "8xH100"), "no effect on runs"),
        (("slow", "fast", "optimizer.lr=1"), "no effect on runs"),
    ],
)
def test_what_cannot_be_compared_says_why(meshwright: Any, runs: Path, words: tuple[str, ...], says: str) -> None:
    answer = meshwright("compare", *words)
    assert answer.code == 2
    assert says in answer.err


def _adapters(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("train", "{base}", "--goal", "lora", "--dataset", "chats.jsonl", "checkpoint.pretrained={folder}"),
        ("estimate", BASE, "checkpoint.pretrained={folder}"),
        ("check", BASE, "checkpoint.pretrained={folder}"),
        ("train", "./slow/model", "--goal", "lora"),  # ./slow itself is a run: its recipe, and what it continues
        ("recommend", "./slow/model", "--goal", "lora", "--gpus", "1xH100"),
        ("estimate", "./slow/model", "--goal", "lora", "--gpus", "1xH100"),
        ("dryrun", "./slow/model", "--goal", "lora", "--gpus", "1xH100"),
    ],
)
@pytest.mark.parametrize("folder", ["./slow/model", "./slow"])
def test_a_second_stage_from_adapters_names_the_merge(
    meshwright: Any, runs: Path, words: tuple[str, ...], folder: str
) -> None:
    _adapters(runs / "slow" / "model")
    (runs / "chats.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    answer = meshwright(*(word.format(folder=folder, base=BASE) for word in words))
    assert answer.code == 2
    named = folder if any("{folder}" in word for word in words) else "./slow/model"
    assert f"meshwright convert {shlex.quote(named)} merged --merge" in answer.err
    then = "checkpoint.pretrained=merged" if any("pretrained" in word for word in words) else "use ./merged"
    assert then in answer.err


def test_a_run_with_a_whole_model_names_its_folder(meshwright: Any, runs: Path) -> None:
    (runs / "slow" / "model").mkdir()
    (runs / "slow" / "model" / "config.json").write_text("{}")
    answer = meshwright("estimate", BASE, "checkpoint.pretrained=slow")
    assert "checkpoint.pretrained=slow/model" in answer.err
    checkpoint = runs / "slow" / "checkpoints" / "step-00000024"
    checkpoint.mkdir(parents=True)
    answer = meshwright("estimate", BASE, f"checkpoint.pretrained={checkpoint}")
    assert f"meshwright convert {checkpoint} merged --merge" in answer.err  # its recipe trains adapters


RECOVERED = [6.2, 5.6, 4.5, 12.1, 14.4, 10.2, 18.8, 14.5, 11.5, 12.7, 7.9, 7.9, 6.7, 10.6, 11.7, 8.9, 7.9, 6.7]
RECOVERED += [5.4, 5.4, 5.0, 4.4, 4.4, 4.6, 4.6, 3.9, 3.9, 4.3, 3.4, 3.4, 3.1, 3.1, 4.1, 4.0, 3.5, 3.6]


def _found(meshwright: Any, run: Path) -> dict[str, Any]:
    return {one["rule"]: one for one in meshwright("doctor", str(run), "--json").json["findings"]}


def test_a_loss_above_its_start_is_a_finding_even_if_it_falls_again(meshwright: Any, tmp_path: Path) -> None:
    found = _found(meshwright, write_run(tmp_path / "bad", RECOVERED, "optimizer.lr=0.5"))
    assert found["loss.diverged"]["steps"] == [4, 18]
    assert found["learning_rate.far-too-high"]["fix"] == ["optimizer.lr=0.0001"]
    assert "optimizer.lr=0.25" not in json.dumps(found)  # half of a rate that is far too high is no remedy
    short = _found(
        meshwright, write_run(tmp_path / "short", [2.0, 1.9, 5, 9, 9.1, 9, 9.2, 9, 8.8, 8.9, 9, 2], "lr=1e-4")
    )
    assert {"loss.diverged"} <= short.keys()


def test_a_stuck_loss_names_the_learning_rate(meshwright: Any, tmp_path: Path) -> None:
    stuck = write_run(tmp_path / "stuck", [6.2, *([6.0, 5.9] * 15)], "optimizer.lr=0.5")
    assert "learning_rate.far-too-high" in _found(meshwright, stuck)


def test_noisy_and_healthy_runs_are_no_finding(meshwright: Any, tmp_path: Path) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        count, noise = rng.choice([10, 12, 20, 36, 60]), rng.choice([0.05, 0.2, 0.4, 0.7])
        losses = [loss * math.exp(rng.gauss(0, noise)) for loss in falling(count, 2.0, rng.choice([2.0, 1.0]))]
        found = _found(meshwright, write_run(tmp_path / str(seed), losses, "schedule.warmup_steps=2"))
        assert not {"loss.diverged", "learning_rate.far-too-high"} & found.keys(), (seed, found)
    bump = [1.0, 1.6, 1.7, 1.4, *falling(30, 1.0, 0.6)]
    assert "loss.diverged" not in _found(meshwright, write_run(tmp_path / "bump", bump, "schedule.warmup_steps=2"))


def test_a_list_in_place_of_a_target_is_an_error_of_ours() -> None:
    with pytest.raises(mw.MeshwrightError):
        mw.compare(["a", "b"])  # type: ignore[arg-type]


def test_a_prompt_has_a_system_message_or_is_a_list_of_messages() -> None:
    from meshwright.engine.post_training.generate import GenerateOptions, _turns

    user = {"role": "user", "content": "Hi"}
    assert _turns("Hi", GenerateOptions(system="Be brief")) == [{"role": "system", "content": "Be brief"}, user]
    assert _turns(json.dumps([user]), GenerateOptions()) == [user]
    assert _turns("[1, 2", GenerateOptions()) == []
    with pytest.raises(mw.MeshwrightError, match="no system message"):
        _turns("Hi", GenerateOptions(system="x", chat=False))


def test_runs_with_the_same_loss_have_no_winner(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One "has the lowest last loss: 7.174", the other 7.174, "by 0"."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", falling(24), DATA, validation=[5.9])
    write_run(tmp_path / "two", falling(24), DATA)
    answer = meshwright("compare", "one", "two", "--json").json["answer"]
    assert answer.startswith("one, two have the same last loss, the lowest: ")
    assert "two logged no validation loss" in answer
    assert "noise" not in answer

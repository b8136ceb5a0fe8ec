"""A rented H200 cluster: logs in their warm-up, remedies without a file, shared answers, commands of other engines."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from .mistakes import call

MOE, CLUSTER = "qwen3-30b-a3b", ("--gpus", "16x8xH200")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bridge_line(step: int, nan_from: int) -> str:
    nan = step > nan_from
    loss = "" if nan else f"lm loss: {2.9 + 9 / (1 + step / 200):.6E} | "
    return (
        f" [2026-11-01 08:00:00] iteration {step:8d}/  238419 | consumed samples: {step * 1024:12d} | elapsed time per "
        f"iteration (ms): {3170 + step % 7:.1f} | learning rate: {step * 1.5e-7:.6E} | global batch size:  1024 | "
        f"{loss}loss scale: 1.0 | grad norm: {'nan' if nan else 0.3 + step % 3 / 100} | number of skipped "
        f"iterations:   0 | number of nan iterations: {10 if nan else 0:3d} |\n"
    )


def remedies(log: str, *words: str) -> list[dict[str, Any]]:
    findings = call("doctor", log, *words, *CLUSTER, "--goal", "pretrain", "--json").json["findings"]
    return [remedy for one in findings for remedy in one["remedies"]]


def slower_warmups(*words: str) -> list[dict[str, Any]]:
    return [one for one in remedies("mb.log", *words) if one["why"] == "slower warm-up"]


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b_pretrain_config", MOE])
def test_a_slower_warmup_is_longer_than_the_logged_one(folder: Path, recipe: str) -> None:
    (folder / "mb.log").write_text("".join(bridge_line(step, 700) for step in range(10, 900, 10)))
    (slower,) = slower_warmups("--recipe", recipe)
    assert slower["try"] == ["schedule.warmup_steps=1780"]  # the recipe warms up for 40 of 100 steps, the run for 890
    assert slower["there"] == ["--lr-warmup-iters 1780"]


def test_a_logged_peak_keeps_the_stated_warmup(folder: Path) -> None:
    lines = "".join(bridge_line(step, 700) for step in range(10, 900, 10))
    (folder / "mb.log").write_text(re.sub(r"learning rate: \S+", "learning rate: 3.0E-04", lines))
    (slower,) = slower_warmups("--recipe", MOE, "schedule.warmup_steps=200")
    assert slower["try"] == ["schedule.warmup_steps=400"]


def test_a_remedy_sets_every_key_once(folder: Path) -> None:
    prefix = "2026-11-01 {:%H:%M:%S} | INFO | nemo_automodel.recipes.llm.train_ft | "
    tokens, rate = 6291456, 61923.78
    (folder / "am.log").write_text(
        "".join(
            prefix.format(datetime(2026, 11, 1, 8) + timedelta(seconds=step * tokens / rate))
            + f"step {step} | epoch 0 | loss {1.62 - step * 1e-4:.4f} | grad_norm 0.4 | lr 3.00e-05 | mem 61.53 GiB | "
            f"tps {rate}(3870.24/gpu) | num_label_tokens {tokens}\n"
            for step in range(200)
        )
    )
    there = [one["there"] for one in remedies("am.log", "--model", "llama3.1-70b") if one.get("there")]
    assert any("distributed.tp_size: 4" in one for one in there)  # checked as part of the case's settings
    for one in there:
        keys = re.findall(r"([\w.]+): ", " ".join(one))
        assert len(keys) == len({*keys}), one


@pytest.mark.parametrize(
    "command", [("check",), ("check", "--framework", "meshwright"), ("export", "--to", "automodel")]
)
def test_a_json_answer_is_no_recipe(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "plan.json").write_text(call("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--json").out)
    refused = call(command[0], "plan.json", *command[1:])
    assert refused.code == 2
    assert "is an answer printed with --json, not a recipe" in refused.err
    assert "--save plan.toml" in refused.err
    assert "deepspeed" not in refused.err
    call("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--save", "plan.toml")
    assert call("check", "plan.toml", "--gpus", "8xH100").code == 0


def test_a_command_that_is_slower_than_the_plan_says_so() -> None:
    asked = ("recommend", MOE, "--gpus", "14x8xH200", "--goal", "pretrain", "--json")
    answer = call(*asked).json
    note = next(one for one in answer["notes"] if "the megatron-bridge command" in one)
    there, here = map(float, re.findall(r"([\d.]+) s", note))
    assert here == pytest.approx(answer["estimate"]["step_s"], abs=0.01)
    assert there > 1.2 * here
    assert "--engine megatron" in note
    megatron = call(*asked, "--engine", "megatron").json
    assert megatron["estimate"]["step_s"] < there
    assert not any("megatron-bridge command" in one for one in megatron.get("notes", []))

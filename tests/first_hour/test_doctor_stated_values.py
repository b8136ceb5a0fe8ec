"""Logs of other frameworks: what they state wins over what is assumed, and a late failure hides nothing before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = ("--model", "Qwen3-14B", "--gpus", "24x4xA100-80")


def megatron(
    loss: Callable[[int], float] = lambda step: 2.0 - step * 1e-4,
    norm: Callable[[int], float] = lambda step: 0.6,
    tflops: str = "throughput per GPU (TFLOP/s/GPU): 187.0 | ",
    seconds: Callable[[int], float] = lambda step: 16.42,
) -> str:
    """Return the step lines of a Megatron-LM log without its arguments: batch 384, sequence length 8192, 96 GPUs."""
    return "".join(
        f" [2026-11-01 19:21:32] iteration {step:8d}/   19074 | consumed samples: {384 * step:12d} | elapsed time per "
        f"iteration (ms): {1e3 * seconds(step) * (1 + step % 3 / 500):.1f} | {tflops}learning rate: 3.0E-04 | global "
        f"batch size:   384 | lm loss: {loss(step) + step % 7 / 500:.6E} | loss scale: 1.0 | grad norm: "
        f"{norm(step):.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        for step in range(10, 1010, 10)
    )


def figures(answer: dict[str, Any]) -> dict[str, float]:
    return {one["name"]: one["measured"] for one in answer["figures"]}


def finding(answer: dict[str, Any], rule: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in answer["findings"] if one["rule"] == rule)
    return found


def test_the_sequence_length_is_computed_from_the_logged_tflops(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron())
    answer = meshwright("doctor", str(log), *MODEL, "--json").json
    assert figures(answer)["tokens/s/GPU"] == pytest.approx(384 * 8192 / 16.42 / 96, rel=0.01)
    assert figures(answer)["MFU"] == pytest.approx(187 / 312, rel=0.05)
    assert figures(answer)["TFLOP/s/GPU in the log"] == 187.0
    assert "as Megatron counts them" in answer["mfu_convention"]
    assert any("8192 is computed from 187 TFLOP/s/GPU" in note for note in answer["notes"])
    assert "speed.low-mfu" not in [one["rule"] for one in answer["findings"]]
    log.write_text(megatron(tflops="throughput per GPU (TFLOP/s/GPU): 93.5 | "))  # as if half as long
    halved = meshwright("doctor", str(log), *MODEL, "--json").json
    assert any("4096 is computed from" in note for note in halved["notes"])
    typed = meshwright("doctor", str(log), *MODEL, "data.seq_length=8192", "--json").json
    assert any("one of them is not what ran" in note for note in typed["notes"])


def test_an_assumed_length_gives_no_speed(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron(tflops=""))
    answer = meshwright("doctor", str(log), *MODEL, "--json").json
    assert not {"tokens/s/GPU", "MFU"} & {*figures(answer)}
    assert "data.seq_length=N" in answer["not_examined"]["speed.low-mfu"]
    assert any("sequence length: the estimate assumes 4096" in note for note in answer["notes"])
    typed = meshwright("doctor", str(log), *MODEL, "data.seq_length=8192", "--json").json
    assert figures(typed)["tokens/s/GPU"] == pytest.approx(384 * 8192 / 16.42 / 96, rel=0.01)


def test_the_rise_before_a_nan_is_reported(meshwright: Any, tmp_path: Path) -> None:
    def loss(step: int) -> float:
        return float("nan") if step > 900 else 1.9 + max(0, step - 500) / 80

    log = tmp_path / "train.log"
    log.write_text(megatron(loss, lambda step: 9.0 if step == 300 else 0.6))
    answer = meshwright("doctor", str(log), "--json").json
    nan = finding(answer, "loss.not-a-number")
    assert nan["steps"] == [910, 1000]
    assert "rising since step 500" in nan["message"]
    assert nan["remedies"][0]["try"] == ["resume from a checkpoint before step 500 with other samples"]
    assert any("the first in step 300 to 9" in one["name"] for one in nan["evidence"])
    assert finding(answer, "loss.diverging")["steps"] == [500, 900]


def test_a_nan_without_a_rise_names_none(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron(lambda step: float("nan") if step > 900 else 2.0 - step * 1e-4))
    (nan,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert "rising" not in nan["message"]
    assert nan["remedies"][0]["try"] == ["resume from an earlier checkpoint with other samples"]


STEP = "slurmstepd: error: *** STEP 4711.0 ON n013 CANCELLED AT 2026-11-03T03:13:01"
TIMEOUT = "[rank37]:[E1103 ProcessGroupNCCL.cpp:629] [Rank 37] Watchdog caught collective operation timeout: WorkNCCL()"


@pytest.mark.parametrize(
    ("lines", "rule", "words"),
    [
        ((f"{STEP} DUE TO NODE FAILURE ***",), "node-failure", "node n013 failed"),
        ((TIMEOUT, "srun: error: Node failure on n017"), "node-failure", "node n017 failed"),
        ((f"{STEP} DUE TO TIME LIMIT ***",), "time-limit", "time limit"),
        ((f"{STEP} DUE TO PREEMPTION ***",), "preemption", "preempted"),
        ((f"{STEP} ***",), "cancelled", "cancelled"),
        (("srun: error: n013: task 3: Out Of Memory",), "host-memory", "out of memory"),
        ((TIMEOUT, f"{STEP} DUE TO TIME LIMIT ***"), "hang", "timed out"),
    ],
)
def test_the_end_by_the_scheduler_is_named(
    meshwright: Any, tmp_path: Path, lines: tuple[str, ...], rule: str, words: str
) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron() + "\n".join(lines) + "\n")
    (found,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert found["rule"] == f"run.failed-{rule}"
    assert words in found["message"]
    asked = [" ".join(one["try"]) for one in found["remedies"]]
    assert any("more time" in one for one in asked) == (rule == "time-limit")
    assert any(one.startswith("sbatch --exclude=n01") for one in asked) == (rule == "node-failure")


def test_slower_steps_before_a_timeout_are_named(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron(seconds=lambda step: 16.4 if step <= 600 else 25.0) + TIMEOUT + "\n")
    answer = meshwright("doctor", str(log), "--json").json
    assert "slower since step 601" in finding(answer, "run.failed-hang")["message"]


@pytest.mark.parametrize("text", ["node failure", "srun: error: Node failure on n013", "NODE_FAIL"])
def test_a_node_failure_is_explained(meshwright: Any, text: str) -> None:
    assert "run.failed-node-failure" in meshwright("explain", text).out


def test_zero_gradients_and_a_recovered_slowdown_end_where_they_end(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron(norm=lambda step: 0.6 if step <= 600 else 0.0))
    (zero,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert (zero["rule"], zero["steps"]) == ("loss.zero-gradients", [601, 1000])
    log.write_text(megatron(seconds=lambda step: 25.0 if 300 < step <= 600 else 16.4))
    (slow,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert (slow["rule"], slow["steps"]) == ("speed.sustained-slowdown", [301, 600])
    log.write_text(megatron() + megatron())
    (again,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert again["rule"] == "run.restarts"
    assert "started again at step 1" in again["message"]

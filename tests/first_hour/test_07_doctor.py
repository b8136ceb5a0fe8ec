"""meshwright doctor: a run that became slower at some step, figures as logged, remedies once, CPU runs as CPU runs."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor.fake_runs import LOG_WRITERS, FakeRun, FakeStep, healthy

from meshwright import doctor
from meshwright.recipes import index

SLOWDOWNS = {"speed.sustained-slowdown", "speed.slowing-down"}


def paced(steps: int, seconds: Callable[[int], float], seed: int = 0, noise: float = 0.03) -> FakeRun:
    """Return a healthy run with a given pace."""
    rng = random.Random(seed)
    return healthy(steps, seed).changed(lambda one: replace(one, seconds=seconds(one.step) * (1 + rng.gauss(0, noise))))


def findings(run: FakeRun, writer: str = "megatron") -> dict[str, Any]:
    return {one.id: one for one in doctor.examine(doctor.read_text(LOG_WRITERS[writer](run), "log")).findings}


@pytest.mark.parametrize("writer", LOG_WRITERS)
def test_the_step_from_which_a_run_is_slower(meshwright: Any, tmp_path: Path, writer: str) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG_WRITERS[writer](paced(500, lambda step: 69.0 if step <= 290 else 95.0)))
    answer = meshwright("doctor", str(log))
    assert answer.code == 1
    assert "speed.sustained-slowdown" in answer.out
    text = " ".join(answer.out.split())
    assert "to step 290, then" in text
    assert "from step 291 on (38% longer)" in text
    if writer in ("own", "printed", "megatron", "automodel_json"):
        times = re.search(r"steps take ([\d.]+) s to step 290, then ([\d.]+) s from", text)
        assert times is not None
        assert [float(one) for one in times.groups()] == pytest.approx([69, 95], rel=0.01)
    assert "nvidia-smi" in text


def test_a_log_of_every_tenth_step_names_the_first_slow_step() -> None:
    run = paced(600, lambda step: 69.0 if step <= 290 else 95.0)
    (rows,) = run.starts
    thinned = replace(run, starts=(tuple(one for one in rows if one.step % 10 == 0),))
    assert findings(thinned)["speed.sustained-slowdown"].steps == (291, 600)


def test_several_changes_and_a_recovery_are_named_in_order() -> None:
    run = paced(500, lambda step: 2.0 if step <= 100 else 2.6 if step <= 250 else 3.4 if step <= 400 else 2.0)
    message = findings(run)["speed.sustained-slowdown"].message
    assert [f"from step {step} on" in message for step in (101, 251, 401)] == [True] * 3
    assert "% shorter" in message


def test_a_gradual_slowdown_is_called_gradual() -> None:
    found = findings(paced(300, lambda step: 2.0 * (1 + 0.4 * step / 300)))
    assert set(found) == {"speed.slowing-down"}
    assert "gradually" in found["speed.slowing-down"].message


def test_what_takes_the_extra_time_is_named() -> None:
    slow = paced(400, lambda step: 2.0 if step <= 200 else 3.0)
    for field, words in (("data_s", "loading data"), ("collectives_s", "communication")):

        def change(one: FakeStep, name: str = field) -> FakeStep:
            return replace(one, **{"collectives_s": 0.02, name: 1.02 if one.step > 200 else 0.02})

        assert words in findings(slow.changed(change), "own")["speed.sustained-slowdown"].message
    (rows,) = slow.starts
    restarted = findings(replace(slow, starts=(rows[:200], rows[200:])), "own")
    assert "the run was restarted there" in restarted["speed.sustained-slowdown"].message


def test_checkpoints_validation_warm_up_and_batch_ramp_up_are_no_slowdown() -> None:
    every = paced(400, lambda step: 2.0 if step % 50 else 9.0)  # a checkpoint or a validation
    assert not SLOWDOWNS & set(findings(every))
    starting = paced(400, lambda step: 2.0 * (1 + 0.8 * math.exp(-step / 30)))
    assert not SLOWDOWNS & set(findings(starting))
    lines = []
    for step in range(1, 301):  # Megatron's --rampup-batch-size: longer steps, as many samples per second
        samples = 32 * min(8, 1 + step // 30)
        lines.append(
            f" [2026-01-01 00:00:00] iteration {step:8d}/     300 | consumed samples: {step * samples:12d} | elapsed "
            f"time per iteration (ms): {1e3 * samples / 32 * (1.0 + 0.02 * math.sin(step)):.1f} | learning rate: "
            f"3.000000E-04 | global batch size: {samples:5d} | lm loss: {8 - step / 100:.6E} | loss scale: 1.0 | "
            "grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    assert not doctor.examine(doctor.read_text("\n".join(lines), "log")).findings


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    steps=st.integers(20, 700),
    kind=st.sampled_from(["normal", "uniform", "waves", "pauses"]),
    writer=st.sampled_from(["megatron", "torchtitan", "automodel"]),
)
def test_noise_of_five_per_cent_is_no_slowdown(seed: int, steps: int, kind: str, writer: str) -> None:
    rng = np.random.default_rng(seed)
    noise = 0.05 * (rng.uniform(-1, 1, steps) if kind == "uniform" else rng.normal(size=steps))
    if kind == "waves":  # neighbors are alike
        for place in range(1, steps):
            noise[place] = 0.7 * noise[place - 1] + math.sqrt(1 - 0.7**2) * noise[place]
    paces = np.exp(noise) * np.where((rng.random(steps) < 0.03) & (kind == "pauses"), 3.0, 1.0)
    run = healthy(steps, seed).changed(lambda one: replace(one, seconds=2.0 * float(paces[one.step - 1])))
    found = findings(run, writer)
    assert not SLOWDOWNS & set(found), [one.message for one in found.values()]


def diverging(step: FakeStep) -> FakeStep:
    behind = step.step - 380
    return step if behind <= 0 else replace(step, loss=2.5 + 0.1 * behind, grad_norm=1 + 3.0 * behind)


def test_loss_and_norm_are_quoted_as_logged(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG_WRITERS["megatron"](healthy(450).changed(diverging)))
    answer = meshwright("doctor", str(log), "--json").json
    figures = {one["name"]: one["measured"] for one in answer["figures"]}
    assert figures["last loss"] == pytest.approx(9.5)
    assert figures["last gradient norm"] == pytest.approx(211)
    (finding,) = answer["findings"]
    assert "to 9.5 in step 450" in finding["message"]
    assert {one["name"]: one["value"] for one in finding["evidence"]}["gradient norm in step 450"] == 211


def test_the_figures_before_a_nan_are_those_of_the_last_finite_step(meshwright: Any, tmp_path: Path) -> None:
    nan = float("nan")
    run = healthy(450).changed(diverging)
    log = tmp_path / "train.log"
    log.write_text(
        LOG_WRITERS["megatron"](
            run.changed(lambda one: replace(one, loss=nan, grad_norm=nan, bad=1) if one.step > 440 else one)
        )
    )
    text = " ".join(meshwright("doctor", str(log)).out.split())
    assert "grown to 181 in step 440" in text
    assert "last loss, step 440 (NaN or infinite after it) 8.5" in text
    assert "and recovered" not in text  # the run-up to the NaN is no spike


def test_a_remedy_is_printed_once(meshwright: Any, tmp_path: Path) -> None:
    def spiking(one: FakeStep) -> FakeStep:
        return replace(one, loss=one.loss * (4 if one.step in (60, 61, 90) else 1), bad=one.step == 100)

    log = tmp_path / "train.log"
    log.write_text(LOG_WRITERS["megatron"](healthy(150).changed(spiking)))
    answer = meshwright("doctor", str(log))
    assert "loss.spikes" in answer.out
    assert "loss.not-a-number" in answer.out
    assert answer.out.count("optimizer.lr=") == 1
    assert "the remedies of loss.not-a-number above" in answer.out
    listed = meshwright("doctor", str(log), "--json").json["findings"]
    assert all(one["remedies"] for one in listed)  # programs find them at every finding


def test_a_run_on_cpus_is_not_titled_with_the_gpus_of_its_recipe(meshwright: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = msgspec.to_builtins(index.load("llama3_8b_pretrain_config"))  # whose cluster is 2xH100
    text = LOG_WRITERS["own"](replace(healthy(30), world=2, gpu="H100", settings=recipe))
    (folder / "metrics.jsonl").write_text(text.replace('"peak_flops":989000000000000.0', '"peak_flops":null'))
    title = meshwright("doctor", str(folder)).out.splitlines()[0]
    assert "on CPU, 2 ranks," in title
    assert "H100" not in title
    answer = meshwright("doctor", str(folder), "--json").json
    assert (answer["gpus"], answer["cpu_ranks"]) == (None, 2)
    printed = tmp_path / "printed.log"
    printed.write_text(LOG_WRITERS["printed"](healthy(30)).replace("tokens/s/GPU", "tokens/s/rank"))
    assert "on CPU" in meshwright("doctor", str(printed)).out

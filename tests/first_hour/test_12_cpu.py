"""Training on a CPU: which number format is slow, and what a run does before its first step."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshwright.clusters import cluster
from meshwright.engine import cpu_speed
from meshwright.engine.cpu_speed import slow_precision_warning, slowdown
from meshwright.engine.metrics import Status
from meshwright.engine.metrics import status as status_module
from meshwright.engine.model_families import family_of
from meshwright.errors import InputError
from meshwright.recipes.index import load as load_recipe
from meshwright.recipes.overrides import apply

RECIPE = "qwen3_600m_pretrain_config"


def test_a_format_that_the_cpu_is_slow_in_is_measured_and_fp32_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("llama3_8b_sft_config")
    monkeypatch.setattr(cpu_speed, "slowdown", lambda compute: 104.4)
    text = slow_precision_warning(recipe, has_checkpoints=False)
    assert text.startswith("precision.compute=bf16: this CPU multiplies matrices 104 times slower in bf16 than in fp32")
    fixed = apply(recipe, [text.rsplit("faster: ")[-1]])  # the fix can be typed
    assert slow_precision_warning(fixed, has_checkpoints=False) == ""
    assert "--accept-changes" in slow_precision_warning(recipe, has_checkpoints=True)
    monkeypatch.setattr(cpu_speed, "slowdown", lambda compute: 1.4)
    assert slow_precision_warning(recipe, has_checkpoints=False) == ""


def test_the_measurement_is_quick_and_has_the_right_sign() -> None:
    slowdown("bf16")  # the first product sets up the library
    began = time.thread_time()
    ratio = slowdown("bf16")
    assert time.thread_time() - began < 0.1
    assert 0.05 < ratio < 2000


def test_the_status_is_a_changing_line_on_a_terminal_and_log_lines_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Status() as status:
        status.show("building the model: x")
        status.show("step 1")
    assert capsys.readouterr().err == "building the model: x\nstep 1\n"
    monkeypatch.setattr(status_module, "_is_terminal", lambda: True)
    monkeypatch.setattr(status_module, "TERMINAL_TICK_S", 0.01)
    with Status() as status:
        status.show("step 1")
        time.sleep(0.1)
    shown = capsys.readouterr().err
    assert shown.startswith("\r\x1b[2Kstep 1 …")
    assert "step 1 … 0 s" in shown
    assert shown.endswith("\r\x1b[2K")  # nothing stays on the line
    with Status(shown=False) as status:
        status.show("step 1")
    assert capsys.readouterr().err == ""


def test_a_run_reports_its_phases_on_stderr_and_its_gradients(meshwright: Any) -> None:
    done = meshwright("train", RECIPE, "--tiny", "train.steps=2", "precision.compute=fp16", "--json")
    memory = done.json["memory_gib"]
    assert memory["gradients"] == pytest.approx(memory["weights"])
    phases = ["importing torch", "preparing the data: mock", "building the model: qwen3_600m", "step 1"]
    assert [line for line in done.err.splitlines() if line in phases] == phases


@pytest.mark.parametrize("typed", ["cpu", "1xcpu", "2xCPU", "4 CPUs", "cpu only"])
def test_no_plan_is_made_for_cpus(meshwright: Any, typed: str) -> None:
    error = meshwright("recommend", "llama3-8b", "--goal", "sft", "--gpus", typed).err
    assert "plans are for GPUs; meshwright train RECIPE --tiny" in error


def test_a_training_without_gpus_is_measured_against_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.engine import validate

    def no_gpus(text: str) -> Any:
        if text == "auto":
            raise InputError("no GPU found", field="gpus", value=text)
        return cluster(text)

    monkeypatch.setattr(validate, "cluster", no_gpus)
    recipe = apply(load_recipe("llama3_8b_pretrain_config"), ["layout.tp=1", "train.global_batch_size=2"])
    config = family_of(recipe).config_for(recipe)
    monkeypatch.setattr(validate, "free_gib", lambda: 23.0)
    with pytest.raises(InputError, match=r"no GPU, and 23 GiB of its memory are free: .* of llama3_8b take 120 GiB"):
        validate.require_host_memory(validate.validate(recipe, config, None, 2), 2)
    monkeypatch.setattr(validate, "free_gib", lambda: 2000.0)  # more than two H100 have
    assert validate.validate(recipe, config, None, 2).capacity_gib == 1000.0
    monkeypatch.setattr(validate, "free_gib", lambda: None)  # unknown: then nothing is refused
    case = validate.validate(recipe, config, None, 2)
    validate.require_host_memory(case, 2)
    assert case.capacity_gib < 100

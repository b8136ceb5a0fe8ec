"""meshwright doctor: its exit codes, its JSON, and a run of our own engine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.fake_runs import LOG_WRITERS, OOM, at_estimated_speed, case, healthy
from tests.doctor.planted import FAULTS

KEYS = {
    "schema", "ok", "kind", "path", "file", "recipe", "model", "gpus", "cpu_ranks", "engine", "steps", "last_step",
    "total_steps", "starts", "figures", "mfu_convention", "findings", "looked_for", "not_examined", "notes",
}  # fmt: skip
FINDING_KEYS = {"rule", "severity", "message", "steps", "lines", "evidence", "remedies", "fix"}
REMEDY_KEYS = {"try", "what", "why", "there", "peak_gib", "fits", "step_ratio"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


@pytest.mark.parametrize("writer", LOG_WRITERS)
def test_a_healthy_run_has_no_findings(meshwright: Any, log: Path, writer: str) -> None:
    log.write_text(LOG_WRITERS[writer](healthy()))
    answer = meshwright("doctor", str(log))
    assert answer.code == 0
    assert "no findings" in answer.out
    assert "tokens/s/GPU" in answer.out
    result = meshwright("doctor", str(log), "--json").json
    assert set(result) == KEYS
    assert result["ok"] is True
    assert result["findings"] == []


def test_what_is_found_has_figures_steps_and_overrides(meshwright: Any, log: Path) -> None:
    import random

    log.write_text(LOG_WRITERS["own"](FAULTS["slow data"].plant(healthy(40), random.Random(0))))
    answer = meshwright("doctor", str(log), "--json")
    assert answer.code == 1
    (finding,) = answer.json["findings"]
    assert set(finding) == FINDING_KEYS
    assert finding["rule"] == "speed.slow-data"
    assert finding["steps"] == [2, 40]
    assert finding["fix"] == ["data.workers=8"]
    assert all(set(remedy) == REMEDY_KEYS for remedy in finding["remedies"])
    shown = meshwright("doctor", str(log))
    assert shown.code == 1
    assert "speed.slow-data" in shown.out
    assert "data.workers=8" in shown.out


def test_recipe_gpus_and_overrides_bring_the_estimate(meshwright: Any, log: Path) -> None:
    made = case("llama3_8b_pretrain_config", "8xH100", "automodel")
    log.write_text(LOG_WRITERS["automodel"](at_estimated_speed(made, 30)))
    asked = ("doctor", str(log), "--recipe", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--json")
    result = meshwright(*asked)
    assert result.code == 0
    figures = {figure["name"]: figure for figure in result.json["figures"]}
    assert figures["MFU"]["measured"] == pytest.approx(figures["MFU"]["estimate"], rel=0.02)
    assert result.json["engine"] == "automodel"
    other = meshwright(*asked, "layout.recompute=full").json
    assert other["figures"][0]["estimate"] != result.json["figures"][0]["estimate"]


def test_the_batch_that_megatron_tells_is_the_one_that_ran(meshwright: Any, log: Path) -> None:
    lines = LOG_WRITERS["megatron"](healthy(30)).splitlines(keepends=True)
    lines = [line for line in lines if " ....." not in line]  # without its arguments
    log.write_text(re.sub(r"throughput per GPU [^|]*[|]", "", "".join(lines)))  # nor what tells the sequence length
    asked = ("doctor", str(log), "--recipe", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--json")
    (own,) = (one for one in meshwright(*asked).json["figures"] if one["name"] == "tokens/s/GPU")
    assert own["measured"] == pytest.approx(64 * 8192 / 2.0 / 8, rel=0.02)
    result = meshwright(*asked, "train.global_batch_size=2048").json
    assert any("is impossible" in note for note in result["notes"])


def test_a_full_gpu_is_reported_with_layouts_that_fit(meshwright: Any, log: Path) -> None:
    fake_run = replace(healthy(2), final_lines=(OOM,))
    log.write_text(LOG_WRITERS["megatron"](fake_run))
    words = ("layout.micro_batch_size=4", "layout.recompute=none")
    answer = meshwright("doctor", str(log), "--recipe", "llama3_8b_pretrain_config", "--gpus", "8xH100", *words)
    assert answer.code == 1
    assert "memory.out-of-memory" in answer.out
    assert "--micro-batch-size 2" in answer.out
    assert "GiB, step time ×" in answer.out


def test_bad_input_is_reported_with_a_fix(meshwright: Any, log: Path) -> None:
    log.write_text("nothing of the kind\n")
    unknown = meshwright("doctor", str(log), "--json")
    assert unknown.code == 2
    assert "Supported:" in unknown.json["error"]["message"]
    missing = meshwright("doctor", str(log.with_name("trian.log")))
    assert missing.code == 2
    assert "train.log" in missing.err
    log.write_text(LOG_WRITERS["automodel"](healthy()))
    unheard = meshwright("doctor", str(log), "layout.tp=2")
    assert unheard.code == 2
    assert "--recipe" in unheard.err
    wrong = meshwright("doctor", str(log), "--recipe", "llama3_8b_pretrain_config", "--gpus", "16xH100")
    assert wrong.code == 2
    assert "--gpus 8xH100" in wrong.err
    assert meshwright("doctor", str(log), "--recipe", "lama3_8b_pretrain_config").code == 2


def test_a_baseline_holds_the_network_to_account(meshwright: Any, log: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.log"
    small.write_text(LOG_WRITERS["automodel"](healthy(30, seconds=2.0)))
    log.write_text(LOG_WRITERS["automodel"](replace(healthy(30, seconds=4.0), world=16, samples=128)))
    answer = meshwright("doctor", str(log), "--baseline", str(small), "--json")
    assert answer.code == 1
    assert [finding["rule"] for finding in answer.json["findings"]] == ["speed.slow-network"]


def test_a_run_of_our_engine_is_read(meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.engine.tiny.MICRO_BATCHES", 2)
    folder = tmp_path / "run"
    asked = ("train", "llama3_8b_pretrain_config", "--tiny", "--out", str(folder), "train.steps=7")
    assert meshwright(*asked, "train.log_every=1", "checkpoint.export=none", "--json").code == 0
    answer = meshwright("doctor", str(folder), "--json")
    result = answer.json
    assert answer.code == 0, result["findings"]
    assert (result["kind"], result["recipe"], result["last_step"]) == ("meshwright", "llama3_8b_pretrain_config", 7)
    assert "a run on GPUs" in result["not_examined"]["speed.low-mfu"]
    assert {figure["name"] for figure in result["figures"]} >= {"step time", "tokens/s/rank", "peak memory"}
    named = meshwright("doctor", str(folder)).out
    assert "step 7 of 7" in named
    assert "on CPU, 1 rank," in named

"""Issue 3, item 8: trackers get steps and validations, a resumed run continues, and a broken tracker ends no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.metrics import trackers
from meshwright.engine.metrics.record import StepRecord, ValidationRecord
from meshwright.errors import InputError

TINY = ("train", "llama3_8b_sft_config", "--tiny", "--dataset", "mock", "--mlflow", "checkpoint.export=none")
HEADER = {"recipe": "ours", "settings": {"layout": {"tp": 2}, "train": {"steps": 4}}}


def step(number: int, loss: float = 2.0) -> StepRecord:
    return StepRecord(
        step=number,
        loss=loss,
        lr=1e-3,
        grad_norm=None,
        tokens=8,
        step_s=0.5,
        tokens_per_s_per_gpu=16.0,
        tflops_per_gpu=0.1,
        mfu=None,
        parts_s={"forward": 0.2},
    )


def validation(number: int, loss: float) -> ValidationRecord:
    return ValidationRecord(step=number, loss=loss, perplexity=1.0, tokens=8, samples=2, seconds=0.1, best=True)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow")  # seconds: not while tests are collected
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return mlflow.MlflowClient(f"file:{tmp_path / 'mlruns'}")


def history(client: Any, run: str, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in client.get_metric_history(run, name)]


def test_a_resumed_run_is_one_run_of_mlflow(client: Any, tmp_path: Path) -> None:
    for numbers in ((1, 2), (2, 3)):  # the second part repeats a step, as after a checkpoint
        sink = trackers.TrackerSink("mlflow", tmp_path, HEADER)
        run = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
        assert client.get_run(run).info.status == "RUNNING"
        for number in numbers:
            sink.step(step(number, loss=1 / number))
        sink.validation(validation(numbers[-1], 1.5))
        sink.close()
        assert client.get_run(run).info.status == "FINISHED"
    assert history(client, run, "train/loss") == [(1, 1.0), (2, 0.5), (2, 0.5), (3, 1 / 3)]
    assert history(client, run, "validation/loss") == [(2, 1.5), (3, 1.5)]
    assert client.get_run(run).data.params == {"layout.tp": "2", "train.steps": "4"}
    assert len(client.search_runs([client.get_experiment_by_name("meshwright").experiment_id])) == 1


@pytest.mark.slow
def test_a_training_and_its_resumption_are_one_run_of_mlflow(meshwright: Any, client: Any, tmp_path: Path) -> None:
    typed = [*TINY, "--out", str(tmp_path / "run"), "train.eval_every=1", "train.eval_steps=1"]
    first = meshwright(*typed, "train.steps=2", "--json")
    assert first.code == 0, first.err
    run = json.loads((tmp_path / "run" / "trackers.json").read_text())["mlflow"]
    assert [number for number, _ in history(client, run, "train/loss")] == [1, 2]
    again = meshwright(*typed, "train.steps=3", "--accept-changes", "--json")
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "run" / "trackers.json").read_text())["mlflow"] == run
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for kind, name in (("step", "train/loss"), ("validation", "validation/loss")):
        logged = [(line["step"], line["loss"]) for line in lines if line["kind"] == kind]
        assert history(client, run, name) == logged
        assert [number for number, _ in logged] == [1, 2, 3]
    assert client.get_run(run).data.params["train.steps"] == "2"
    assert client.get_run(run).info.status == "FINISHED"


@pytest.mark.slow  # wandb starts a process of its own
def test_wandb_offline_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_PROJECT": "ours"}.items():
        monkeypatch.setenv(name, value)
    ids = set()
    for numbers in ((1, 2), (2, 3)):  # the second part repeats a step, as after a checkpoint
        sink = trackers.TrackerSink("wandb", tmp_path, HEADER)
        for number in numbers:
            sink.step(step(number))
        sink.validation(validation(numbers[-1], 1.5))
        sink.close()
        ids.add(json.loads((tmp_path / "trackers.json").read_text())["wandb"])
    assert len(ids) == 1
    written = [file.read_bytes() for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(written) == 2
    assert all(b"train/loss" in one and b"validation/loss" in one for one in written)


class Broken:
    """A tracker whose server goes away after the first step."""

    def __init__(self, *_: Any) -> None:
        self.id, self.sent = "x", 0

    def log(self, values: Any, step: int) -> None:
        self.sent += 1
        if step > 1:
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise AssertionError("closed after it failed")


def test_a_tracker_that_fails_is_warned_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.CLIENTS, "wandb", Broken)
    warned: list[str] = []
    sink = trackers.TrackerSink("wandb", tmp_path, HEADER, warned.append)
    for number in (1, 2, 3):
        sink.step(step(number))
    sink.validation(validation(3, 1.0))
    sink.close()
    assert warned == ["wandb stopped working (the server is gone); training continues without it"]


def test_a_tracker_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_login(*_: Any) -> Any:
        raise RuntimeError("no API key configured")

    monkeypatch.setitem(trackers.CLIENTS, "wandb", no_login)
    with pytest.raises(InputError, match="no API key configured") as refused:
        trackers.TrackerSink("wandb", tmp_path, HEADER)
    assert "WANDB_MODE=offline" in " ".join(refused.value.fix)


def test_a_missing_package_is_named_before_torch_is_imported(meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.extras._importable", lambda module: module not in ("wandb", "mlflow"))
    for tracker, package in trackers.PACKAGES.items():
        ended = meshwright("train", "llama3_8b_sft_config", "--tiny", f"--{tracker}")
        assert ended.code == 2
        assert package in ended.err
        assert "[track]" in ended.err

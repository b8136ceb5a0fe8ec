"""`meshwright rehearse` as a user types it on a machine without a GPU, and on its CPU with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import which
from typing import Any

import pytest

RECIPE = "llama3_8b_pretrain_config"
no_gpu = pytest.mark.skipif(which("nvidia-smi") is not None, reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@no_gpu
def test_without_a_gpu_the_command_offers_the_dry_run(meshwright: Any) -> None:
    done = meshwright("rehearse", RECIPE, "--gpus", "8xH100", "layout.tp=1")
    assert done.code == 2
    assert "times kernels on a GPU, and this machine has none" in done.err
    assert f"meshwright dryrun {RECIPE} --gpus 8xH100 layout.tp=1" in done.err


def test_bad_options_are_refused_before_anything_runs(meshwright: Any) -> None:
    for words, text in (
        (("--device", "cpu"), "8.0 billion parameters; a CPU rehearses at most 0.2 billion"),
        (("--device", "cpu", "--tiny", "--as", "H100"), "these run on a CPU"),
        (("--device", "cpu", "--tiny", "--trace", "step.txt"), "is a JSON file"),
        (("--device", "cpu", "--tiny", "--out", "no/such/folder.json"), "its folder does not exist"),
        (("--device", "cpu", "--tiny", "--network", "missing.json"), "not a file of measured collectives"),
        (("--device", "tpu"), "cuda"),
    ):
        done = meshwright("rehearse", RECIPE, "--gpus", "2xH100", *words)
        assert done.code == 2, (words, done.err)
        assert text in done.err
    assert not list(Path().iterdir())


def test_a_small_model_is_rehearsed_on_the_cpu(meshwright: Any) -> None:
    words = (
        "--device",
        "cpu",
        "--tiny",
        "--trace",
        "step.json",
        "--out",
        "rehearsal.json",
        "data.seq_length=16",
        "--seconds",
        "1",
    )
    done = meshwright("rehearse", RECIPE, "--gpus", "2xH100", *words, "--json")
    assert done.code == 0, done.err
    answer = done.json
    assert sum(answer["step_parts_s"].values()) == pytest.approx(answer["step_s"], rel=1e-3)
    assert answer["band"]["step_low_s"] < answer["step_s"] < answer["band"]["step_high_s"]
    assert answer["device"] == "cpu"
    assert answer["mfu"] is None
    assert json.loads(Path("step.json").read_text())["traceEvents"]
    assert json.loads(Path("rehearsal.json").read_text())["settings"]["name"] == RECIPE
    refused = meshwright("calibrate", "rehearsal.json")
    assert refused.code == 2
    assert "timed on a CPU" in refused.err


def test_calibrate_learns_from_a_rehearsal(meshwright: Any) -> None:
    settings = meshwright("recipe", RECIPE, "--json").json["recipe"]
    found = {"kind": "rehearsal", "settings": settings, "cluster": "8xH200", "step_s": 100.0, "allocated_gib": 50.0}
    found |= {"scaled_to": None, "mfu": 0.4, "device": "NVIDIA H200"}
    Path("rehearsal.json").write_text(json.dumps(found))
    done = meshwright("calibrate", "rehearsal.json", "--json")
    assert done.code == 0, done.err
    (profile,) = done.json["profiles"]
    assert profile["gpu"] == "H200"
    assert profile["runs"] == 1
    assert profile["clock"] != 1.0
    Path("rehearsal.json").write_text(json.dumps(found | {"scaled_to": "H100"}))
    refused = meshwright("calibrate", "rehearsal.json")
    assert refused.code == 2
    assert "scaled from NVIDIA H200 to H100" in refused.err

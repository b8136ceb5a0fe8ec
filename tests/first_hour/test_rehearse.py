"""`meshwright rehearse` as a user types it on a machine without a GPU, and on its CPU with a small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import which
from typing import Any

import msgspec
import pytest

from meshwright.rehearsal.run_plan import Device

RECIPE = "llama3_8b_pretrain_config"
no_gpu = pytest.mark.skipif(which("nvidia-smi") is not None, reason="this machine has a GPU")


@no_gpu
def test_without_a_gpu_the_command_offers_the_dry_run(meshwright: Any) -> None:
    done = meshwright("rehearse", RECIPE, "--gpus", "8xH100", "layout.tp=1")
    assert done.code == 2
    assert "times kernels on an NVIDIA GPU: no GPU found on this machine" in done.err
    assert f"meshwright dryrun {RECIPE} --gpus 8xH100 layout.tp=1" in done.err


def test_bad_options_are_refused_before_anything_runs(meshwright: Any) -> None:
    for words, text in (
        (("--device", "cpu"), "8.0 billion parameters; a CPU rehearses at most 0.2 billion"),
        (("--device", "cpu", "--tiny", "--as", "H100"), "these run on a CPU"),
        (("--device", "cpu", "--tiny", "--trace", "step.txt"), "must end in .json"),
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


def test_rehearsals_of_a_family_narrow_the_band_of_its_recommendations(meshwright: Any) -> None:
    target = ("llama3-8b", "--gpus", "8xH200", "--goal", "pretrain")
    before = meshwright("recommend", *target, "--json").json["estimate"]["band"]["step_pct"]
    assert before > 10
    for number, changes in enumerate(("layout.micro_batch_size=1", "layout.recompute=full", "layout.tp=2")):
        recipe = meshwright("recipe", RECIPE, changes, "--json").json["recipe"]
        step = meshwright("estimate", RECIPE, "--gpus", "8xH200", changes, "--json").json["estimate"]["step_s"]
        found = {"kind": "rehearsal", "settings": recipe, "cluster": "8xH200", "allocated_gib": 50.0, "mfu": 0.4}
        found |= {"scaled_to": None, "device": "NVIDIA H200", "step_s": 1.08 * step * (1 + 0.01 * number)}
        Path(f"{number}.json").write_text(json.dumps(found))
    done = meshwright("calibrate", "0.json", "1.json", "2.json", "--out", "mine.toml")
    assert done.code == 0, done.err
    after = meshwright("recommend", *target, "--calibration", "mine.toml", "--json").json["estimate"]["band"]
    assert after["step_pct"] < 10
    other = meshwright("recommend", "qwen3-8b", *target[1:], "--calibration", "mine.toml", "--json").json
    assert other["estimate"]["band"]["step_pct"] > 10  # of a family without runs


def test_the_report_names_parts_memory_limits_and_alternatives(
    meshwright: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.rehearsal.results import rehearsal_result

    from meshwright.api import rehearsal as verb

    monkeypatch.setattr(verb, "_device", lambda request: Device("cuda"))
    monkeypatch.setattr(verb, "_run", lambda *_: rehearsal_result())
    done = meshwright("rehearse", RECIPE, "--gpus", "2x8xH100", "--plot", "step.svg", "--trace", "step.json")
    assert done.code == 0, done.err
    for text in ("1.900 s (1.767 to 2.042, ±7.5 %)", "MFU 31.0 %", "pipeline bubble", "50.5 GiB allocated", "fits"):
        assert text in done.out
    assert "scaled to H100 (times 1.066)" in done.out
    assert Path("step.svg").read_text().startswith("<?xml")
    names = [event["name"] for event in json.loads(Path("step.json").read_text())["traceEvents"]]
    assert "forward 0" in names
    assert "dp all_gather" in names


def test_alternatives_are_the_best_other_layouts(meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.rehearsal.results import rehearsal_result

    from meshwright.api import rehearsal as verb

    tried = []

    def run(request: Any, recipe: Any, *_: Any) -> Any:
        tried.append(recipe.layout)
        return msgspec.structs.replace(rehearsal_result(), step_s=2.0 + len(tried), alternatives=())

    monkeypatch.setattr(verb, "_device", lambda request: Device("cuda"))
    monkeypatch.setattr(verb, "_run", run)
    done = meshwright("rehearse", RECIPE, "--gpus", "8xH100", "--alternatives", "--json")
    assert done.code == 0, done.err
    assert len(tried) == 3
    assert len(set(map(repr, tried))) == 3
    first, second = done.json["alternatives"]
    assert first["step_s"] == 4.0
    assert first["speedup"] == 0.75
    assert second["step_s"] == 5.0
    assert all(change.startswith(("layout.", "kernels.")) for change in (*first["changes"], *second["changes"]))


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    words = [
        "rehearse",
        RECIPE,
        "--gpus",
        "2xH100",
        "--device",
        "cpu",
        "--tiny",
        "--trace",
        "t.json",
        "--out",
        "r.json",
    ]
    command = [sys.executable, "-W", "ignore", "-m", "meshwright", *words, "--seconds", "600"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        children = _children(process.pid)
        for child in children:
            assert Path(f"/proc/{child}").exists()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(tmp_path.iterdir())


def _children(parent: int) -> list[str]:
    """Return the child processes of a process, once there are any."""
    for _ in range(600):
        found = Path(f"/proc/{parent}/task/{parent}/children")
        if found.exists() and found.read_text().split():
            return found.read_text().split()
        time.sleep(0.1)
    raise AssertionError("no rank was started")


def test_for_a_torchtitan_file_our_engine_stands_in_and_its_step_is_projected(
    meshwright: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.rehearsal.results import rehearsal_result

    from meshwright.api import rehearsal as verb

    monkeypatch.setattr(verb, "_device", lambda request: Device("cuda"))
    monkeypatch.setattr(verb, "_run", lambda *_: rehearsal_result())
    assert meshwright("export", RECIPE, "--to", "torchtitan", "--gpus", "8xH100", "--out", "titan").code == 0
    done = meshwright("rehearse", "titan/config.toml", "--gpus", "8xH100", "--json")
    assert done.code == 0, done.err
    assert done.json["other_engine"]["engine"] == "torchtitan"
    assert done.json["other_engine_step_s"] > done.json["step_s"]
    assert "torchtitan itself: about" in done.json["notes"][-1]

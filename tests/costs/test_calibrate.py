"""Calibration from measured points and from runs, and its effect on an estimate."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright import InputError, recommend
from meshwright.clusters import gpu
from meshwright.costs import calibrate
from meshwright.costs.calibration import shipped
from meshwright.costs.measurements import read

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks" / "results" / "measure_h200_2026-11-15.json"


def points() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(H200.read_text())["points"]
    return found


def test_the_measured_h200_gives_shares_of_its_peaks() -> None:
    own = calibrate.from_points(points(), gpu("H200"))
    assert own.matmul["bf16"] == pytest.approx(0.69, abs=0.02)
    assert own.matmul["fp8"] == pytest.approx(0.65, abs=0.02)
    assert own.hbm == pytest.approx(0.89, abs=0.02)
    assert own.attention is not None
    assert 0.6 < own.attention < 0.7


def test_a_profile_round_trips_through_its_file(tmp_path: Path) -> None:
    own = calibrate.from_points(points(), gpu("H200"), "a test")
    file = tmp_path / "mine.toml"
    file.write_text(calibrate.to_text(own))
    loaded = calibrate.load(file)
    assert loaded.gpus["hopper"].matmul["bf16"] == own.matmul["bf16"]
    assert loaded.gpus["ampere"] == shipped().gpus["ampere"]


def test_a_faster_machine_takes_less_time(tmp_path: Path) -> None:
    file = tmp_path / "fast.toml"
    file.write_text('gpu = "H100"\nclock = 1.5\n')
    usual, fast = (recommend("llama3-8b", "8xH100", "pretrain", calibration=c) for c in (None, str(file)))
    assert fast.estimate.step_s < 0.85 * usual.estimate.step_s


def shipped_rows(source: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / "data" / "measurements.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["source"] == source]


def write_table(rows: list[dict[str, str]], path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_runs_twice_as_slow_give_about_half_the_clock(tmp_path: Path) -> None:
    rows = [r for r in shipped_rows("fms_fsdp") if r["step_time_s"] or r["tokens_per_s_per_gpu"]]
    slow = []
    for row in rows:
        changed = dict(row)
        if row["step_time_s"]:
            changed["step_time_s"] = str(2 * float(row["step_time_s"]))
        if row["tokens_per_s_per_gpu"]:
            changed["tokens_per_s_per_gpu"] = str(float(row["tokens_per_s_per_gpu"]) / 2)
        slow.append(changed)
    usual = {p.gpu: p for p in calibrate.from_runs(read(write_table(rows, tmp_path / "usual.csv")), "usual.csv")}
    slower = {p.gpu: p for p in calibrate.from_runs(read(write_table(slow, tmp_path / "slow.csv")), "slow.csv")}
    for name, profile in usual.items():
        assert profile.error_pct is not None
        assert profile.error_pct < 15
        assert slower[name].clock < 0.75 * profile.clock


NONSENSE = ["", "gpu = 3", "\x00", 'gpu = "H1000"']
NONSENSE += [f'gpu = "H100"\n{line}' for line in ("clok = 1.0", "clock = -1.0", "hbm = 70.0")]


@pytest.mark.parametrize("text", NONSENSE)
def test_an_invalid_profile_is_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InputError):
        calibrate.load(file)


def test_points_without_matmuls_are_rejected() -> None:
    with pytest.raises(InputError):
        calibrate.from_points([{"kind": "launch", "s": 1e-6}], gpu("H200"))

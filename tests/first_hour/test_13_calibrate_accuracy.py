"""accuracy and calibrate with a newcomer's own table and own run folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.doctor.fake_runs import LOG_WRITERS, at_estimated_speed, case, healthy

HEADER = "framework,model,goal,gpus,seq_length,micro_batch_size,global_batch_size,tp,recompute,step_time_s"


@pytest.fixture
def table(meshwright: Any, tmp_path: Path) -> Path:
    """The template as it is printed."""
    path = tmp_path / "runs.csv"
    path.write_text(meshwright("accuracy", "--template").out)
    return path


def write(path: Path, *rows: str, header: str = HEADER) -> str:
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def test_the_template_explains_every_column_and_is_accepted_as_it_is(meshwright: Any, table: Path) -> None:
    lines = table.read_text().splitlines()
    columns = next(line for line in lines if not line.startswith("#")).split(",")
    assert all(any(line.startswith(f"# {name} ") for line in lines) for name in columns)
    assert len(columns) <= 24
    answer = meshwright("accuracy", str(table))
    assert answer.code == 0
    assert "2 of 2 rows predicted" in answer.out
    assert "None" not in answer.out
    assert meshwright("calibrate", "--template").out == table.read_text()
    assert meshwright("accuracy", "--template", "--json").json["template"] == table.read_text()
    fitted = meshwright("calibrate", str(table))
    assert fitted.code == 0
    assert "2 runs are few" in fitted.out


def test_a_run_of_meshwright_is_compared_with_what_estimate_says(meshwright: Any, tmp_path: Path) -> None:
    rows = [
        "meshwright,llama3-8b,pretrain,8xH100,8192,1,64,2,selective,10",
        "MeshWright,llama3_8b,,8xH100,4096,2,32,1,,5",
    ]
    found = meshwright("accuracy", write(tmp_path / "runs.csv", *rows), "--json")
    assert found.code == 0, found.err
    asked = ("--gpus", "8xH100", "--goal", "pretrain", "layout.tp=2", "layout.recompute=selective", "--json")
    eager = "kernels.compile=false"  # as a row says nothing about it
    more = ("train.global_batch_size=64", "data.seq_length=8192", "layout.micro_batch_size=1", eager)
    estimate = meshwright("estimate", "llama3-8b", *asked, *more).json["estimate"]["step_s"]
    errors = found.json["step_time"]
    assert errors["rows"] == 2
    (only,) = json.loads(json.dumps(list(errors["by_source"].values())))
    first = meshwright("accuracy", write(tmp_path / "runs.csv", rows[0]), "--json").json["step_time"]
    assert first["by_source"]["runs"]["bias_pct"] == pytest.approx(100 * (estimate / 10 - 1), abs=0.01)
    assert only["rows"] == 2


def test_nothing_measured_of_a_kind_is_said_in_words(meshwright: Any, tmp_path: Path) -> None:
    one = write(tmp_path / "one.csv", "torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,1,selective,1.3")
    out = meshwright("accuracy", one).out
    assert "memory: no row measured it" in out
    assert "None" not in out
    oom = write(tmp_path / "oom.csv", "llama3-70b,1xH100,8192,8,oom", header="model,gpus,seq_length,gbs,status")
    out = meshwright("accuracy", oom).out
    assert "step time: no row measured it" in out
    assert "1 of 1 that ran out of memory" in out
    assert "None" not in out


GOOD = "torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,1,selective,1.3"


@pytest.mark.parametrize(
    ("row", "column", "value", "fix"),
    [
        ("torchtitan,lama3-8b,pretrain,8xH100,8192,1,8,1,selective,1.3", "model", "lama3-8b", "llama3_8b"),
        ("torchtian,llama3-8b,pretrain,8xH100,8192,1,8,1,selective,1.3", "framework", "torchtian", "torchtitan"),
        ("torchtitan,llama3-8b,pretrian,8xH100,8192,1,8,1,selective,1.3", "goal", "pretrian", "pretrain"),
        ("torchtitan,llama3-8b,pretrain,8xH1000,8192,1,8,1,selective,1.3", "gpus", "8xH1000", "H100"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8k,1,8,1,selective,1.3", "seq_length", "8k", "8"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,1,selective,1.3 s", "step_time_s", "1.3 s", "1.3"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,1,selective,-1", "step_time_s", "-1", "1"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,3,selective,1.3", "tp", "3", "gpus"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8192,1,9,1,selective,1.3", "global_batch_size", "9", "8"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,1,some,1.3", "recompute", "some", "none"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8192,1,8,1,selective,", "step_time_s", "", "fill one of them"),
        ("torchtitan,llama3-8b,pretrain,8xH100,8,192,1,8,1,selective,1.3", "after the last", "1.3", "quote"),
    ],
)
def test_an_error_names_row_column_value_and_fix(
    meshwright: Any, tmp_path: Path, row: str, column: str, value: str, fix: str
) -> None:
    for command in ("accuracy", "calibrate"):
        answer = meshwright(command, write(tmp_path / "runs.csv", GOOD, row), "--json")
        assert answer.code == 2
        error = answer.json["error"]
        assert "row 2 (line 3)" in error["field"]
        assert column in error["field"]
        assert error["value"] == value
        assert any(fix in one for one in error["fix"]), error


def test_columns_are_missing_misspelled_or_unknown(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    missing = meshwright("accuracy", write(path, "llama3-8b,8xH100,1.2", header="model,gpus,step_time_s"))
    assert missing.code == 2
    assert "seq_length, global_batch_size" in missing.err
    assert "--template" in missing.err
    header = "model,gpus,seq_length,global_batch_size,step_time"
    typo = meshwright("accuracy", write(path, "llama3-8b,8xH100,8192,8,1.2", header=header))
    assert typo.code == 2
    assert "did you mean step_time_s?" in typo.err
    semicolons = header.replace(",", ";") + "_s;comment"
    noted = meshwright("accuracy", write(path, "llama3-8b;8xH100;8192;8;1.2;mine", header=semicolons))
    assert noted.code == 0
    assert "ignored columns: comment" in noted.out
    comma = meshwright("accuracy", write(path, "llama3-8b;8xH100;8192;8;1,2;mine", header=semicolons))
    assert comma.code == 2
    assert "1.2" in comma.err


def run_folder(folder: Path, slower: float, *changes: str) -> None:
    """Write the metrics of a run of our engine on GPUs, slower than estimated by a factor."""
    made = case("llama3_8b_pretrain_config", "8xH100", "meshwright", *changes)
    run = replace(at_estimated_speed(made, 30, slower=slower), settings=msgspec.to_builtins(made.recipe))
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(LOG_WRITERS["own"](run))


def test_own_run_folders_give_a_profile_and_what_it_is_worth(meshwright: Any, tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "mine.toml"
    for number, change in enumerate(("layout.tp=1", "layout.tp=2", "layout.recompute=full", "data.seq_length=4096")):
        run_folder(runs / f"run-{number}", 1.3 + 0.01 * number, change)
    cpu = runs / "cpu"
    cpu.mkdir()
    text = LOG_WRITERS["own"](healthy(30)).replace('"peak_flops":989000000000000.0', '"peak_flops":null')
    (cpu / "metrics.jsonl").write_text(text)
    compared = meshwright("accuracy", str(runs))
    assert compared.code == 0, compared.err
    assert "4 of 4 rows predicted" in compared.out
    assert "it ran on CPUs" in " ".join(compared.out.split())
    calibrated = meshwright("calibrate", str(runs), "--out", str(out))
    assert calibrated.code == 0, calibrated.err
    text = " ".join(calibrated.out.split())
    assert "an improvement for runs that are not in the table" in text
    assert "4 runs are few" in text
    assert "cpu: it ran on CPUs" in text  # what was left out is not silent
    (profile,) = meshwright("calibrate", *map(str, sorted(runs.glob("run-*"))), "--json").json["profiles"]
    assert profile["runs"] == 4
    assert profile["error_left_out_pct"] < 5 < 20 < profile["error_before_pct"] < 30
    asked = ("estimate", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--json")
    before = meshwright(*asked).json["estimate"]["step_s"]
    after = meshwright(*asked, "--calibration", str(out)).json["estimate"]["step_s"]
    assert 1.2 < after / before < 1.45


def test_a_folder_without_a_usable_run_is_an_error(meshwright: Any, tmp_path: Path) -> None:
    answer = meshwright("calibrate", str(tmp_path), "--json")
    assert answer.code == 2
    assert "metrics.jsonl" in answer.json["error"]["message"]
    assert answer.json["error"]["fix"]


def test_a_column_of_milliseconds_is_not_merely_renamed(meshwright: Any, tmp_path: Path) -> None:
    header = "model,gpus,micro_batch,global_batch,seq,step_time_ms"
    answer = meshwright("calibrate", write(tmp_path / "steps.csv", "llama3-8b,8xH100,1,64,8192,3920", header=header))
    assert answer.code == 2
    assert "rename micro_batch to micro_batch_size | rename global_batch to global_batch_size" in answer.err
    assert "rename step_time_ms to step_time_s, and divide its values by 1,000 (milliseconds)" in answer.err
    header = "model,gpus,global_batch_size,seq,step_ms"
    answer = meshwright("calibrate", write(tmp_path / "ms.csv", "llama3-8b,8xH100,64,8192,3920", header=header))
    assert "rename it to step_time_s, and divide its values by 1,000 (milliseconds)" in answer.err

"""share: a run's measurement as a file for a pull request, with nothing private in it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.doctor.fake_runs import LOG_WRITERS, FakeRun, at_estimated_speed, case

import meshwright
from meshwright import InputError
from meshwright.costs.measurement_row import TABLE_COLUMNS, dimensions
from meshwright.costs.measurements_models import model_of_row
from meshwright.models import find

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
VERSIONS = {"meshwright": "0.1.0", "torch": "2.11.0"}
PRIVATE = ("/home/alice", "alice", "node-17", "secret-project")


def own_run(folder: Path, steps: int = 40, change: Callable[[FakeRun], FakeRun] = lambda run: run) -> Path:
    """Write the run folder of a training on 8 H100 by a user whose paths must stay private."""
    private = (
        "layout.tp=1", "layout.micro_batch_size=2", "data.dataset=/home/alice/secret-project/tokens",
        "checkpoint.pretrained=/home/alice/models/base",
    )  # fmt: skip
    made = case("llama3_8b_pretrain_config", "8xH100", "meshwright", *private)
    run = replace(at_estimated_speed(made, steps, slower=1.2), settings=msgspec.to_builtins(made.recipe))
    lines = LOG_WRITERS["own"](change(run)).splitlines()
    head = json.loads(lines[0]) | {"versions": VERSIONS, "host": "node-17"}
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
    return folder


def rows(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_folder_becomes_one_row_of_the_projects_table(meshwright: Any, tmp_path: Path) -> None:
    own_run(tmp_path / "home" / "run")
    answer = meshwright("share", "home/run", "--json")
    assert answer.code == 0, answer.err
    found = answer.json
    (row,) = rows(found["file"])
    assert row == found["row"]
    with (DATA / "measurements.csv").open(encoding="utf-8") as table:
        assert tuple(next(csv.reader(table))) == TABLE_COLUMNS == tuple(row)
    shown = {name: row[name] for name in ("model", "gpu", "n_gpus", "tp", "dp_shard", "mbs", "gbs", "tier", "status")}
    assert shown == {
        "model": "llama3_8b", "gpu": "H100", "n_gpus": "8", "tp": "1", "dp_shard": "8", "mbs": "2", "gbs": "512",
        "tier": "A", "status": "ok",
    }  # fmt: skip
    assert row["framework_version"] == "meshwright 0.1.0, torch 2.11.0"
    spread = found["tokens_per_s_per_gpu"]
    assert spread["low"] < spread["median"] < spread["high"]
    assert float(row["tokens_per_s_per_gpu"]) == pytest.approx(spread["median"], rel=1e-5)
    assert "2026-01-01; median of 39 steps" in row["notes"]
    assert "command: meshwright train llama3_8b_pretrain_config" in row["notes"]
    assert "layout.micro_batch_size=2" in found["command"]
    again = meshwright("accuracy", found["file"], "--json")
    assert again.json["predicted"] == 1


def test_nothing_private_is_in_the_file(meshwright: Any, tmp_path: Path) -> None:
    own_run(tmp_path / "alice" / "run")
    answer = meshwright("share", "alice/run", "--out", "mine.csv")
    assert answer.code == 0, answer.err
    text = (tmp_path / "mine.csv").read_text()
    for word in (*PRIVATE, str(tmp_path)):
        assert word not in text
    assert re.search(r"\n\d,\d{3} tokens/s per GPU", answer.out)
    assert "benchmarks/data/contributed" in " ".join(answer.out.split())


def test_short_runs_and_runs_with_nan_are_refused_with_the_reason(meshwright: Any, tmp_path: Path) -> None:
    own_run(tmp_path / "short", steps=12)
    short = meshwright("share", "short", "--json")
    assert (short.code, short.json["error"]["field"]) == (2, "run")
    assert "11 steps after warm-up, and a measurement needs 20" in short.json["error"]["message"]

    def broken(run: FakeRun) -> FakeRun:
        return run.changed(lambda step: replace(step, loss=float("nan"), bad=True) if step.step == 17 else step)

    own_run(tmp_path / "nan", change=broken)
    nan = meshwright("share", "nan", "--json").json["error"]
    assert "step 17 has a loss or gradient that is NaN" in nan["message"]
    assert nan["fix"] == ["meshwright doctor nan"]
    tiny = own_run(tmp_path / "tiny") / "metrics.jsonl"
    tiny.write_text(tiny.read_text().replace('"world"', '"tiny": true, "world"', 1))
    assert "tiny model" in meshwright("share", "tiny", "--json").json["error"]["message"]
    assert list(tmp_path.glob("*.csv")) == []


def test_another_frameworks_log_needs_what_it_does_not_state(meshwright: Any, tmp_path: Path) -> None:
    made = case("llama3_70b_pretrain_config", "64xH100", "megatron")
    (tmp_path / "train.log").write_text(LOG_WRITERS["megatron"](at_estimated_speed(made, 60, slower=1.1)))
    bare = meshwright("share", "train.log", "--json").json["error"]
    assert "does not name the GPUs" in bare["message"]
    known = ("share", "train.log", "--recipe", "llama3_70b_pretrain_config", "--gpus", "64xH100")
    unversioned = meshwright(*known, "--json").json["error"]
    assert unversioned["field"] == "framework_version"
    found = meshwright(*known, "--framework-version", "core_r0.14.0", "--by", "Lab A", "--json")
    assert found.code == 0, found.err
    (row,) = rows(found.json["file"])
    assert (row["framework"], row["source"]) == ("Megatron-LM", "contributed by Lab A")
    wrong = meshwright(*known, "--framework-version", "1", "--out", "row.txt", "--json").json["error"]
    assert wrong["fix"] == ["--out row.csv"]


def test_the_python_verb_returns_what_was_written(tmp_path: Path) -> None:
    found = meshwright.share(str(own_run(tmp_path / "run")), out="row.csv")
    assert (found.ok, found.file, found.steps) == (True, "row.csv", 39)
    assert "tokens/s per GPU" in repr(found)
    with pytest.raises(InputError):
        meshwright.share("nowhere")


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "qwen3_8b"])
def test_a_model_of_ones_own_is_written_as_its_dimensions(name: str) -> None:
    model = find(name)
    text = dimensions(msgspec.structs.replace(model, name="secret-project"))
    assert "secret" not in text
    assert model_of_row("custom", text, 0.0).params.total == pytest.approx(model.params.total, rel=0.01)


def test_layers_that_a_row_cannot_express_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot express"):
        dimensions(find("deepseek_v3"))


def test_contributed_files_are_rows_that_the_cost_model_reads() -> None:
    from meshwright.costs.measurements import read

    for path in sorted((DATA / "contributed").glob("*.csv")):
        assert tuple(rows(path)[0]) == TABLE_COLUMNS, path
        assert all(row.case is not None for row in read(path)), path

"""`meshwright launch`: checked first, then written, submitted and watched."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs import FakeSlurm, fakes, parses

from meshwright.launch import watch as watching

RECIPE = "llama3_8b_pretrain_config"
SLURM = ("launch", RECIPE, "--scheduler", "slurm", "--gpus", "2x8xH100")
BARE = ("launch", RECIPE)
TINY = ("launch", RECIPE, "--scheduler", "slurm", "--tiny", "--cpu", "--gpus", "2", "--out", "runs/try")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    tools = fakes(tmp_path)
    monkeypatch.setenv("PATH", tools.environment()["PATH"])
    monkeypatch.setenv("RECORDS", str(tools.records))
    monkeypatch.chdir(tmp_path)
    return tools


def test_the_script_is_printed_and_nothing_else(meshwright: Any) -> None:
    answer = meshwright(*SLURM, "--time", "1-00", "--partition", "gpu", "--dataset", "mock", "train.log_every=5")
    assert answer.code == 0
    assert answer.out.startswith("#!/bin/bash\n#SBATCH --job-name=llama3_8b_pretrain_config\n#SBATCH --nodes=2\n")
    assert answer.out.endswith('exit "$code"\n')
    assert parses(answer.out)
    line = next(one for one in answer.out.splitlines() if one.startswith("srun "))
    assert shlex.split(line)[4:-1] == [
        "python", "-m", "meshwright", "train", RECIPE, "--dataset", "mock", "--out", f"runs/{RECIPE}",
        "train.log_every=5",
    ]  # fmt: skip


def test_json(meshwright: Any) -> None:
    answer = meshwright(*SLURM, "--json")
    assert list(answer.json) == [
        "schema", "scheduler", "files", "commands", "hosts", "notes", "written", "submitted", "findings", "assumed",
    ]  # fmt: skip
    assert list(answer.json["files"]) == ["llama3_8b_pretrain_config.sbatch"]
    assert answer.json["commands"] == ["sbatch llama3_8b_pretrain_config.sbatch"]
    assert answer.json["submitted"] is None
    assert all(one["severity"] != "error" for one in answer.json["findings"])


@pytest.mark.parametrize("words", [("layout.tp=3",), ("--model", "llama3.1-405b")])
def test_what_cannot_start_is_not_written(meshwright: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    answer = meshwright(*SLURM, *words, "--write", str(tmp_path / "jobs"), "--json")
    assert answer.code == 1
    assert answer.json["error"]["findings"]
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--scheduler", "slrum"), "scheduler"),
        (("--time", "soon"), "--time"),
        (("--hosts", "a,b"), "--hosts"),
        (("--kind", "jobset"), "--kind"),
        (("--scheduler", "kubernetes", "--kind", "job", "--image", "x"), "--kind"),
        (("--scheduler", "kubernetes"), "--image"),
        (("--scheduler", "kubernetes", "--image", "x", "--partition", "gpu"), "--partition"),
        (("--scheduler", "kubernetes", "--image", "x", "--submit"), "--submit"),
        (("--scheduler", "skypilot", "--no-requeue"), "--no-requeue"),
        (("--scheduler", "torchrun",), "--head"),
        (("--scheduler", "hosts", "--hosts", "a"), "--hosts"),
        (("--watch",), "--watch"),
        (("--env", "A"), "--env"),
        (("--env", "A=1", "--env", "A=2"), "--env"),
        (("--signal-ahead", "10"), "--signal-ahead"),
        (("--time", "2"), "--time"),
        (("--sbatch", "nodes=9"), "--sbatch"),
        (("--container-kind", "docker"), "--container-kind"),
    ],
)  # fmt: skip
def test_bad_input(meshwright: Any, words: tuple[str, ...], field: str) -> None:
    start = (*BARE, "--gpus", "2x8xH100") if "--scheduler" in words else SLURM
    answer = meshwright(*start, *words, "--json")
    assert answer.code == 2, answer.out
    assert answer.json["error"]["field"] == field
    assert answer.json["error"]["fix"] or field in ("--env", "--container-kind")


def test_an_unknown_recipe_and_an_unknown_override(meshwright: Any) -> None:
    assert meshwright("launch", "llama3_8b_pretrian_config", "--scheduler", "slurm").code == 2
    assert meshwright(*TINY, "layout.tpp=2").code == 2


def test_files_are_written_and_not_replaced(meshwright: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "jobs")
    first = meshwright(*SLURM, "--write", folder)
    assert first.out == f"sbatch {folder}/llama3_8b_pretrain_config.sbatch\n"
    assert parses((tmp_path / "jobs" / "llama3_8b_pretrain_config.sbatch").read_text())
    assert meshwright(*SLURM, "--write", folder, "--qos", "high").code == 2
    assert meshwright(*SLURM, "--write", folder, "--qos", "high", "--overwrite").code == 0


def test_a_recipe_file(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "my recipe.toml"
    path.write_text(meshwright("recipe", RECIPE).out)
    answer = meshwright("launch", str(path), "--scheduler", "slurm", "--gpus", "2x8xH100", "--json")
    (script,) = answer.json["files"].values()
    assert shlex.quote(str(path)) in script
    shipped = meshwright("launch", str(path), "--scheduler", "skypilot", "--gpus", "2x8xH100", "--json").json
    assert shipped["files"]["my recipe.toml"] == path.read_text()
    assert "train 'my recipe.toml'" in next(iter(shipped["files"].values()))


def test_a_tiny_run_that_saves_nothing_is_not_requeued(meshwright: Any) -> None:
    words = [word for word in TINY if word not in ("--out", "runs/try")]
    assert meshwright(*words).code == 2
    assert "scontrol requeue" not in meshwright(*words, "--no-requeue").out


@pytest.mark.parametrize("scheduler", ["torchrun", "hosts", "kubernetes", "skypilot"])
def test_every_way_speaks_json(meshwright: Any, scheduler: str) -> None:
    more = {"hosts": ("--hosts", "a"), "kubernetes": ("--image", "site/x:1"), "torchrun": (), "skypilot": ()}[scheduler]
    answer = meshwright("launch", RECIPE, "--scheduler", scheduler, "--gpus", "8xH100", *more, "--json")
    assert answer.code == 0
    assert answer.json["scheduler"] == scheduler
    assert len(answer.json["commands"]) == 1


# With stand-ins for SLURM


def test_submit(meshwright: Any, slurm: FakeSlurm) -> None:
    answer = meshwright(*TINY, "--submit", "--logs", "logs/here", "--json")
    assert answer.json["submitted"] == {"id": "4711"}
    assert (slurm.records / "script").read_text() == answer.json["files"]["llama3_8b_pretrain_config.sbatch"]
    assert (slurm.folder / "logs/here").is_dir()
    assert meshwright(*TINY, "--submit").out == "submitted job 4711\n"


def test_the_folder_of_the_log_is_made_with_the_files_of_the_job(meshwright: Any, slurm: FakeSlurm) -> None:
    assert "mkdir -p logs/now where sbatch runs" in meshwright(*TINY, "--logs", "logs/now").err
    assert not (slurm.folder / "logs").exists()
    assert "mkdir -p" not in meshwright(*TINY, "--logs", "logs/now", "--write", "job").err
    assert (slurm.folder / "logs/now").is_dir()


def test_a_rejected_job(meshwright: Any, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_FAILS", "sbatch: error: Batch job submission failed: Invalid account")
    answer = meshwright(*TINY, "--submit")
    assert answer.code == 3
    assert "Invalid account" in answer.err


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 3), ("TIMEOUT", 3), ("CANCELLED", 3)])
def test_watch(meshwright: Any, slurm: FakeSlurm, state: str, code: int) -> None:
    log = slurm.folder / "log"
    log.write_text("step 1\n")
    job = f"JobId=4711 JobState={state} Reason=None Restarts=1 ExitCode=0:0 StdOut={log}\n"
    (slurm.records / "job").write_text(job)
    answer = meshwright(*TINY, "--submit", "--watch")
    assert answer.code == code
    assert answer.out == "submitted job 4711\nstep 1\n"
    assert f"job 4711: {state.lower()}" in answer.err
    result = meshwright(*TINY, "--submit", "--watch", "--json")
    assert result.code == code
    assert result.json["submitted"] == {"id": "4711", "state": state, "restarts": 1}


def test_ctrl_c_leaves_the_job_alone(meshwright: Any, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm.records / "job").write_text("JobId=4711 JobState=RUNNING Reason=None StdOut=(null)\n")
    monkeypatch.setattr(watching, "inspect", lambda number: signal.raise_signal(signal.SIGINT))
    answer = meshwright(*TINY, "--submit", "--watch")
    assert answer.code == 130
    assert "job 4711 keeps running; cancel it with: scancel 4711" in answer.err
    assert slurm.requeues() == []

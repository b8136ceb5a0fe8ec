"""Submitting and watching, with stand-ins for SLURM's tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.jobs import Fakes, fakes, job

from meshwright.errors import InputError
from meshwright.launch.slurm import on_slurm
from meshwright.launch.submit import SubmitError, refuse_submit, submit
from meshwright.launch.watch import PATIENCE, Seen, Tail, from_sacct, from_scontrol, inspect, watch

SHOWN = (
    "JobId=4711 JobName=try_it UserId=me(1000) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 ExitCode={code} Command=(null) WorkDir=/x StdErr={log} "
    "StdIn=/dev/null StdOut={log} Power=\n"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    tools = fakes(tmp_path)
    monkeypatch.setenv("PATH", tools.environment()["PATH"])
    monkeypatch.setenv("NOTES", str(tools.notes))
    return tools


def test_sbatch_gets_the_script_and_gives_the_number(slurm: Fakes) -> None:
    made = on_slurm(job())
    assert submit(made) == "4711"
    assert slurm.noted("sbatch") == ["--parsable"]
    assert (slurm.notes / "script").read_text() == made.files["try_it.sbatch"]


def test_the_name_of_the_cluster_is_no_part_of_the_number(slurm: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_SAYS", "99;big")
    assert submit(on_slurm(job())) == "99"


@pytest.mark.parametrize("says", ["", "Submitted batch job"])
def test_an_answer_without_a_number(slurm: Fakes, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    monkeypatch.setenv("SBATCH_SAYS", says)
    with pytest.raises(SubmitError):
        submit(on_slurm(job()))


def test_a_rejected_job_tells_what_sbatch_said(slurm: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_FAILS", "sbatch: error: invalid partition specified: gpu")
    with pytest.raises(SubmitError, match="invalid partition") as refused:
        submit(on_slurm(job()))
    assert refused.value.exit_code == 3


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="sbatch is not on this machine") as refused:
        submit(on_slurm(job()))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("on", "instead"), [("kubernetes", "kubectl apply -f x.yaml"), ("skypilot", "sky launch x.yaml"), ("hosts", "host")]
)
def test_others_are_not_submitted(on: str, instead: str) -> None:
    with pytest.raises(InputError) as refused:
        refuse_submit(on, "x")
    assert instead in " ".join(refused.value.fix)


def moments(slurm: Fakes, *texts: str | None) -> Iterator[str | None]:
    for text in texts:
        path = slurm.notes / "job"
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
        yield text


def followed(slurm: Fakes, *texts: str | None) -> tuple[Seen, list[str], list[str]]:
    """Watches a job that looks different after every pause."""
    said: list[str] = []
    lines: list[str] = []
    steps = moments(slurm, *texts)
    next(steps)

    def pause(_: float) -> None:
        with (slurm.folder / "log").open("a") as log:
            log.write("more\nhalf")
        next(steps, None)

    return watch("4711", said.append, lines.append, pause=pause), said, lines


def shown(state: str, log: Path, reason: str = "None", restarts: int = 0, code: str = "0:0") -> str:
    return SHOWN.format(state=state, reason=reason, restarts=restarts, code=code, log=log)


def test_a_job_is_followed_through_its_requeue(slurm: Fakes) -> None:
    log = slurm.folder / "log"
    seen, said, lines = followed(
        slurm,
        shown("PENDING", log, reason="Priority"),
        shown("RUNNING", log),
        shown("RUNNING", log),
        shown("COMPLETING", log),
        shown("PENDING", log, reason="BeginTime", restarts=1),
        shown("RUNNING", log, restarts=1),
        shown("COMPLETED", log, restarts=1),
    )
    assert seen.state == "COMPLETED"
    assert said == [
        "job 4711: pending (Priority)", "job 4711: running", "job 4711: completing",
        "job 4711: pending (BeginTime), requeued once", "job 4711: running, requeued once",
        "job 4711: completed, requeued once",
    ]  # fmt: skip
    assert lines == ["more", *["halfmore"] * 5, "half"]


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_a_job_that_did_not_complete(slurm: Fakes, state: str) -> None:
    seen, said, _ = followed(slurm, shown(state, slurm.folder / "log", code="3:0", reason="NonZeroExitCode"))
    assert seen.state == state
    assert len(said) == 1
    assert ("exit code 3" in said[0]) == (state == "FAILED")


def test_a_job_that_the_controller_has_forgotten_is_in_the_accounting(slurm: Fakes) -> None:
    (slurm.notes / "accounting").write_text("CANCELLED by 1000|0:15\n")
    seen, _, _ = followed(slurm, shown("RUNNING", slurm.folder / "log"), None)
    assert seen.state == "CANCELLED"


def test_a_controller_may_be_away_for_a_while(slurm: Fakes) -> None:
    log = slurm.folder / "log"
    seen, _, _ = followed(slurm, shown("RUNNING", log), None, None, None, shown("COMPLETED", log))
    assert seen.state == "COMPLETED"


def test_an_end_that_nobody_knows_is_told(slurm: Fakes) -> None:
    pauses: list[float] = []
    with pytest.raises(SubmitError, match="Invalid job id"):
        watch("4711", lambda _: None, lambda _: None, pause=pauses.append)
    assert len(pauses) == PATIENCE


def test_what_scontrol_says(slurm: Fakes) -> None:
    (slurm.notes / "job").write_text(shown("RUNNING", slurm.folder / "my log.out", restarts=2))
    seen = inspect("4711")
    assert (seen.state, seen.restarts, seen.log) == ("RUNNING", 2, str(slurm.folder / "my log.out"))
    assert from_scontrol("") is None
    assert from_sacct("\n") is None
    assert from_sacct("FAILED|1:0\nCOMPLETED|0:0\n") == Seen("COMPLETED", exit_code="0")


def test_a_log_that_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.new()) == []
    path.write_bytes(b"one\ntwo\xff\nthr")
    assert list(tail.new()) == ["one", "two\ufffd"]
    path.write_bytes(b"new\n")
    assert list(tail.new())[-1].endswith("new")

"""Submitting and watching, with fake SLURM tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.jobs import FakeSlurm, fakes, job

from meshwright.errors import InputError
from meshwright.launch.slurm import on_slurm
from meshwright.launch.submit import SubmitError, refuse_submit, submit
from meshwright.launch.watch import MAX_FAILURES, JobState, Tail, from_sacct, from_scontrol, inspect, watch

SCONTROL_OUTPUT = (
    "JobId=4711 JobName=try_it UserId=me(1000) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 ExitCode={code} Command=(null) WorkDir=/x StdErr={log} "
    "StdIn=/dev/null StdOut={log} Power=\n"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    tools = fakes(tmp_path)
    monkeypatch.setenv("PATH", tools.environment()["PATH"])
    monkeypatch.setenv("RECORDS", str(tools.records))
    return tools


def test_sbatch_gets_the_script_and_returns_the_id(slurm: FakeSlurm) -> None:
    made = on_slurm(job())
    assert submit(made) == "4711"
    assert slurm.recorded("sbatch") == ["--parsable"]
    assert (slurm.records / "script").read_text() == made.files["try_it.sbatch"]


def test_the_cluster_name_is_not_part_of_the_id(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_SAYS", "99;big")
    assert submit(on_slurm(job())) == "99"


@pytest.mark.parametrize("says", ["", "Submitted batch job"])
def test_an_output_without_an_id_is_an_error(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    monkeypatch.setenv("SBATCH_SAYS", says)
    with pytest.raises(SubmitError):
        submit(on_slurm(job()))


def test_a_rejected_job_reports_sbatch_output(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_FAILS", "sbatch: error: invalid partition specified: gpu")
    with pytest.raises(SubmitError, match="invalid partition") as refused:
        submit(on_slurm(job()))
    assert refused.value.exit_code == 3


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="sbatch is not installed") as refused:
        submit(on_slurm(job()))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("on", "instead"), [("kubernetes", "kubectl apply -f x.yaml"), ("skypilot", "sky launch x.yaml"), ("hosts", "host")]
)
def test_others_are_not_submitted(on: str, instead: str) -> None:
    with pytest.raises(InputError) as refused:
        refuse_submit(on, "x")
    assert instead in " ".join(refused.value.fix)


def states(slurm: FakeSlurm, *texts: str | None) -> Iterator[str | None]:
    for text in texts:
        path = slurm.records / "job"
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
        yield text


def watched(slurm: FakeSlurm, *texts: str | None) -> tuple[JobState, list[str], list[str]]:
    """Watch a job whose state changes after every pause."""
    reports: list[str] = []
    lines: list[str] = []
    steps = states(slurm, *texts)
    next(steps)

    def pause(_: float) -> None:
        with (slurm.folder / "log").open("a") as log:
            log.write("more\nhalf")
        next(steps, None)

    return watch("4711", reports.append, lines.append, pause=pause), reports, lines


def scontrol_output(state: str, log: Path, reason: str = "None", restarts: int = 0, code: str = "0:0") -> str:
    return SCONTROL_OUTPUT.format(state=state, reason=reason, restarts=restarts, code=code, log=log)


def test_a_job_is_watched_through_its_requeue(slurm: FakeSlurm) -> None:
    log = slurm.folder / "log"
    state, reports, lines = watched(
        slurm,
        scontrol_output("PENDING", log, reason="Priority"),
        scontrol_output("RUNNING", log),
        scontrol_output("RUNNING", log),
        scontrol_output("COMPLETING", log),
        scontrol_output("PENDING", log, reason="BeginTime", restarts=1),
        scontrol_output("RUNNING", log, restarts=1),
        scontrol_output("COMPLETED", log, restarts=1),
    )
    assert state.state == "COMPLETED"
    assert reports == [
        "job 4711: pending (Priority)", "job 4711: running", "job 4711: completing",
        "job 4711: pending (BeginTime), requeued once", "job 4711: running, requeued once",
        "job 4711: completed, requeued once",
    ]  # fmt: skip
    assert lines == ["more", *["halfmore"] * 5, "half"]


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_a_job_that_did_not_complete(slurm: FakeSlurm, state: str) -> None:
    final, reports, _ = watched(
        slurm, scontrol_output(state, slurm.folder / "log", code="3:0", reason="NonZeroExitCode")
    )
    assert final.state == state
    assert len(reports) == 1
    assert ("exit code 3" in reports[0]) == (state == "FAILED")


def test_a_job_unknown_to_the_controller_is_read_from_accounting(slurm: FakeSlurm) -> None:
    (slurm.records / "accounting").write_text("CANCELLED by 1000|0:15\n")
    state, _, _ = watched(slurm, scontrol_output("RUNNING", slurm.folder / "log"), None)
    assert state.state == "CANCELLED"


def test_a_controller_may_be_unavailable_for_a_while(slurm: FakeSlurm) -> None:
    log = slurm.folder / "log"
    state, _, _ = watched(slurm, scontrol_output("RUNNING", log), None, None, None, scontrol_output("COMPLETED", log))
    assert state.state == "COMPLETED"


def test_an_unknown_final_state_is_an_error(slurm: FakeSlurm) -> None:
    pauses: list[float] = []
    with pytest.raises(SubmitError, match="Invalid job id"):
        watch("4711", lambda _: None, lambda _: None, pause=pauses.append)
    assert len(pauses) == MAX_FAILURES


def test_scontrol_and_sacct_are_parsed(slurm: FakeSlurm) -> None:
    (slurm.records / "job").write_text(scontrol_output("RUNNING", slurm.folder / "my log.out", restarts=2))
    state = inspect("4711")
    assert (state.state, state.restarts, state.log) == ("RUNNING", 2, str(slurm.folder / "my log.out"))
    assert from_scontrol("") is None
    assert from_sacct("\n") is None
    assert from_sacct("FAILED|1:0\nCOMPLETED|0:0\n") == JobState("COMPLETED", exit_code="0")


def test_a_truncated_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.new()) == []
    path.write_bytes(b"one\ntwo\xff\nthr")
    assert list(tail.new()) == ["one", "two\ufffd"]
    path.write_bytes(b"new\n")
    assert list(tail.new())[-1].endswith("new")

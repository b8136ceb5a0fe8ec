"""`meshwright launch` with a real SLURM: jobs that complete, are preempted and resume, and fail."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.slurm.jobs import STEPS, Job, losses, submit, submit_script
from tests.slurm.machine import CannotStartError, guarded, left_behind, nodes, processes_with

pytestmark = pytest.mark.slurm

Env = Mapping[str, str]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Env]:
    """Yield the environment of a SLURM started for these tests."""
    try:
        with guarded() as env:
            yield env
    except CannotStartError as error:
        pytest.skip(f"no SLURM here: {error}")
    assert not left_behind(env)
    assert not Path(env["SLURM_CONF"]).parent.exists()


@pytest.fixture(scope="module")
def undisturbed(slurm: Env, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that runs without interruption."""
    job = submit(slurm, tmp_path_factory.mktemp("undisturbed"))
    assert job.ended() == 0, job.watched + job.log
    return job


def checkpoints(job: Job) -> list[str]:
    return sorted(path.name for path in (job.run / "checkpoints").glob("step-*"))


def assert_resumed(job: Job, undisturbed: Job) -> None:
    """Check that the job was requeued once and trained as if uninterrupted, bit for bit."""
    assert job.ended() == 0, job.watched + job.log
    assert (job.field("JobState"), job.field("Restarts")) == ("COMPLETED", "1")
    assert "completed, requeued once" in job.watched
    assert "resumed" in job.log
    assert losses(job.run) == losses(undisturbed.run)


def test_a_job_completes_and_leaves_checkpoint_metrics_and_log(undisturbed: Job) -> None:
    assert (undisturbed.field("JobState"), undisturbed.field("ExitCode"), undisturbed.field("Restarts")) == (
        "COMPLETED",
        "0:0",
        "0",
    )
    assert list(losses(undisturbed.run)) == list(range(1, STEPS + 1))
    assert f"step-{STEPS:08}" in checkpoints(undisturbed)
    assert undisturbed.field("NumTasks") == "2", "every rank is a task of SLURM's, without torchrun"
    assert f"job {undisturbed.number}: completed" in undisturbed.watched
    assert f"step {STEPS}/{STEPS}" in undisturbed.log
    assert f"step {STEPS}/{STEPS}" in undisturbed.watched


@pytest.mark.parametrize("form", [(), ("--batch",)], ids=["steps", "batch"])
def test_a_signaled_job_saves_is_requeued_and_resumes(
    slurm: Env, undisturbed: Job, tmp_path: Path, form: tuple[str, ...]
) -> None:
    job = submit(slurm, tmp_path)
    job.wait_for_steps(3)
    job.scancel("--signal=TERM", *form)
    assert_resumed(job, undisturbed)
    assert "checkpoint saved at step" in job.log
    assert "exit code 75" in job.log


def test_a_job_signaled_before_its_ranks_handle_it_is_requeued(slurm: Env, undisturbed: Job, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path)
    last = (f"SLURM_JOB_ID={job.number}", "SLURM_PROCID=1")
    job.wait_until(lambda: bool(processes_with(*last)), "its last rank")  # an earlier signal would reach no rank
    job.scancel("--signal=TERM")
    assert job.ended() == 0, job.watched + job.log
    assert (job.field("JobState"), job.field("Restarts")) == ("COMPLETED", "1")
    assert losses(job.run) == losses(undisturbed.run)


def test_a_job_signaled_together_with_srun_resumes_from_its_last_checkpoint(
    slurm: Env, undisturbed: Job, tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, "--cpu", "--gpus", "2", "checkpoint.save_every=2")
    job.wait_until(lambda: bool(checkpoints(job)), "a checkpoint")
    job.scancel("--signal=TERM", "--full")  # srun ends its tasks immediately when it gets the signal too
    assert_resumed(job, undisturbed)


def test_a_preempted_job_saves_is_requeued_and_resumes(slurm: Env, undisturbed: Job, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path)
    job.wait_for_steps(3)
    others = ["sbatch", "--partition=urgent", f"--nodes={len(nodes())}", "--exclusive", "--wrap=true"]
    subprocess.run([*others, f"--output={tmp_path / 'urgent'}"], env=dict(slurm), check=True, timeout=20)
    assert_resumed(job, undisturbed)
    assert "checkpoint saved at step" in job.log


def test_scontrol_requeue_makes_a_job_save_and_resume(slurm: Env, undisturbed: Job, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path)
    job.wait_for_steps(3)
    subprocess.run(["scontrol", "requeue", job.number], env=dict(slurm), check=True, timeout=20)
    assert_resumed(job, undisturbed)
    assert "checkpoint saved at step" in job.log


def test_a_cancelled_job_is_not_requeued(slurm: Env, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path)
    job.wait_for_steps(1)
    job.scancel()
    assert job.ended() == 3, job.watched + job.log
    assert (job.field("JobState"), job.field("Restarts")) == ("CANCELLED", "0")


def test_a_job_that_fails_is_not_requeued(slurm: Env, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--cpu", "--gpus", "2", "--dataset", str(tmp_path / "nowhere.jsonl"))
    assert job.ended() == 3, job.watched + job.log
    assert (job.field("JobState"), job.field("ExitCode"), job.field("Restarts")) == ("FAILED", "2:0", "0")
    assert "nowhere.jsonl" in job.log
    assert f"job {job.number}: failed" in job.watched


def test_ranks_of_two_nodes_find_each_other(slurm: Env, undisturbed: Job, tmp_path: Path) -> None:
    if len(nodes()) < 2:
        pytest.skip("no mount namespaces here, so that a second node could not be found by its name")
    # Requests one GPU per node: this SLURM has them in name only, and the ranks find none and use CPUs.
    job = submit(slurm, tmp_path, "--gpus", "2x1xH100", "--cpus-per-rank", "1")
    assert job.ended() == 0, job.watched + job.log
    assert (job.field("NumNodes"), job.field("NodeList")) == ("2", "node[1-2]")
    assert "gres/gpu=2" in job.field("TRES") or "gres:gpu:1" in job.field("TresPerNode")
    assert losses(job.run) == losses(undisturbed.run)


@pytest.mark.parametrize("form", [(), ("--batch",)], ids=["steps", "batch"])
def test_a_signaled_torchrun_on_two_nodes_saves_is_requeued_and_resumes(
    slurm: Env, undisturbed: Job, tmp_path: Path, form: tuple[str, ...]
) -> None:
    """Ranks of other engines are started by torchrun; here it starts ours."""
    job = submit_script(slurm, tmp_path, f"{len(nodes())}x{2 // len(nodes())}xH100")
    job.wait_for_steps(3)
    job.scancel("--signal=TERM", *form)
    job.wait_until(lambda: job.field("JobState") in ("COMPLETED", "FAILED"), "its end")
    assert (job.field("JobState"), job.field("Restarts")) == ("COMPLETED", "1"), job.log
    assert "checkpoint saved at step" in job.log
    assert "resumed" in job.log
    assert losses(job.run) == losses(undisturbed.run)


def test_a_job_near_its_time_limit_saves_and_resumes(slurm: Env, undisturbed: Job, tmp_path: Path) -> None:
    ahead = ("--time", "1", "--signal-ahead", "5", "checkpoint.grace_s=5")
    job = submit(slurm, tmp_path, "--cpu", "--gpus", "2", *ahead)
    job.wait_for_steps(3)
    job.scancel("--signal=STOP")  # stopped, the ranks use up a minute, SLURM's smallest limit, in few steps
    job.wait_until(lambda: f"JOB {job.number} ON" in job.log, "SLURM's signal ahead of the limit")
    job.scancel("--signal=CONT")
    assert job.ended() == 0, job.watched + job.log
    assert job.field("JobState") == "COMPLETED"
    assert int(job.field("Restarts")) >= 1
    assert "checkpoint saved at step" in job.log
    assert "DUE TO TIME LIMIT" not in job.log
    assert losses(job.run) == losses(undisturbed.run)


def test_nothing_is_left_of_jobs_that_have_ended(slurm: Env, undisturbed: Job) -> None:
    names = {path.read_text().strip() for pid in left_behind(slurm) if (path := Path(f"/proc/{pid}/comm")).exists()}
    assert names <= {"munged", "slurmctld", "slurmd", "slurmscriptd"}

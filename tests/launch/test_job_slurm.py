"""The batch script: its resources, its command, and its behavior on signals, run with fake SLURM tools."""

from __future__ import annotations

import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.launch.jobs import TRAIN, FakeSlurm, fakes, job, parses

from meshwright.errors import InputError
from meshwright.launch.job import Job, Variable
from meshwright.launch.slurm import SAVED, SIGNAL_WRAPPER, on_slurm, script


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return fakes(tmp_path)


def header_options(text: str) -> dict[str, str]:
    """Return the options of the script's header."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize(
    ("gpus", "nodes", "tasks"), [("8xH100", 1, 8), ("4x8xH200", 4, 8), ("72xGB200", 18, 4), ("1xH100", 1, 1)]
)
def test_every_gpu_has_a_task(gpus: str, nodes: int, tasks: int) -> None:
    options = header_options(script(job(gpus)))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == (
        str(nodes),
        str(tasks),
        str(tasks),
    )
    assert options["cpus-per-task"] == "8"


def test_other_engines_have_one_task_a_node_with_torchrun_in_it(slurm: FakeSlurm) -> None:
    made = script(
        job(finds_ranks=False, words=("pretrain_gpt.py", "--tensor-model-parallel-size", "2"), cpus_per_rank=4)
    )
    assert header_options(made)["ntasks-per-node"] == "1"
    assert header_options(made)["cpus-per-task"] == "32"
    assert slurm.run(made).returncode == 0
    words = slurm.recorded("srun")
    assert words[words.index("torchrun") :] == [
        "torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=30007", "--rdzv-endpoint=node01:26007",
        "--nproc-per-node=8", "pretrain_gpt.py", "--tensor-model-parallel-size", "2",
    ]  # fmt: skip
    assert slurm.variables()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "60"


def test_the_header_has_the_requested_options() -> None:
    options = header_options(
        script(
            job(
                time="36:00:00", partition="gpu,fast", account="proj", qos="high", reservation="r1",
                constraint="h100&ib", logs="logs/", sbatch=("mem=0", "exclusive"), signal_ahead_s=300,
            )
        )
    )  # fmt: skip
    expected = {
        "job-name": "try_it", "time": "1-12:00:00", "partition": "gpu,fast", "account": "proj", "qos": "high",
        "reservation": "r1", "constraint": "h100&ib", "output": "logs/%x-%j.out", "open-mode": "append", "mem": "0",
        "exclusive": "", "requeue": "", "signal": "B:TERM@300",
    }  # fmt: skip
    assert expected.items() <= options.items()


def test_no_requeue_is_in_the_header() -> None:
    made = script(job(requeue=False))
    assert "no-requeue" in header_options(made)
    assert "signal" not in header_options(made)
    assert "scontrol requeue" not in made


def test_gpus_are_requested_once() -> None:
    assert "gpus-per-node" not in header_options(script(job(sbatch=("gres=gpu:h100:8",))))
    without = script(job("2", cpu=True))
    assert not any("gpu" in line for line in without.splitlines() if line.startswith("#SBATCH"))
    assert header_options(without)["cpus-per-task"] == "1"


def test_the_program_gets_its_arguments_and_environment(slurm: FakeSlurm) -> None:
    env = {"A": 'it\'s $HOME "x"', "EMPTY": ""}
    variables = (Variable("WANTED", "1", "a reason"), Variable("UNWANTED", None, "another"))
    made = script(job(env=env, advised=variables, setup=("export FROM_SETUP=yes",), python="/opt/my python"))
    done = slurm.run(made, UNWANTED="1")
    assert (done.returncode, done.stderr) == (0, "")
    words = slurm.recorded("srun")
    assert words[:3] == ["--kill-on-bad-exit=0", "--wait=60", "--cpus-per-task=8"]
    assert words[3:] == ["/opt/my python", *TRAIN]
    variables_seen = slurm.variables()
    assert {
        "A": env["A"],
        "EMPTY": "",
        "WANTED": "1",
        "FROM_SETUP": "yes",
        "OMP_NUM_THREADS": "8",
    }.items() <= variables_seen.items()
    assert "UNWANTED" not in variables_seen
    assert (variables_seen["MASTER_ADDR"], variables_seen["MASTER_PORT"]) == ("node01", "26007")
    assert "# a reason\nexport WANTED=1" in made


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pyxis", ["--container-image=nvcr.io#a:26.08", "--container-mounts=/data:/data,/my runs:/runs:ro"]),
        ("apptainer", ["apptainer", "exec", "--nv", "--bind", "/data:/data", "--bind", "/my runs:/runs:ro",
                       "docker://nvcr.io/a:26.08"]),
    ],
)  # fmt: skip
def test_containers(slurm: FakeSlurm, kind: str, words: list[str]) -> None:
    made = script(job(image="nvcr.io/a:26.08", container_kind=kind, mounts=("/data:/data", "/my runs:/runs:ro")))
    slurm.run(made)
    assert slurm.recorded("srun")[3:] == [*words, "python", *TRAIN]


def test_files_are_read_where_they_were_written(slurm: FakeSlurm) -> None:
    folder = slurm.folder / "my jobs"
    folder.mkdir()
    made = on_slurm(job(files={"a.toml": "x = 1\n"}, folder=str(folder)))
    assert made.files["a.toml"] == "x = 1\n"
    slurm.run(made.files["try_it.sbatch"])
    assert slurm.variables()["PWD"] == str(folder)


# Exit and requeue


@pytest.mark.parametrize("code", [0, 1, 2, 3, 137])
def test_a_job_that_ends_by_itself_is_not_requeued(slurm: FakeSlurm, code: int) -> None:
    done = slurm.run(script(job()), SRUN_CODE=str(code))
    assert done.returncode == code
    assert slurm.requeues() == []


def test_a_run_that_has_saved_is_requeued(slurm: FakeSlurm) -> None:
    done = slurm.run(script(job()), SRUN_CODE="75", SLURM_RESTART_COUNT="3")
    assert done.returncode == 75
    assert slurm.requeues() == ["requeue 30007"]
    assert "requeue number 4" in done.stderr


def test_ranks_signaled_before_they_handle_signals_are_requeued(slurm: FakeSlurm) -> None:
    done = slurm.run(script(job()), SRUN_CODE="143")
    assert done.returncode == 143
    assert slurm.requeues() == ["requeue 30007"]


def test_a_strict_setup_does_not_end_the_script(slurm: FakeSlurm) -> None:
    done = slurm.run(script(job(setup=("set -euo pipefail",))), SRUN_CODE="75")
    assert done.returncode == 75
    assert slurm.requeues() == ["requeue 30007"]


def test_setup_that_the_users_script_has_is_not_repeated() -> None:
    text = script(job(setup=("module load cuda", "module load nccl"), kept_setup=("module load cuda",)))
    assert (text.count("module load cuda"), text.count("module load nccl")) == (1, 1)


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "TIMEOUT", ""])
def test_a_job_that_was_cancelled_or_is_over_is_not_requeued(slurm: FakeSlurm, state: str) -> None:
    done = slurm.run(script(job()), SRUN_CODE="75", STATE=state)
    assert done.returncode == 75
    assert slurm.requeues() == []
    assert (state or "unknown") in done.stderr


def test_requeues_are_limited(slurm: FakeSlurm) -> None:
    made = script(job(max_requeues=5))
    last = slurm.run(made, SRUN_CODE="75", SLURM_RESTART_COUNT="5")
    assert last.returncode == 75
    assert slurm.requeues() == []
    (slurm.records / "srun").unlink()
    one_more = slurm.run(made, SLURM_RESTART_COUNT="6")  # SLURM itself requeued it
    assert one_more.returncode == 3
    assert slurm.recorded("srun") == []


def test_a_refused_requeue_is_reported(slurm: FakeSlurm) -> None:
    done = slurm.run(script(job()), SRUN_CODE="75", SCONTROL_CODE="1")
    assert done.returncode == 75
    assert "refused to requeue" in done.stderr


def run_and_signal(slurm: FakeSlurm, text: str, number: signal.Signals, **more: str) -> tuple[int, str]:
    """Run a script until its ranks are up, signal its shell, and return its exit code and stderr."""
    path = slurm.folder / "job.sh"
    path.write_text(text)
    environment = slurm.environment(HOLD="1", **more)
    with subprocess.Popen(
        ["bash", str(path)], env=environment, cwd=slurm.folder, stderr=subprocess.PIPE, text=True
    ) as shell:
        assert (slurm.records / "fifo").read_text() == "up\n"
        shell.send_signal(number)
        _, options = shell.communicate(timeout=20)
    return shell.returncode, options


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_shell_forwards_the_signal_and_waits(slurm: FakeSlurm, number: signal.Signals) -> None:
    code, options = run_and_signal(slurm, script(job()), number)
    assert code == 75
    assert (slurm.records / "signals").read_text() == "USR1\n"
    assert slurm.requeues() == ["requeue 30007"]
    assert "requeue number 1" in options


def test_torchrun_gets_sigterm(slurm: FakeSlurm) -> None:
    code, _ = run_and_signal(slurm, script(job(finds_ranks=False)), signal.SIGTERM)
    assert code == 143
    assert (slurm.records / "signals").read_text() == "TERM\n"
    assert slurm.requeues() == ["requeue 30007"]


@pytest.mark.parametrize(
    ("command", "code"), [("kill -s TERM $PPID; sleep 0.2; exit 1", SAVED), ("exit 1", 1), ("true", 0)]
)
def test_a_preempted_torchrun_exits_as_saved(command: str, code: int) -> None:
    done = subprocess.run(["bash", "-c", SIGNAL_WRAPPER, "bash", "-c", command], timeout=20, check=False)
    assert done.returncode == code


def test_without_requeue_the_ranks_are_signaled_too(slurm: FakeSlurm) -> None:
    code, _ = run_and_signal(slurm, script(job(requeue=False)), signal.SIGTERM)
    assert code == 75
    assert slurm.requeues() == []


# Arbitrary user input

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


@given(words=st.lists(TEXT, max_size=4), env=st.dictionaries(TEXT, TEXT, max_size=3), python=TEXT)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_user_arguments_are_quoted(words: list[str], env: dict[str, str], python: str) -> None:
    try:
        made = job(words=("-m", "x", *words), env=env, python=python)
    except InputError:
        return
    text = script(made)
    line = next(one for one in text.splitlines() if one.startswith("srun "))
    assert shlex.split(line)[-len(words) - 4 : -1] == [python, "-m", "x", *words]
    exports = {
        name: shlex.split(one)[1]
        for one in text.splitlines()
        if one.startswith("export ")
        for name in [one.split("=")[0]]
    }
    assert all(exports[f"export {name}"] == f"{name}={value}" for name, value in env.items())


FIELDS = ("name", "partition", "account", "qos", "reservation", "constraint", "image", "logs", "time")


@given(field=st.sampled_from(FIELDS), value=TEXT)
@settings(max_examples=75)
def test_user_fields_stay_on_their_line(field: str, value: str) -> None:
    plain = script(job())
    try:
        text = script(job(**{field: value}))
    except InputError:
        return
    assert len(text.splitlines()) - len(plain.splitlines()) in (0, 1)
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert all(len(shlex.split(line.removeprefix("#"), comments=True)) == 2 for line in options)


@given(lines=st.lists(st.text(st.sampled_from("abc '\"\\$(){};&|<>#`=\n"), max_size=12), min_size=1, max_size=2))
@settings(max_examples=20)
def test_setup_lines_never_break_the_script(lines: list[str]) -> None:
    try:
        made = job(setup=tuple(lines))
    except InputError:
        return
    assert parses(script(made))


def every_variant() -> list[Job]:
    torchrun = job(finds_ranks=False)
    return [
        job(), torchrun, job("8xH100", finds_ranks=False), job("1xH100"), job(cpu=True), job(requeue=False),
        job(image="a:b", mounts=("/a:/b",)), job(image="a.sif", container_kind="apptainer", cpu=True),
        job(setup=("module load cuda",), env={"A": "b'c"}, time="2-00", folder="/x y", files={"a": "b"}),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(9))
def test_bash_parses_every_script(number: int) -> None:
    assert parses(script(every_variant()[number]))

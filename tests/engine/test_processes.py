"""Ranks are detected, return results in order, fail with one named cause and leave no processes behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.children import child, children

from meshwright.engine import process_group, processes
from meshwright.engine.faults import RunError
from meshwright.engine.process_group import join
from meshwright.engine.processes import start
from meshwright.engine.rank_env import PORTS, Process, detect, hosts
from meshwright.engine.watchdog import Watchdog
from meshwright.errors import InputError, MeshwrightError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "gpu[09-10]",
}  # fmt: skip


def without(env: dict[str, str], *names: str, **more: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names} | more


# Detecting the launcher


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin"}, None),
        (TORCHRUN, (5, 8, 1, 4, "torchrun", "gpu01", 29500, 1)),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), (5, 8, 1, 2, "torchrun", "gpu01", 29500, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0, 1, "torchrun", "", 0, 0)),
        (TORCHRUN | SLURM, (5, 8, 1, 4, "torchrun", "gpu01", 29500, 1)),  # torchrun inside a SLURM job
        (SLURM, (5, 8, 1, 4, "slurm", "gpu09", PORTS[4242 * 16 % len(PORTS)], 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu10"}, (5, 8, 1, 4, "slurm", "gpu10", None, 1)),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}, (5, 8, 1, 4, "slurm", "head", 1234, 1)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, (5, 8, 1, 4, "slurm", "gpu09", None, 0)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (5, 8, 1, 4, "slurm", "gpu09", None, 1)),
        (
            without(SLURM, "SLURM_NTASKS_PER_NODE", SLURM_TASKS_PER_NODE="3,5(x2)", SLURM_NODEID="1"),
            (5, 8, 1, 5, "slurm", "gpu09", None, 1),
        ),
        (without(SLURM, "SLURM_NTASKS_PER_NODE"), (5, 8, 1, 2, "slurm", "gpu09", None, 1)),
        (without(SLURM, "SLURM_STEP_ID"), None),  # a shell inside an allocation
        (without(SLURM, "SLURM_NTASKS"), None),
        (SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, None),  # the batch script itself
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, (0, 1, 0, 1, "slurm", "", PORTS[0], 0)),
    ],
)
def test_the_rank_is_read_from_the_environment(env: dict[str, str], expected: tuple[Any, ...] | None) -> None:
    found = detect(env)
    if found is None or expected is None:
        assert found is expected
        return
    seen = (found.rank, found.world, found.local_rank, found.local_world, found.how, found.master_address)
    assert seen == expected[:6]
    assert found.gpu == expected[7]
    assert expected[6] in (None, found.master_port)


@pytest.mark.parametrize(
    ("env", "field"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK"),
        (TORCHRUN | {"RANK": "-1"}, "RANK"),
        (TORCHRUN | {"RANK": "five"}, "RANK"),
        (TORCHRUN | {"RANK": "9" * 5000}, "RANK"),
        (TORCHRUN | {"RANK": "²"}, "RANK"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR"),
        (TORCHRUN | {"MASTER_ADDR": " "}, "MASTER_ADDR"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID"),
        (SLURM | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID"),
        (without(SLURM, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST"),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu[2-1]"}, "SLURM_JOB_NODELIST"),
        (without(SLURM, "SLURM_NTASKS_PER_NODE", SLURM_TASKS_PER_NODE="4(2)"), "SLURM_TASKS_PER_NODE"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused_by_name(env: dict[str, str], field: str) -> None:
    with pytest.raises(InputError) as refused:
        detect(env)
    assert refused.value.field == field


NAMES = sorted({*TORCHRUN, *SLURM, "SLURM_STEP_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NODEID"})
TEXTS = st.sampled_from(["0", "1", "2", "8", "", "-1", "x", "4(x2)", "a[1-2]", "a[", "[3-1]", ",", "n1,n2"])


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS))
def test_any_environment_is_understood_or_refused(env: dict[str, str]) -> None:
    with suppress(InputError):
        found = detect(env)
        assert found is None or (0 <= found.rank < found.world and found.local_rank < found.local_world <= found.world)


PREFIX = st.from_regex(r"[a-z]([a-z0-9-]{0,6}[a-z-])?", fullmatch=True)
RANGE = st.tuples(st.integers(0, 500), st.integers(0, 4))


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Return one entry of a node list and its hosts."""
    prefix = draw(PREFIX)
    if draw(st.booleans()):
        return prefix, [prefix]
    width, suffix = draw(st.integers(1, 5)), draw(st.sampled_from(["", "-ib", ".cluster"]))
    ranges = draw(st.lists(RANGE, min_size=1, max_size=4))
    inside = [
        f"{first:0{width}d}" + (f"-{first + more:0{width}d}" if more else "") for first, more in ranges
    ]  # fmt: skip
    names = [f"{prefix}{n:0{width}d}{suffix}" for first, more in ranges for n in range(first, first + more + 1)]
    return f"{prefix}[{','.join(inside)}]{suffix}", names


@settings(max_examples=10, deadline=None)
@given(st.lists(entries(), min_size=1, max_size=5))
def test_a_node_list_expands_to_its_hosts(parts: list[tuple[str, list[str]]]) -> None:
    text = ",".join(entry for entry, _ in parts)
    assert list(hosts(text)) == [name for _, names in parts for name in names]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a,b", ["a", "b"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_node_lists_as_slurm_writes_them(text: str, expected: list[str]) -> None:
    assert list(hosts(text)) == expected


@pytest.mark.parametrize("text", ["", ",", "a,,b", "n[1-2", "n1-2]", "n[]", "n[2-1]", "n[a-b]", "n[1-2-3]", "n[[1]]"])
def test_a_broken_node_list_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        list(hosts(text))


# Joining


def test_one_process_joins_without_a_port_and_leaves(tmp_path: Path) -> None:
    def work() -> tuple[int, bool, str]:
        with join(Process(device_type="cpu")) as process:
            numbers = torch.ones(2)
            dist.all_reduce(numbers)
            inside = dist.get_backend()
        return process.world, dist.is_initialized(), inside

    assert child(tmp_path, work) == (1, False, "gloo")


def test_an_error_inside_leaves_the_group(tmp_path: Path) -> None:
    def work() -> bool:
        with pytest.raises(ValueError, match="boom"), join(Process(device_type="cpu")):
            raise ValueError("boom")
        return dist.is_initialized()

    assert child(tmp_path, work) is False


def test_a_rank_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="rank 3 needs GPU 3; this machine has 0"):
        process_group._set_device(Process(rank=3, world=4, local_rank=3, local_world=4, gpu=3, device_type="cuda"))


# Forking

Left = Callable[[], set[str]]


@pytest.fixture
def left() -> Left:
    """Return the child processes started since the test began: other tests may have left a fork server."""
    before = _children()
    return lambda: _children() - before


fork = partial(processes.fork, device_type="cpu")  # as many ranks as we like, GPUs or not


def ranks_and_sum(process: Process, more: int) -> tuple[int, int, float, int]:
    number = torch.tensor(float(process.rank))
    dist.all_reduce(number)
    return process.rank, process.world, number.item() + more, torch.get_num_threads()


def test_results_come_in_the_order_of_ranks() -> None:
    assert fork(3, ranks_and_sum, 10, timeout=30) == [(rank, 3, 13.0, 1) for rank in range(3)]


def big(process: Process) -> bytes:
    return bytes([process.rank]) * (1 << 21)


def test_a_result_larger_than_a_pipe_arrives() -> None:
    assert [(len(data), data[0]) for data in fork(2, big, timeout=30)] == [(1 << 21, 0), (1 << 21, 1)]


def fails_on_one(process: Process, how: str) -> None:
    if process.rank == 1:
        if how == "raise":
            raise ValueError("no such thing")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "input":
            raise InputError("is not there", field="data.dataset", value="x", fix=("data.dataset=mock",))
        if how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if how == "system exit":
            sys.exit(4)
    dist.barrier()
    time.sleep(60)


@pytest.mark.parametrize(
    ("how", "error_type", "message", "fix"),
    [
        ("raise", RunError, "rank 1 of 3 failed: ValueError: no such thing\n(.*\n)*.*in fails_on_one", ""),
        ("kill", RunError, "rank 1 of 3 was killed, usually because .* memory .SIGKILL.", "data.workers=0"),
        ("exit", RunError, "rank 1 of 3 exited with code 7", ""),
        ("input", InputError, "data.dataset=x: is not there", "data.dataset=mock"),
        ("memory", RunError, "rank 1 of 3 failed: the GPU ran out of memory", "layout.recompute=full"),
        ("system exit", RunError, "rank 1 of 3 failed: SystemExit: 4", ""),
    ],
)
def test_the_rank_that_failed_is_named_and_the_others_end(
    how: str, error_type: type[Exception], message: str, fix: str, left: Left
) -> None:
    began = time.monotonic()
    with pytest.raises(error_type, match=message) as failed:
        fork(3, fails_on_one, how, timeout=30)
    assert time.monotonic() - began < 10
    assert not fix or fix in failed.value.fix
    assert not left()


def unsendable(process: Process) -> Any:
    return lambda: process


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RunError, match="cannot send its result"):
        fork(2, unsendable, timeout=30)


def ignores_sigterm(process: Process, folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(folder, f"{process.rank}").write_text(str(helper.pid))
    dist.barrier()
    if process.rank == 1:
        raise ValueError("done")
    time.sleep(60)


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: Left
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    with pytest.raises(RunError, match="rank 1 of 2 failed: ValueError: done"):
        fork(2, ignores_sigterm, str(tmp_path), timeout=30)
    assert not left()
    _until(lambda: all(_is_gone(int((tmp_path / rank).read_text())) for rank in ("0", "1")))


def sleeps(process: Process) -> None:
    time.sleep(60 * process.rank)


def test_a_run_that_takes_too_long_names_the_late_rank() -> None:
    with pytest.raises(RunError, match=r"longer than 0.5 s; rank 1 is still running"):
        fork(2, sleeps, timeout=0.5)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        fork(0, sleeps)


def hangs(process: Process) -> None:
    with Watchdog(process, timeout_s=0.8, first_s=0.8) as watch:
        watch.phase(7, "data")
        if process.rank == 1:
            time.sleep(60)
        watch.phase(7, "backward")
        dist.barrier()


def test_a_hanging_collective_names_the_step_and_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.engine.watchdog.EXCHANGE_S", 1.0)
    with pytest.raises(RunError) as failed:
        fork(2, hangs, timeout=30)
    message = failed.value.reason
    assert "hangs in step 7" in message
    assert "rank 1" in message
    assert "step 7, data" in message


def times_out(process: Process) -> None:
    with Watchdog(process, timeout_s=60) as watch:
        watch.phase(3, "backward")
        if process.rank == 0:
            dist.barrier()
        time.sleep(60)


def test_a_collective_that_times_out_names_its_step() -> None:
    with pytest.raises(RunError, match=r"rank 0 of 2 failed in step 3, backward: another rank did not respond in time"):
        fork(2, times_out, timeout=30, collective_timeout_s=1.0)


def waits(process: Process, folder: str) -> None:
    Path(folder, f"{process.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if process.rank == 0:
        Path(folder, "ready").touch()
    time.sleep(60)


def forks(folder: str) -> None:
    """Do what the command line does: report the error and exit with its code."""
    os.setsid()  # a terminal of its own, as it were
    tempfile.tempdir = str(Path(folder, "tmp"))
    try:
        fork(2, waits, folder)
    except MeshwrightError as error:
        Path(folder, "message").write_text(f"{type(error).__name__} {error}")
        sys.exit(error.exit_code)


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "RunInterruptedError interrupted"),
        (
            signal.SIGTERM,
            3,
            "RunError the run was stopped from outside (SIGTERM)\n"
            "fix: restart the run: it resumes from the last checkpoint",
        ),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_ending_the_parent_ends_the_ranks(tmp_path: Path, number: signal.Signals, code: int, message: str) -> None:
    (tmp_path / "tmp").mkdir()
    parent = mp.get_context("fork").Process(target=forks, args=(str(tmp_path),))
    parent.start()
    assert parent.pid is not None
    _until((tmp_path / "ready").exists)
    began = time.monotonic()
    os.killpg(parent.pid, number)  # as a terminal does: everything in the foreground group gets it
    parent.join(20)
    assert parent.exitcode == code
    assert time.monotonic() - began < 4
    _until(lambda: all(_is_gone(int((tmp_path / rank).read_text())) for rank in ("0", "1")))
    if message:
        assert (tmp_path / "message").read_text() == message
        assert not list((tmp_path / "tmp").iterdir())


SPAWNED = """
import torch
from meshwright.engine import processes
from tests.engine.children import rank_of_world
processes.PROBE_S = 1.0
before = processes._can_fork()
torch.ones(1 << 16).sum()
print(before, processes._can_fork(), *processes.fork(1, rank_of_world, timeout=60, device_type='cpu'))
"""


@pytest.mark.slow  # imports torch twice
def test_a_process_with_openmp_threads_spawns_its_ranks(tmp_path: Path) -> None:
    root, script = Path(__file__).parents[2], tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    paths = os.pathsep.join([str(root), str(root / "src"), *sys.path[1:]])
    env = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True False 0 of 1", done.stderr


# Ranks started by torchrun and SLURM


def environment(how: str, rank: int, world: int, port: int) -> dict[str, str]:
    if how == "slurm":
        return SLURM | {
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(world),
            "SLURM_NTASKS_PER_NODE": str(world), "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(port),
        }  # fmt: skip
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip


def as_rank(how: str, rank: int, port: int, work: Any) -> Any:
    os.environ.update(environment(how, rank, 2, port))
    return start(work, device_type="cpu", timeout_s=15)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("how", ["torchrun", "slurm"])
def test_ranks_started_by_a_launcher_join(tmp_path: Path, how: str) -> None:
    port = free_port()
    ended = children(tmp_path, *(partial(as_rank, how, rank, port, summed) for rank in range(2)))
    assert [(one.code, one.result) for one in ended] == [(0, [(how, 1.0)])] * 2


def summed(process: Process) -> tuple[str, float]:
    number = torch.tensor(float(process.rank))
    dist.all_reduce(number)
    return process.how, number.item()


def one_raises(process: Process) -> None:
    with Watchdog(process, timeout_s=60, poll_s=0.2) as watch:
        watch.phase(4, "optimizer")
        if process.rank == 1:
            raise ValueError("broken")
        time.sleep(60)  # not in a collective: only the watchdog ends it


@pytest.mark.parametrize("how", ["torchrun", "slurm"])
def test_a_failure_is_reported_once_and_ends_all_ranks(tmp_path: Path, how: str) -> None:
    port, began = free_port(), time.monotonic()
    ended = children(tmp_path, *(partial(as_rank, how, rank, port, one_raises) for rank in range(2)))
    assert [one.code for one in ended] == [3, 3]
    assert "error: rank 1 of 2 failed in step 4, optimizer: ValueError: broken" in ended[1].stderr
    assert sum(one.stderr.count("error:") for one in ended) == 1
    assert time.monotonic() - began < 10


def test_nproc_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("torchrun", 0, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun already started 2 ranks"):
        start(summed, nproc=4)


def test_nproc_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert start(summed, nproc=2, device_type="cpu") == [("nproc", 1.0)] * 2


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.02)


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; those of a killed parent are reaped by another."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True

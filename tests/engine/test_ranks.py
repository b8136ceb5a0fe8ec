"""A native crash of one rank fails one test, with its signal and output, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.engine.ranks import NativeCrashError, NativeCrashWarning, run

ROOT = Path(__file__).parents[2]
CRASH = """
import os
from tests.engine.ranks import run

def fine(rank, world):
    return rank

def crash(rank, world):
    print("last line before the crash", flush=True)
    if rank == 1:
        os.abort()

def test_before():
    assert run(2, fine) == [0, 1]

def test_crash():
    run(2, crash)

def test_after():
    assert run(2, fine) == [0, 1]
"""


def attempts(folder: Path) -> int:
    return len(list(folder.glob("attempt_*")))


def crash_below(rank: int, world: int, folder: Path, limit: int, number: int) -> int:
    """Crash rank 1 by a signal until the run has been tried `limit` times; the other rank waits for it."""
    if rank == 1:
        (folder / f"attempt_{attempts(folder)}").touch()
        if attempts(folder) <= limit:
            print("about to crash", flush=True)
            os.kill(os.getpid(), number)
    dist.barrier()
    return rank


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_run_with_a_native_crash_is_repeated_once_with_a_warning(tmp_path: Path, number: signal.Signals) -> None:
    with pytest.warns(NativeCrashWarning, match=rf"rank 1 of 2 crashed in native code \({number.name}\)"):
        assert run(2, crash_below, tmp_path, 1, int(number)) == [0, 1]
    assert attempts(tmp_path) == 2


def test_a_second_crash_is_an_error_with_signal_and_last_output(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.warns(NativeCrashWarning), pytest.raises(NativeCrashError) as error:
        run(2, crash_below, tmp_path, 9, int(signal.SIGABRT))
    assert re.search(r"rank 1 of 2 .*\(SIGABRT\)", str(error.value))
    assert "about to crash" in str(error.value)
    assert "Fatal Python error: Aborted" in str(error.value)  # where in Python it was
    assert attempts(tmp_path) == 2
    assert time.monotonic() - begun < 30  # the other rank, which waits for the crashed one, is not waited for


def test_other_failures_are_not_repeated(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NativeCrashWarning)
        with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:[^$]*a wrong shape"):
            run(2, fail, tmp_path)
        with pytest.raises(AssertionError, match="rank 1 of 2 ended with exit code -9"):
            run(2, crash_below, tmp_path, 9, int(signal.SIGKILL))
        with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
            run(2, hang, timeout=2.0)
    assert attempts(tmp_path) == 2  # one of each


def fail(rank: int, world: int, folder: Path) -> None:
    if rank == 1:
        (folder / "attempt_0").touch()
        raise ValueError("a wrong shape")


def hang(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


@pytest.mark.slow  # runs pytest with crashing workers
def test_a_crash_fails_one_test_and_leaves_its_worker_alive(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(CRASH)
    command = [sys.executable, "-m", "pytest", "-n1", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tmp_path / "test_planted.py")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stdout
    assert re.search(r"1 failed, 2 passed, 1 warning", done.stdout)
    assert re.search(r"FAILED .*test_crash", done.stdout)
    assert (
        "NativeCrashWarning: repeated after a native crash: rank 1 of 2 crashed in native code (SIGABRT)" in done.stdout
    )
    assert "last line before the crash" in done.stdout
    assert "worker 'gw0' crashed" not in done.stdout

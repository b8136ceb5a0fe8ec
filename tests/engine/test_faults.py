"""A failing run reports cause and fix; a loss that is not finite never reaches the weights."""

from __future__ import annotations

import math
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.children import child, children
from tests.engine.ranks import run

from meshwright.engine.faults import LESS_GPU_MEMORY, RunError, blames_another, explain, explain_death, guard
from meshwright.engine.loss_guard import LossGuard
from meshwright.engine.metrics.jsonl import read
from meshwright.engine.rank_env import Process
from meshwright.engine.watchdog import Watchdog
from meshwright.errors import InputError

CPU = torch.device("cpu")
RANK = Process(rank=2, world=4)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "message", "fix"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "the GPU ran out of memory", LESS_GPU_MEMORY[0]),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "the GPU ran out of memory", LESS_GPU_MEMORY[1]),
        (MemoryError(), "the machine ran out of memory", "data.workers=0"),
        (OSError(28, "No space left on device"), "the disk is full", "free space"),
        (RuntimeError("DataLoader worker is killed by signal: Bus error"), "shared memory", "data.workers=0"),
        (RuntimeError("CUDA error: device-side assert triggered"), "token id", "data.tokenizer"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), "another rank exited", "other rank"),
        (RuntimeError("Timed out waiting 1000ms for recv"), "did not respond in time", "other rank"),
        (
            RuntimeError("Attribute '_input_metadata' is invalid for this instance"),
            "zero-bubble",
            "layout.pp_schedule=1f1b",
        ),
        (ValueError("plain"), "rank 2 of 4 failed: ValueError: plain", ""),
    ],
)
def test_an_error_is_explained_with_its_remedy(error: Exception, message: str, fix: str) -> None:
    explained = explain(raised(error), RANK)
    assert isinstance(explained, RunError)
    assert explained.exit_code == 3
    assert "rank 2 of 4" in explained.reason
    assert message in explained.reason
    assert "in raised" in explained.reason  # where it happened
    assert fix in " ".join(explained.fix)


def test_a_long_message_is_cut_and_an_input_error_is_unchanged() -> None:
    assert len(explain(raised(ValueError("x" * 10_000)), RANK).reason) < 2000
    input_error = InputError("is wrong", field="layout.tp", value=3)
    assert explain(input_error, RANK) is input_error
    assert explain(KeyboardInterrupt(), RANK).reason == "interrupted"


def test_only_a_rank_that_lost_another_blames_it() -> None:
    assert blames_another(explain(raised(RuntimeError("Connection reset by peer")), RANK))
    assert not blames_another(explain(raised(ValueError("mine")), RANK))


@pytest.mark.parametrize(
    ("code", "message"),
    [(-signal.SIGKILL, "SIGKILL"), (-signal.SIGSEGV, "SIGSEGV"), (-40, "signal 40"), (7, "exited with code 7")],
)
def test_an_exit_code_is_explained(code: int, message: str) -> None:
    assert message in explain_death(1, 2, code).reason


def test_an_error_keeps_its_parts_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RunError("why", field="f", value=1, fix=("do",))))
    assert (type(error), error.reason, error.field, error.value, error.fix) == (RunError, "why", "f", 1, ("do",))


def test_in_a_single_process_the_explained_error_is_raised() -> None:
    def work() -> None:
        with guard(Process()), Watchdog(Process(), timeout_s=60) as watch:
            watch.phase(9, "forward")
            raise ValueError("x")

    with pytest.raises(RunError, match=r"the run failed in step 9, forward: ValueError: x") as failed:
        work()
    assert isinstance(failed.value.__cause__, ValueError)


def test_under_torchrun_bad_input_exits_with_2_and_a_failure_with_3(tmp_path: Path) -> None:
    place = Process(rank=1, world=2, how="torchrun")

    def bad_input() -> None:
        with guard(place):
            raise InputError("is wrong", field="layout.tp", value=3, fix=("layout.tp=2",))

    def failure() -> None:
        with guard(place):
            raise ValueError("x")

    first, second = children(tmp_path, bad_input, failure)
    assert (first.code, first.stderr) == (2, "error: rank 1 of 2: layout.tp=3: is wrong\nfix:   layout.tp=2\n")
    assert second.code == 3
    assert second.stderr.startswith("error: rank 1 of 2 failed: ValueError: x\n")


def test_a_phase_that_takes_too_long_ends_the_process(tmp_path: Path) -> None:
    def hang() -> None:
        import time

        with Watchdog(Process(), timeout_s=0.2, first_s=0.2) as watch:
            watch.phase(5, "checkpoint")
            time.sleep(30)

    (ended,) = children(tmp_path, hang)
    assert ended.code == 3
    assert "hangs in step 5, checkpoint: no progress for 0.2 s" in ended.stderr


def test_phases_that_move_on_are_left_alone_and_the_first_step_has_more_time(tmp_path: Path) -> None:
    def slow_start() -> str:
        import time

        with Watchdog(Process(), timeout_s=0.4, first_s=30) as watch:
            watch.phase(1, "forward")
            time.sleep(0.8)  # compiles
            for step in range(2, 8):
                watch.phase(step, "forward")
                time.sleep(0.1)
        return "done"

    assert child(tmp_path, slow_start) == "done"


# Losses that are not finite


def decisions(rank: int, world: int, folder: str, policy: Any, losses: list[list[float]]) -> list[bool | str]:
    guarded = LossGuard(policy, 2, Path(folder), CPU)
    found: list[bool | str] = []
    for step, by_rank in enumerate(losses, 1):
        try:
            found.append(guarded.allows(step, torch.tensor(by_rank[rank]), 1.0, [10 * step + rank]))
        except RunError as error:
            return [*found, error.reason]
    return found


def test_ranks_agree_to_skip_and_record_the_bad_one(tmp_path: Path) -> None:
    losses = [[1.0, 1.0], [1.0, math.nan], [math.inf, 1.0], [1.0, 1.0], [math.nan, math.nan]]
    first, second = run(2, decisions, str(tmp_path), "skip", losses, timeout=30)
    assert first == second == [True, False, False, True, False]
    assert [(line["step"], line["rank"], line["loss"], line["samples"]) for line in _bad(tmp_path)] == [
        (2, 1, "nan", [21]), (3, 0, "inf", [30]), (5, 0, "nan", [50]), (5, 1, "nan", [51]),
    ]  # fmt: skip


def test_ranks_stop_together(tmp_path: Path) -> None:
    first, second = run(2, decisions, str(tmp_path), "stop", [[1.0, 1.0], [1.0, math.nan]], timeout=30)
    assert first == second
    assert first[0] is True
    assert str(first[1]).startswith("the loss is nan in step 2 on rank 1; the batches are in")


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    *skipped, message = decisions(0, 1, str(tmp_path), "skip", [[math.nan]] * 3)
    assert skipped == [False, False]
    assert "in step 3 on rank 0, after 2 skipped steps in a row" in str(message)


def test_a_gradient_norm_counts_too(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the gradient norm is inf in step 1"):
        LossGuard("stop", 1, tmp_path, CPU).allows(1, 2.0, torch.tensor(math.inf))


class _Copied:
    """A CUDA event of a copy that has arrived."""

    def synchronize(self) -> None:
        pass


def test_values_that_are_read_later_stop_the_run_with_the_step_they_belong_to(tmp_path: Path) -> None:
    guarded = LossGuard("stop", 1, tmp_path, CPU, ("kernels.compile=false",))
    for step, values in enumerate(([2.0, 1.0], [2.0, math.inf]), 1):
        guarded._unread.append((step, torch.tensor(values), _Copied(), [step]))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="the gradient norm is inf in step 2") as stopped:
        guarded.read_all()
    assert stopped.value.fix[:1] == ("a lower optimizer.lr",)
    assert "kernels.compile=false" in stopped.value.fix
    assert [line["samples"] for line in _bad(tmp_path)] == [[2]]


def test_a_record_that_cannot_be_written_does_not_change_the_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad_batches.jsonl").symlink_to("/dev/full")
    assert LossGuard("skip", 1, tmp_path, CPU).allows(1, math.nan, 1.0) is False
    assert "No space left on device" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert LossGuard("skip", 1, tmp_path / "file" / "x", CPU).allows(1, math.nan, 1.0) is False


@pytest.mark.parametrize(("policy", "limit"), [("ignore", 1), ("skip", 0)])
def test_an_unknown_policy_is_refused(tmp_path: Path, policy: Any, limit: int) -> None:
    with pytest.raises(InputError):
        LossGuard(policy, limit, tmp_path, CPU)


def _bad(folder: Path) -> list[dict[str, Any]]:
    return list(read(folder / "bad_batches.jsonl"))

"""Ctrl-C and other stop signals, typed in a real terminal."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.terminal import CTRL_C, Action, Transcript, in_terminal

RECIPE = "qwen3_600m_pretrain_config"
TRAIN = ("train", RECIPE, "--tiny", "train.steps=100000", "checkpoint.export=none", "--out", "run")
STEPPING = "grad norm"
STARTING = "importing torch"
TERM = signal.SIGTERM


def saved_steps(folder: Path) -> list[str]:
    """Return the names of the checkpoints of a run folder."""
    return sorted(one.name for one in (folder / "run" / "checkpoints").glob("step-*"))


def assert_ends_clearly(done: Transcript) -> None:
    """Check what every interrupted command has in common."""
    assert done.cursor_visible
    assert "Traceback" not in done.text
    assert "Exception" not in done.text


def test_ctrl_c_saves_a_run_and_prints_the_command_that_resumes_it(tmp_path: Path, meshwright: Any) -> None:
    import tests.engine.children  # noqa: F401  # imports torch as a process that forks ranks needs it

    done = in_terminal(TRAIN, [(STEPPING, CTRL_C), (0.3, CTRL_C)], tmp_path, forked=True)
    assert_ends_clearly(done)
    assert done.code == 75, done.text
    (step,) = saved_steps(tmp_path)
    assert done.last_line == (
        f"interrupted (Ctrl-C); checkpoint saved at step {int(step[5:])} in run; "
        f"resume with: python -m meshwright {' '.join(TRAIN)}"
    )
    diagnosed = meshwright("doctor", str(tmp_path / "run"), "--json").json
    assert diagnosed["notes"][-1] == f"the log ends at step {int(step[5:]):,} of 100,000: {done.last_line}"


def test_ctrl_c_during_the_start_up_says_that_nothing_was_saved(tmp_path: Path) -> None:
    done = in_terminal(TRAIN, [(STARTING, CTRL_C)], tmp_path)
    assert_ends_clearly(done)
    assert done.code == 130
    assert "before the first step; nothing was saved; start again with: python -m meshwright" in done.last_line


@pytest.mark.slow  # a run each
@pytest.mark.parametrize(
    ("options", "actions"),
    [
        ((), [(STEPPING, CTRL_C), (0.3, CTRL_C)]),
        ((), [(STEPPING, TERM), (1.3, TERM), (0.1, TERM), (0.1, CTRL_C)]),
        (("--nproc", "2"), [(STEPPING, TERM), (1.3, TERM), (0.1, CTRL_C), (0.1, TERM)]),
        (("--nproc", "2"), [(STEPPING, CTRL_C), (1.3, CTRL_C)]),
        (("checkpoint.save_every=1",), [(STEPPING, CTRL_C), (0.1, CTRL_C)]),  # while it saves
        (("train.eval_every=2", "train.eval_steps=1000"), [(STEPPING, signal.SIGHUP)]),  # before a long evaluation
    ],
)
def test_more_signals_do_not_disturb_the_save(
    tmp_path: Path, options: tuple[str, ...], actions: list[tuple[str | float, Action]]
) -> None:
    done = in_terminal([*TRAIN, *options], actions, tmp_path)
    assert_ends_clearly(done)
    assert done.code == 75, done.text
    assert "resume with: python -m meshwright train" in done.last_line
    resumed = in_terminal([*TRAIN, *options], [(STEPPING, CTRL_C)], tmp_path)
    assert resumed.code == 75, resumed.text
    assert saved_steps(tmp_path)


@pytest.mark.slow  # imports torch five times
@pytest.mark.parametrize(
    ("arguments", "trigger"),
    [
        (("bench", RECIPE, "--tiny", "train.steps=100000"), STEPPING),
        (("train", RECIPE, "--tiny", "train.steps=100000"), STEPPING),
        (("dryrun", "llama3_8b_pretrain_config", "--exact"), 4.0),
        (("web", "--port", "0"), "Serving"),
        (("plan", "llama3-70b", "--gpus", "512xH100", "--goal", "pretrain"), 0.5),
    ],
)
def test_other_commands_end_with_one_line(tmp_path: Path, arguments: tuple[str, ...], trigger: str | float) -> None:
    done = in_terminal(arguments, [(trigger, CTRL_C)], tmp_path)
    assert_ends_clearly(done)
    assert done.code in (0, 130)
    assert done.last_line.startswith(("interrupted", "stopped"))

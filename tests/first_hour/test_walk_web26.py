"""What a person sees of the site, of progress in a pipe and of hostile files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import meshwright  # noqa: F401  # a fixture

from meshwright import stages
from meshwright.cli import progress
from meshwright.display import two_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0024, "0.0024"), (1.64, "1.6"), (99.4, "99"), (99.6, "100"), (164.0, "164"), (15e3, "15,000")],
)
def test_figures_of_messages_have_no_exponent(value: float, text: str) -> None:
    assert two_digits(value) == text


def test_progress_in_a_pipe_is_lines_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_FIRST_S", 0.1)
    with progress.progress_line() as show:
        time.sleep(0.25)  # the import of torch names no stage
        assert show is not None
        show("tracing rank 0\x1b[2K")
        time.sleep(0.25)
        stages.stage("tracing rank 1")
        time.sleep(0.25)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0 s: starting"
    assert "0 s: tracing rank 0 [2K" in lines
    assert lines[-1].endswith("s: tracing rank 1")
    assert all(line.isprintable() for line in lines)


def test_lines_of_long_work_come_less_often() -> None:
    log = progress._Log("x", 5.0)
    assert [log.next_wait(seconds) for seconds in (5, 60, 600, 3600)] == [5, 6, 60, 360]


def test_short_commands_in_a_pipe_write_no_progress(meshwright: Any) -> None:  # noqa: F811
    answer = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft")
    assert " s: " not in answer.err


def test_a_check_of_many_files_counts_them(
    meshwright: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    monkeypatch.setattr(progress._Log, "show", lambda self, text: shown.append(text))
    for number in range(3):
        (tmp_path / f"{number}.sh").write_text("torchrun pretrain_gpt.py --num-layers 2\n")
    meshwright("check", "0.sh", "1.sh", "2.sh", "--gpus", "8xH100")
    assert shown[-1] == "check: 3 of 3 files"

"""What a person sees of the site, of progress in a pipe and of hostile files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import hostile_files
from tests.cli.conftest import meshwright  # noqa: F401  # a fixture

from meshwright import stages
from meshwright.cli import progress
from meshwright.cli.completion import script_of
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


QUICK = ("YAML aliases", "invalid UTF-8 in a script")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in hostile_files.FILES]
)
def test_a_hostile_file_ends_within_its_limits_and_with_a_message(name: str) -> None:
    for row in hostile_files.rows(name):
        assert row["problems"] == [], row
        assert row["message"]


def _with_command(folder: Path) -> dict[str, str]:
    """Return an environment in which `meshwright` is a command."""
    command = folder / "meshwright"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m meshwright "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_models_and_goals(tmp_path: Path) -> None:
    (tmp_path / "meshwright.fish").write_text(script_of("fish"))
    for typed, wanted in (("meshwright recommend llama3-70", "llama3-70b"), ("meshwright recommend x --goal s", "sft")):
        words = ["fish", "-c", f"source {tmp_path}/meshwright.fish; complete -C '{typed}'"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=_with_command(tmp_path))
        assert wanted in done.stdout.split()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_takes_the_completion(tmp_path: Path) -> None:
    (tmp_path / "meshwright.zsh").write_text(script_of("zsh"))
    program = f"source {tmp_path}/meshwright.zsh; print ${{_comps[meshwright]}}"
    done = subprocess.run(
        ["zsh", "-f", "-c", program], capture_output=True, text=True, check=True, env=_with_command(tmp_path)
    )
    assert done.stdout.strip() == "_meshwright_completion"


def test_an_illegal_plan_that_does_not_fit_has_its_reasons(meshwright: Any) -> None:  # noqa: F811
    options = ("--gpus", "16xH100", "--goal", "sft", "layout.tp=3", "--explain", "--json")
    found = json.loads(meshwright("recommend", "qwen3-30b-a3b", *options).out)
    assert {"reasons", "memory_by_stage_gib"} <= found.keys()

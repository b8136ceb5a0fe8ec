"""Every file in examples/ runs as it stands."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import meshwright  # noqa: F401  # a fixture

from meshwright import api

EXAMPLES = Path(__file__).parents[1] / "examples"
SRC = Path(__file__).parents[1] / "src"
NEEDS_TORCH = ("09_dry_run.py", "dry_run.ipynb")


def run(*words: str, **env: str) -> str:
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=EXAMPLES.parent,
        env={**os.environ, "PYTHONPATH": str(SRC), **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cells(notebook: Path) -> str:
    """The code of a notebook as one script; the last expression of each cell is printed, as Jupyter shows it."""
    found = [cell["source"] for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [[*lines[:-1], f"print({lines[-1].rstrip()})\n"] for lines in found]
    body = "".join("    " + line if line.strip() else line for lines in shown for line in lines)
    return 'if __name__ == "__main__":\n' + body


def files(pattern: str) -> list[Any]:
    """Return the names of examples; those that import torch are slow."""
    names = sorted(path.name for path in EXAMPLES.glob(pattern))
    return [pytest.param(name, marks=pytest.mark.slow if name in NEEDS_TORCH else ()) for name in names]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """Run a script in this process, from the repository's root; return what it printed."""

    def call(script: Path) -> str:
        monkeypatch.chdir(EXAMPLES.parent)
        monkeypatch.setattr(sys, "argv", [str(script)])
        monkeypatch.syspath_prepend(str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", files("*.py"))
def test_script(name: str, run_here: Callable[[Path], str]) -> None:
    assert run_here(EXAMPLES / name).strip()


def test_a_script_in_a_process_of_its_own() -> None:
    assert run(sys.executable, str(sorted(EXAMPLES.glob("*.py"))[0])).strip()


def test_the_dry_run_with_fewer_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    whole = api.dryrun
    monkeypatch.setattr(api, "dryrun", lambda *a, **kw: whole(*a, overrides=["architecture.layers=2"], **kw))
    runpy.run_path(str(EXAMPLES / "09_dry_run.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("fits: True; 1 distinct ranks")


@pytest.mark.parametrize("name", files("*.ipynb"))
def test_notebook(name: str, tmp_path: Path, run_here: Callable[[Path], str]) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(cells(EXAMPLES / name))
    assert run_here(script).strip()


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_commands_in_the_comments_of_a_file(
    name: str,
    meshwright: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    commands = re.findall(r"^# meshwright (.+)$", (EXAMPLES / name).read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        answer = meshwright(*command.split())
        assert answer.code == 0, answer.err
        assert answer.out.strip()


def test_commands_of_the_training(meshwright: Any, tmp_path: Path) -> None:  # noqa: F811
    """The script's commands on one rank in this process; with its two ranks it is the slow test below."""
    script = (EXAMPLES / "08_train_tiny.sh").read_text().replace("\\\n", "").replace("--nproc 2", "--nproc 1")
    script = script.replace("$run", str(tmp_path / "run"))
    (defined,) = re.findall(r"^train\(\) \{\n *meshwright (.+)\n\}", script, re.MULTILINE)
    answers = []
    for command, words in re.findall(r"^(train|meshwright) ([^#\n]+)", script, re.MULTILINE):
        typed = defined.replace('"$@"', words) if command == "train" else words
        answers.append(meshwright(*shlex.split(typed)))
        assert answers[-1].code == 0, answers[-1].err
    first, resumed, generated = answers
    assert "4 steps on 1 × CPU" in first.out
    assert "4 steps on 1 × CPU" in resumed.out
    assert "step-00000008" in resumed.out
    assert generated.out.strip()


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    shim = tmp_path / "meshwright"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    shim.chmod(0o755)
    said = run("bash", str(EXAMPLES / "08_train_tiny.sh"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert said.count("4 steps on 2 × CPU") == 2
    assert "step-00000008" in said


def test_the_list_of_examples_is_complete() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml", ".sh", ".ipynb")]
    assert [name for name in files if name not in listed] == []
    assert len(files) >= 12

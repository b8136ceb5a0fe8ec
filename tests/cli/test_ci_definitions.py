"""The GitHub Action and the pre-commit hook run what their definitions say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "ci_repository"


def load(name: str) -> Any:
    return YAML(typ="safe").load((ROOT / name).read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the sample repository, with the command of this interpreter on the path."""
    shutil.copytree(SAMPLE, tmp_path / "repository")
    shim = tmp_path / "bin" / "meshwright"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "repository")
    return tmp_path / "repository"


def run_action(**inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the last step of the action with its inputs, as GitHub does."""
    action = load("action.yml")
    step = action["runs"]["steps"][-1]
    given = {name: one["default"] for name, one in action["inputs"].items()} | inputs
    environment = {name: given[text.split("inputs.")[1].split(" ")[0]] for name, text in step["env"].items()}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_the_action_annotates_and_fails(folder: Path) -> None:
    done = run_action(gpus="8xH100", sarif="found.sarif")
    assert done.returncode == 1, done.stderr
    assert "::error file=configs/llama3_8b.toml,line=8" in done.stdout
    assert '"version": "2.1.0"' in (folder / "found.sarif").read_text()


def test_inputs_of_the_action_are_not_executed(folder: Path) -> None:
    done = run_action(paths="configs/**/*.json jobs", gpus="8xH100", arguments="--ignore $(touch${IFS}hacked)")
    assert done.returncode == 2
    assert not list(folder.glob("hacked*"))
    assert run_action(paths="configs/**/*.json jobs", gpus="8xH100").returncode == 0


def test_the_hook_checks_changed_files_and_skips_others(folder: Path) -> None:
    (hook,) = load(".pre-commit-hooks.yaml")
    names = ["deploy/prometheus.yaml", "configs/llama3_8b.toml"]
    done = subprocess.run([*hook["entry"].split(), *names], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "skipped deploy/prometheus.yaml" in done.stdout
    assert subprocess.run([*hook["entry"].split(), names[0]], capture_output=True, check=False).returncode == 0

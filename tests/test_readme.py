"""What the README says to type works, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
NEEDS_TORCH = ("dryrun", "train", "evaluate", "bench", "generate", "convert", "tokenize")


def commands(text: str) -> list[list[str]]:
    """Commands in shell blocks and in tables that can be pasted as they stand."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"\| `(meshwright [^`]*)` \|", text)
    return [shlex.split(line, comments=True) for line in lines if line.startswith("meshwright ")]


ALL = commands(README)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300)


@pytest.mark.parametrize("words", [w for w in ALL if w[1] not in NEEDS_TORCH], ids=" ".join)
def test_command(words: list[str]) -> None:
    done = run(words, ROOT)
    assert done.returncode in (0, 1), done.stderr  # 1: the example config and the example run have problems
    assert done.stdout


@pytest.mark.slow
def test_commands_that_train(tmp_path: Path) -> None:
    for words in [w for w in ALL if w[1] in NEEDS_TORCH]:
        done = run(words, tmp_path)
        assert done.returncode == 0, f"{words}: {done.stderr}"


def test_there_are_commands_of_both_kinds() -> None:
    assert {w[1] for w in ALL} >= {"recommend", "plan", "check", "dryrun", "train", "doctor", "evaluate"}


def test_python_snippet() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert "Layout(" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not re.match(r"https?:|mailto:", link)]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_length() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert len(prose.split()) <= 1000

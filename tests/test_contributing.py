"""The worked examples of CONTRIBUTING.md, applied to a copy of the tree."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(
    r"<!-- file: (\S+), ([^>]+) -->\n```\w+\n(.*?)```(?:\n\n<!-- check -->\n```sh\n(.*?)```)?", re.DOTALL
)
EXAMPLES = EXAMPLE.findall(TEXT)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def insert(path: Path, how: str, addition: str) -> None:
    text = path.read_text(encoding="utf-8")
    if how == "append to the list":
        entries = [*json.loads(text), json.loads(addition)]
        path.write_text(json.dumps(entries), encoding="utf-8")
    elif how == "append":
        path.write_text(f"{text}\n\n{addition}", encoding="utf-8")
    else:
        pytest.fail(f"CONTRIBUTING.md: unknown instruction {how!r}")


def run(folder: Path, command: str) -> str:
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder / "src")}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("file", "how", "addition", "check"), [e for e in EXAMPLES if e[3]], ids=lambda v: v.split("/")[-1][:20]
)
def test_example(copy: Path, file: str, how: str, addition: str, check: str) -> None:
    insert(copy / file, how, addition)
    assert run(copy, check.strip())


def test_framework_key_example(copy: Path) -> None:
    """A row in the key map is read by overrides at once."""
    ((file, _, row, _),) = [e for e in EXAMPLES if "key_maps" in e[0]]
    path = copy / file
    text = path.read_text(encoding="utf-8")
    first = re.search(r"^    ConfigKey\(", text, re.MULTILINE)
    assert first is not None
    path.write_text(text[: first.start()] + f"    {row.strip()},\n" + text[first.start() :], encoding="utf-8")
    shown = run(copy, "meshwright recipe llama3_8b_pretrain_config train.example_steps=7 --format json")
    assert json.loads(shown)["train"]["steps"] == 7 if "train" in json.loads(shown) else '"steps": 7' in shown


def test_architecture_example(copy: Path, tmp_path: Path) -> None:
    """A row in a table reads a new model_type with the parameters that its test row has."""
    ((file, how, row, _),) = [e for e in EXAMPLES if "own_code_table" in e[0]]
    insert(copy / file, how, row)
    found = re.search(r"PUBLISHED\[.*?\] = (\(.*?\n\))", TEXT, re.DOTALL)
    assert found is not None
    total, config = ast.literal_eval(found[1])
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shown = run(copy, f"meshwright inspect {tmp_path}/config.json --json")
    assert json.loads(shown)["parameters"]["total"] == total


def test_every_kind_of_contribution_has_a_section() -> None:
    for what in ("model", "GPU", "rule", "framework key", "kernel"):
        assert re.search(rf"^## Add a {what}$", TEXT, re.MULTILINE)
    for path in re.findall(r"`((?:src|tests)/[\w/.]+\.\w+)`", TEXT):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:engine|kernels|frameworks)/[\w/]+\.py)`", TEXT):
        assert list((ROOT / "src/meshwright").rglob(path.split("/", 1)[1])), path

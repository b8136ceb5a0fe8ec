"""The first minute: what `meshwright` alone shows, completion in one command, progress on a terminal, plots."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from tests.first_hour.terminal import in_terminal

from meshwright import stages
from meshwright.api.verbs import verbs_on
from meshwright.cli import plots, progress
from meshwright.cli.app import app
from meshwright.cli.completion import VARIABLE, install
from meshwright.cli.start_page import TRY

SOURCE = Path(__file__).parents[2] / "src"
ENV = {**os.environ, "PYTHONPATH": str(SOURCE)}


def test_alone_it_shows_three_things_to_try(meshwright: Any) -> None:
    answer = meshwright()
    assert answer.code == 0
    assert len(TRY) == 3
    commands = [command for _, *typed in TRY for command in typed]
    assert all(command in answer.out for command in commands)
    assert "meshwright --help" in answer.out
    names = {verb.name for verb in verbs_on("cli")}
    assert {shlex.split(command)[1] for command in commands} <= names


@pytest.mark.parametrize("command", [TRY[0][1], TRY[0][2], TRY[1][2], TRY[2][1]])
def test_what_it_shows_can_be_typed(command: str, meshwright: Any) -> None:
    assert meshwright(*shlex.split(command)[1:]).code in (0, 1)  # 1: the answer of check is no


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_once(
    shell: str, meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    startup = tmp_path / f".{shell}rc"
    startup.write_text("alias ll='ls -l'")  # no line break at the end
    assert meshwright("completion", "--install").code == 0
    first = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert "already" in meshwright("completion", "--install").out
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == first
    assert first[startup].startswith("alias ll='ls -l'")
    assert first[startup].count("# meshwright completion") == (shell != "fish")
    assert any("_MESHWRIGHT_COMPLETE" in text for text in first.values())


def test_an_unknown_shell_is_named(meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    answer = meshwright("completion", "--install")
    assert answer.code == 2
    assert "meshwright completion bash --install" in answer.err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_models_gpus_goals_and_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    install("bash")
    command = tmp_path / "bin" / "meshwright"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    command.chmod(0o755)
    lines = {
        "recommend llama3_8": "llama3_8b",
        "recommend llama3-8b --gpus 8xH2": "8xH200",
        "recommend llama3-8b --goal q": "qlora",
        "check llama3_8b_sft": "llama3_8b_sft_config",
    }
    script = ". ~/.bashrc\n"
    for words in lines:
        typed = shlex.split(f"meshwright {words}")
        script += f"COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(typed) - 1}; COMPREPLY=()\n"
        script += '_meshwright_completion meshwright; echo "${COMPREPLY[*]}"\n'
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**ENV, "HOME": str(tmp_path), "PATH": path}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=120, check=False)
    for (words, wanted), found in zip(lines.items(), done.stdout.splitlines(), strict=True):
        assert wanted in found.split(), (words, found, done.stderr)


@pytest.mark.parametrize(
    ("words", "typed", "completed"),
    [
        (("check",), "configs/ll", "file configs/ll"),
        (("check", "a.yaml"), "configs/", "file configs/"),
        (("recommend",), "./mine.t", "file ./mine.t"),
        (("doctor",), "slurm-47", "file slurm-47"),
        (("plan", "llama3-8b", "--gpus"), "site.t", "file site.t"),
        (("convert", "runs/mine"), "", "file "),
        (("export", "mine.toml", "--out"), "conf", "file conf"),
        (("check",), "llama3_8b_sft_c", "plain llama3_8b_sft_config"),
        (("export", "mine.toml", "--to"), "x", ""),
        (("plan", "llama3-8b", "--goal"), "x", ""),
        (("plan", "llama3-8b", "--top"), "x", ""),
    ],
)
def test_the_shell_completes_paths_where_no_name_starts_so(words: tuple[str, ...], typed: str, completed: str) -> None:
    found = ShellComplete(app, {}, "meshwright", VARIABLE).get_completions([*words], typed)
    assert ", ".join(f"{one.type} {one.value}" for one in found if one.type == "file" or one == found[0]) == completed


class Terminal:
    """A stderr that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_work_of_over_two_seconds_shows_its_stage_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "TICK_S", 0.02)
    with progress.waiting_line("size llama3-8b", shown_after_s=0.1):
        assert shown.text == ""
        time.sleep(0.2)
        stages.stage("size: 64 GPUs (3 of 9 counts done)")
        time.sleep(0.1)
    assert "0 s: size llama3-8b" in shown.text
    assert "size: 64 GPUs (3 of 9 counts done)" in shown.text
    assert shown.text.endswith(progress.START_OF_LINE)
    shown.text = ""
    with progress.waiting_line("quick"):
        pass
    assert shown.text == ""


def test_a_long_search_shows_what_it_does_on_a_terminal_only(tmp_path: Path) -> None:
    words = ["size", "deepseek-v3", "--goal", "pretrain", "--gpu", "H100", "--max-gpus", "1024"]
    seen = in_terminal(words, [], tmp_path)
    assert seen.code == 0
    if re.search(r"\n?[2-9] s: ", seen.text):  # a machine that takes under two seconds shows nothing
        assert "counts done)" in seen.text
    piped = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], env=ENV, capture_output=True, text=True, timeout=120, check=False
    )
    assert (piped.returncode, piped.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "llama3_70b_pretrain_config"),
        ("inspect", "qwen3-30b-a3b"),
        ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--max-gpus", "8"),
    ],
)
def test_a_plot_needs_no_package(
    words: tuple[str, ...], meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    answer = meshwright(*words, "--plot", "figure.svg")
    assert answer.code == 0, answer.err
    root = ElementTree.parse("figure.svg").getroot()
    assert root.tag.endswith("svg")
    texts = [one.text for one in root.iter() if one.tag.endswith("text")]
    assert len([text for text in texts if text]) > 8
    for one in root.iter():
        assert "nan" not in " ".join(one.attrib.values())

"""Item 1: without an extra, every command that needs it ends with one line, exit code 2 and what to install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from meshwright import extras
from meshwright.errors import InputError

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
RECIPE = "qwen3_600m_sft_config"
FIRST_ANSWER_S = 10.0  # of a new installation, whose bytecode is not compiled yet
TRAIN = {
    "train": ["train", RECIPE, "--tiny"],
    "train on two ranks": ["train", RECIPE, "--tiny", "--nproc", "2"],
    "bench": ["bench", RECIPE],
    "generate": ["generate", "runs/mine", "Hello"],
    "evaluate": ["evaluate", "runs/mine", "--nproc", "2"],
    "convert": ["convert", "runs/mine", "out"],
    "tokenize": ["tokenize", "corpus.txt", "--tokenizer", "bytes", "--out", "tokens"],
    "samples": ["samples", RECIPE, "data.tokenizer=bytes"],
    "calibrate": ["calibrate"],
    "dryrun": ["dryrun", RECIPE, "--gpus", "2xH100"],
    "recommend with a dry run": ["recommend", "qwen3-600m", "--gpus", "2xH100", "--goal", "sft", "--dry-run"],
}
OTHERS = {
    "web": (["web"], "web"),
    "mcp": (["mcp"], "mcp"),
    "plot": (["estimate", RECIPE, "--plot", "memory.png"], "plot"),
}
WITHOUT_EXTRAS = {
    "recommend": ["recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft"],
    "check": ["check", "llama3_8b_sft_config"],
    "launch": ["launch", "llama3_8b_sft_config", "--scheduler", "torchrun", "--gpus", "8xH100"],
}
# Types commands in one process whose imports find nothing of BLOCKED.
TYPED = """
import contextlib, io, json, os, sys
from importlib.machinery import PathFinder

BLOCKED = set(os.environ["BLOCKED"].split(","))

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
from meshwright.cli.run import run

answers = {}
for name, words in json.loads(sys.argv[1]).items():
    for more in ([], ["--json"]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                run([*words, *more])
            except SystemExit as ended:
                code = ended.code
        answers[name + "".join(more)] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(answers))
"""


def typed(commands: dict[str, list[str]], blocked: str, path: str = "") -> dict[str, Any]:
    """Type commands without some packages; return exit code, stdout and stderr of each."""
    env = ENV | {"BLOCKED": blocked, "PYTHONPATH": os.pathsep.join(filter(None, (path, ENV["PYTHONPATH"])))}
    done = subprocess.run(
        [sys.executable, "-c", TYPED, json.dumps(commands)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_one_line(answers: dict[str, Any], name: str, extra: str) -> str:
    """Assert one line on stderr, exit code 2 and the same error as JSON; return the line."""
    code, out, err = answers[name]
    assert (code, out) == (2, ""), (name, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert f'pip install "meshwright[{extra}]"' in err
    code, out, err = answers[f"{name}--json"]
    if name == "mcp":  # lists the tools, which needs no package
        assert (code, json.loads(out)["schema"]) == (0, "meshwright/2")
        return str(answers[name][2])
    assert code == 2
    answer = json.loads(out)
    assert answer["schema"] == "meshwright/2"
    assert answer["error"]["fix"][0].endswith(f'pip install "meshwright[{extra}]"')
    return str(answers[name][2])


def test_without_torch_every_command_of_the_engine_names_the_extra() -> None:
    answers = typed(TRAIN | WITHOUT_EXTRAS, "torch,transformers,safetensors")
    for name in TRAIN:
        line = assert_one_line(answers, name, "train")
        assert "torch" in line
        assert "not installed" in line
    for name in WITHOUT_EXTRAS:
        assert answers[name][0] == 0, answers[name][2]


def test_without_the_other_extras_their_commands_name_them() -> None:
    answers = typed({name: words for name, (words, _) in OTHERS.items()}, "fastapi,uvicorn,jinja2,mcp,matplotlib")
    for name, (_, extra) in OTHERS.items():
        assert_one_line(answers, name, extra)


def test_a_missing_and_an_old_package_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "torch-2.4.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1\n")
    answers = typed({"train": TRAIN["train"]}, "transformers", str(tmp_path))
    line = assert_one_line(answers, "train", "train")
    assert "transformers, which is not installed" in line
    assert "torch>=2.11; 2.4.1 is installed" in line


@pytest.mark.parametrize(
    ("version", "specifier", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.11.0a0+git1", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.0", ">=2.3,<3", False),
        ("2.3.1", ">=2.3,<3", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, specifier: str, fits: bool) -> None:
    assert extras._satisfies(version, specifier) is fits


def test_an_import_that_fails_inside_a_run_is_explained() -> None:
    broken = ImportError("libcudart.so.13: cannot open shared object file", name="torch._C")
    found = extras.explain(broken, "train")
    assert isinstance(found, InputError)
    assert "cannot be imported: libcudart.so.13" in found.reason
    assert extras.explain(ImportError("no", name="meshwright.typo"), "train") is None


def test_the_extras_are_those_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: tuple(project[name]) for name in extras.EXTRAS} == extras.EXTRAS
    assert set(project) - set(extras.EXTRAS) == {"docs", "dev"}


def test_the_command_is_for_the_environment_of_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert extras.install_command("torch") == 'pip install "meshwright[train]"'
    monkeypatch.setenv("PATH", "/nowhere")
    assert extras.install_command("torch") == f'{sys.executable} -m pip install "meshwright[train]"'
    assert extras.install_command("uvicorn", "mcp").endswith('"meshwright[mcp]"')


def test_readme_has_the_core_the_extra_and_the_command_after_the_demo() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^pip install \. ", readme, re.MULTILINE)
    assert "'.[train]'" in readme
    assert ".venv/bin/meshwright" in readme


@pytest.mark.slow
def test_a_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", ".", "--no-deps", "-q", "-w", str(tmp_path)], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("meshwright/")}
    sources = ROOT / "src"
    ignored = ("__pycache__", ".pyc")
    files = [one for one in (sources / "meshwright").rglob("*") if one.is_file()]
    data = {str(one.relative_to(sources)) for one in files if not any(part in str(one) for part in ignored)}
    assert data - packed == set()
    venv.create(tmp_path / "env", with_pip=True)
    python, command = str(tmp_path / "env" / "bin" / "python"), str(tmp_path / "env" / "bin" / "meshwright")
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert subprocess.run([python, "-c", "import torch"], env=env, capture_output=True).returncode == 1
    start = time.monotonic()
    first = subprocess.run(
        [command, *WITHOUT_EXTRAS["recommend"]], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert time.monotonic() - start < FIRST_ANSWER_S
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, '
        '"intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 999}'
    )
    for words in (
        *WITHOUT_EXTRAS.values(),
        ["recommend", "config.json", "--gpus", "4xH100", "--goal", "pretrain", "--explain"],
        ["plan", "llama3-8b", "--gpus", "8xH100", "--goal", "sft"],
        ["size", "llama3-8b", "--goal", "sft", "--gpu", "H100"],
        ["estimate", "llama3_8b_sft_config"],
        ["export", "llama3_8b_sft_config", "--to", "megatron-bridge", "--gpus", "8xH200"],
        *(["recipes", "llama"], ["recipe", "llama3_8b_sft_config"], ["models"], ["gpus"], ["rules"]),
        *(["explain", "layout.tp"], ["accuracy"], ["mcp", "--json"], ["completion", "bash"], ["--version"], []),
    ):
        done = subprocess.run([command, *words], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, (words, done.stderr)
    for words in TRAIN.values():
        done = subprocess.run([command, *words], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.count("\n") == 1
        assert "meshwright[train]" in done.stderr
    subprocess.run([python, "-m", "pip", "install", "-q", "meshwright[web]"], check=True)  # what the error says works
    done = subprocess.run([command, "web", "--export", "site"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = (tmp_path / "site" / "recipes" / "llama3_8b_sft_config.html").read_text()
    assert "erif" in recipe  # the verification report is in the wheel

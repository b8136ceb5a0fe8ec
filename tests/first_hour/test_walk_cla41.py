"""What newcomers of a lab's cluster and of a fine-tuning evening typed, and what they could not do."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path, PurePosixPath

import pytest

from meshwright.cli.run import run

CHECKOUT = "/shared/checkout"
ENGINES = ("megatron-lm", "megatron-bridge", "torchtitan", "automodel", "kempnerforge", "accelerate", "deepspeed")
CONTAINERS = {
    "pyxis": ("slurm", "--container-kind", "pyxis", "--mount", "/lake:/lake"),
    "apptainer": ("slurm", "--container-kind", "apptainer", "--mount", "/lake:/lake"),
    "kubernetes": ("kubernetes", "--mount", "claim:/lake"),
    "skypilot": ("skypilot", "--mount", "s3://lab:/lake"),
}
READ = ("data.dataset=/lake/pre_text", "data.tokenizer=/tok/mine", "checkpoint.pretrained=/weights/base")


def call(*words: str) -> tuple[int, str]:
    """Return the exit code of a command and all that it printed."""
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            run(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue()


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def full_paths(text: str) -> set[str]:
    """Return the full paths in a written job: words, values of a config and parts of a search path."""
    found = re.findall(r"(?:^|(?<=[\s=:,'\"\[]))/[A-Za-z][\w.-]*(?:/[\w.-]+)*", text, re.MULTILINE)
    return {one for one in found if not one.startswith(("/bin/", "/dev/", "/usr/"))}


def is_below(path: str, folders: set[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(one) for one in folders)


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_path_of_a_job_is_mounted_or_named(engine: str, kind: str) -> None:
    words = ("launch", "llama3-8b", "--goal", "pretrain", "--gpus", "2x8xH100", "--to", engine, "--image", "lab/img:1")
    at = ("--framework-dir", CHECKOUT, "--write", "job", "--scheduler", *CONTAINERS[kind])
    code, printed = call(*words, *at, *READ, "train.steps=300", "schedule.warmup_steps=20")
    assert code == 0, printed
    advised = set(re.findall(r"--mount [^:\s]+:(\S+)", printed))
    texts = {path.name: path.read_text() for path in Path("job").iterdir()}
    mounted = {"/lake", str(Path("job").resolve()), *advised}
    mounted |= {one for text in texts.values() for one in re.findall(r"mountPath: (\S+)", text)}  # of a manifest
    read = {path for text in texts.values() for path in full_paths(re.sub(r"(?m)^\s*#.*$", "", text))}
    assert {path for path in read if not is_below(path, mounted)} == set(), printed
    if any(CHECKOUT in text for text in texts.values()):
        assert CHECKOUT in advised


def test_the_whole_checkout_is_advised_and_then_nothing_is_missing() -> None:
    words = ("launch", "llama3-70b", "--goal", "pretrain", "--gpus", "16x8xH100", "--to", "megatron-bridge", "--image",
             "nvcr.io/nvidia/nemo:26.08", "--container-kind", "pyxis", "--mount", "/data:/data", "--scheduler", "slurm",
             "--framework-dir", "/shared/Megatron-Bridge")  # fmt: skip
    _, printed = call(*words, "--write", "one")
    mount = "/shared/Megatron-Bridge:/shared/Megatron-Bridge"
    assert f"add --mount {mount}\n" in printed
    _, printed = call(*words, "--mount", mount, "--write", "two")
    assert "the container needs" not in printed

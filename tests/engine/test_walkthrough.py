"""Runs the commands of docs/walkthrough.md: tokenize, train, kill, resume, export, generate, fine-tune."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "walkthrough.md"
SOURCE = Path(__file__).parents[2] / "src"


def blocks() -> list[str]:
    return re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_walkthrough_commands_work(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, arguments in (("meshwright", "-m meshwright"), ("python", "")):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        script.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    process = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(blocks())],
        cwd=work,
        env={
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "MESHWRIGHT_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    output = process.stdout
    assert "resumed run/checkpoints/step-000000" in output  # after the kill
    assert re.search(r"perplexity [\d.]+ .* held out", output)
    assert (work / "exported" / "README.md").read_text().startswith("---\nlibrary_name: transformers")
    assert (work / "tuned" / "model" / "adapter_model.safetensors").is_file()
    assert (work / "merged" / "model.safetensors").is_file()
    first, last = (float(x) for x in re.findall(r"loss +([\d.]+) → ([\d.]+)", output)[0])
    assert last < first

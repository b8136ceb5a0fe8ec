"""Pipes that close, disks that are full, terminals that know ASCII only: a line on stderr, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MESHWRIGHT = f"{sys.executable} -c 'from meshwright.cli import main; main()'"


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("meshwright", MESHWRIGHT, 1)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", ["recipes", "recipes --json", "rules", "rules --json", "recommend --help"])
def test_a_reader_that_has_enough_is_fine(words: str) -> None:
    # the reader closes its end long before the writer writes
    done = shell(f"meshwright {words} | (exec <&-; sleep 0.5)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
@pytest.mark.parametrize("words", ["gpus", "gpus --json", "gpus --help", "recipe no_such_recipe_zzz --json"])
def test_a_full_disk_is_reported_in_one_line(words: str) -> None:
    done = shell(f"meshwright {words} > /dev/full")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "error: the output cannot be written: No space left on device"


@pytest.mark.parametrize("words", ["gpus", "gpus --json", "recipe no_such_recipe_zzz --json"])
def test_a_closed_output_is_reported_in_one_line(words: str) -> None:
    done = shell(f"meshwright {words} >&-")
    assert done.returncode == 3
    assert done.stderr == "error: the output cannot be written: standard output is closed\n"


def test_a_closed_error_output_leaves_the_answer_alone() -> None:
    done = shell("meshwright recipe no_such_recipe_zzz --json 2>&-")
    assert done.returncode == 2
    assert done.stdout.startswith("{")
    assert done.stdout.rstrip().endswith("}")


@pytest.mark.parametrize("words", ["recommend llama3-8b --gpus 8xH100 --goal sft", "recipe ünknöwn", "rules"])
def test_an_encoding_without_our_characters_prints_replacements(words: str) -> None:
    done = shell(f"meshwright {words}", PYTHONIOENCODING="ascii")
    assert done.returncode == (2 if "ü" in words else 0)
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()

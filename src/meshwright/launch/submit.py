"""Submits a script to SLURM."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from meshwright.errors import InputError, MeshwrightError
from meshwright.launch.artifacts import Launch

SUBMIT_S = 120.0  # a busy controller responds late
ALTERNATIVES = {
    "torchrun": "run the command printed without --submit",
    "hosts": "run the commands printed without --submit, one on each host",
    "kubernetes": "kubectl apply -f {file}",
    "skypilot": "sky launch {file}",
}


class SubmitError(MeshwrightError):
    """The scheduler rejected the job (exit code 3)."""

    exit_code = 3


def refuse_submit(scheduler: str, name: str) -> None:
    """Refuse --submit for all schedulers except SLURM, with what to run instead."""
    if scheduler != "slurm":
        command = ALTERNATIVES[scheduler].format(file=f"{name}.yaml")
        prefix = "--write DIR, then " if scheduler in ("kubernetes", "skypilot") else ""
        raise InputError(
            "works only with --scheduler slurm",
            field="--submit",
            value=f"--scheduler {scheduler}",
            fix=(f"{prefix}{command}",),
        )


def submit(launch: Launch, folder: str = ".") -> str:
    """Submit the script with sbatch and return the job id."""
    script = next(text for name, text in launch.files.items() if name.endswith(".sbatch"))
    # Through standard input: no file has to exist, and the validated text is what runs.
    done = slurm_tool(["sbatch", "--parsable"], SUBMIT_S, text=script, folder=folder)
    number = done.stdout.strip().split(";")[0]
    if done.returncode != 0 or not re.fullmatch(r"\d+(_\d+)?", number):
        output = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise SubmitError(
            f"sbatch rejected the job: {output}", field="--submit", fix=("sinfo shows partitions and limits",)
        )
    return number


def slurm_tool(
    words: list[str], timeout_s: float, text: str | None = None, folder: str = "."
) -> subprocess.CompletedProcess[str]:
    """Run a SLURM tool without a shell."""
    try:
        return subprocess.run(
            words,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            cwd=Path(folder),
        )
    except FileNotFoundError:
        raise InputError(
            f"{words[0]} is not installed on this machine",
            field="--submit",
            fix=("run it on a login node of the cluster", "--write DIR, and sbatch the script there"),
        ) from None
    except subprocess.TimeoutExpired:
        raise SubmitError(f"{words[0]} did not answer within {timeout_s:g} s", field="--submit") from None

"""Trainings submitted to SLURM with `meshwright launch` and watched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.machine import query

from meshwright.clusters import cluster
from meshwright.frameworks.types import Program
from meshwright.launch.job import Job as LaunchJob
from meshwright.launch.slurm import script

SOURCE = Path(__file__).parents[2] / "src"
RECIPE = "llama3_8b_pretrain_config"
TRAINING = ("layout.tp=1", "layout.sp=false", "train.global_batch_size=8")
STEPS = 12
LIMIT_S = 240.0  # for busy machines


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which ranks find these sources and use one thread each."""
    found = [str(SOURCE), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def launch_command(*words: str, steps: int = STEPS) -> list[str]:
    """Return `meshwright launch` of a tiny training."""
    command = [sys.executable, "-m", "meshwright", "launch", RECIPE, *TRAINING, f"train.steps={steps}"]
    return [*command, "--tiny", "--dataset", "mock", *words]  # the last of repeated options counts


@dataclass(frozen=True)
class Job:
    """A training submitted to SLURM, and the process that watches it."""

    number: str
    folder: Path
    watcher: subprocess.Popen[bytes] | None  # None: not watched
    env: Mapping[str, str]

    @property
    def run(self) -> Path:
        """The folder with metrics and checkpoints."""
        return self.folder / "run"

    @property
    def log(self) -> str:
        """The log of the job."""
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.out"))

    @property
    def watched(self) -> str:
        """The output of the watcher."""
        path = self.folder / "watched"
        return path.read_text() if path.exists() else ""

    def scancel(self, *words: str) -> None:
        """Send the job a signal or cancel it."""
        subprocess.run(["scancel", *words, self.number], env=dict(self.env), check=True, timeout=20)

    def field(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        found = re.search(rf"(?:^|\s){name}=(\S*)", query(["scontrol", "show", "job", "-o", self.number], self.env))
        return found[1] if found else ""

    def wait_until(self, there: Callable[[], bool], what: str) -> None:
        """Wait for something that must happen before the job ends."""
        until = time.monotonic() + LIMIT_S
        while not there():
            watched = self.watcher is None or self.watcher.poll() is None
            assert watched, f"the job ended before {what}:\n{self.watched}"
            assert time.monotonic() < until, f"not within {LIMIT_S:g} s: {what}\n{self.watched}\n{self.log}"
            time.sleep(0.05 if self.watcher else 0.5)

    def wait_for_steps(self, count: int) -> None:
        """Wait until the job has trained this many steps."""
        self.wait_until(lambda: len(losses(self.run)) >= count, f"{count} steps")

    def ended(self) -> int:
        """Wait for the job to end and return the watcher's exit code."""
        assert self.watcher is not None
        try:
            return self.watcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"job {self.number} has not ended:\n{self.watched}\n{self.log}") from None


def submit(env: Mapping[str, str], folder: Path, *words: str, steps: int = STEPS) -> Job:
    """Submit a tiny training to SLURM, by default on two CPU ranks of one node."""
    folder.mkdir(parents=True, exist_ok=True)
    options = (
        "--scheduler",
        "slurm",
        "--out",
        str(folder / "run"),
        "--submit",
        "--watch",
        *(words or ("--cpu", "--gpus", "2")),
    )
    watched = folder / "watched"
    with watched.open("wb") as file:
        watcher = subprocess.Popen(
            launch_command(*options, steps=steps),
            cwd=folder,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    until = time.monotonic() + LIMIT_S
    while not (found := re.search(r"submitted job (\d+)", watched.read_text())):
        if watcher.poll() is not None or time.monotonic() > until:
            watcher.kill()
            raise AssertionError(f"nothing was submitted:\n{watched.read_text()}")
        time.sleep(0.05)
    return Job(found[1], folder, watcher, env)


def submit_script(env: Mapping[str, str], folder: Path, gpus: str) -> Job:
    """Submit the script of an engine that needs torchrun to create its ranks."""
    words = ("-m", "meshwright", "train", RECIPE, *TRAINING, f"train.steps={STEPS}", "--tiny", "--dataset", "mock")
    program = Program(argv=(*words, "--out", str(folder / "run")))
    launch_job = LaunchJob(name="torchrun", program=program, cluster=cluster(gpus), cpu=True, python=sys.executable)
    sbatch = ["sbatch", "--parsable"]
    done = subprocess.run(
        sbatch,
        input=script(launch_job),
        cwd=folder,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return Job(done.stdout.strip(), folder, None, env)


def losses(run: Path) -> dict[int, set[float]]:
    """Return every loss logged for each step, over all starts of the run."""
    found: dict[int, set[float]] = {}
    path = run / "metrics.jsonl"
    for text in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if text.endswith("\n") and (line := json.loads(text))["kind"] == "step":
            found.setdefault(line["step"], set()).add(line["loss"])
    return found

"""Trainings that are handed to SLURM with `meshwright launch` and watched by it, as the tests see them."""

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

from tests.slurm.machine import ask

from meshwright.clusters import cluster
from meshwright.frameworks.types import Program
from meshwright.launch.job import Job as Asked
from meshwright.launch.slurm import script

SOURCE = Path(__file__).parents[2] / "src"
RECIPE = "llama3_8b_pretrain_config"
TRAINING = ("layout.tp=1", "layout.sp=false", "train.global_batch_size=8")
STEPS = 12
LIMIT_S = 240.0  # for machines that have much else to do


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which ranks find this source and use one thread each."""
    found = [str(SOURCE), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def launch_command(*words: str, steps: int = STEPS) -> list[str]:
    """`meshwright launch` of a tiny training."""
    command = [sys.executable, "-m", "meshwright", "launch", RECIPE, *TRAINING, f"train.steps={steps}"]
    return [*command, "--tiny", "--dataset", "mock", *words]  # an option given again wins


@dataclass(frozen=True)
class Job:
    """A training in the hands of SLURM, and the process that watches it."""

    number: str
    folder: Path
    watcher: subprocess.Popen[bytes] | None  # None: nobody watches
    env: Mapping[str, str]

    @property
    def run(self) -> Path:
        """Where the training keeps its metrics and checkpoints."""
        return self.folder / "run"

    @property
    def log(self) -> str:
        """What the job has said."""
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.out"))

    @property
    def told(self) -> str:
        """What the watcher has said."""
        path = self.folder / "watched"
        return path.read_text() if path.exists() else ""

    def scancel(self, *words: str) -> None:
        """Sends the job what these words say."""
        subprocess.run(["scancel", *words, self.number], env=dict(self.env), check=True, timeout=20)

    def field(self, name: str) -> str:
        """What SLURM says of the job."""
        found = re.search(rf"(?:^|\s){name}=(\S*)", ask(["scontrol", "show", "job", "-o", self.number], self.env))
        return found[1] if found else ""

    def wait_until(self, there: Callable[[], bool], what: str) -> None:
        """Waits for something that must come before the job ends."""
        until = time.monotonic() + LIMIT_S
        while not there():
            watched = self.watcher is None or self.watcher.poll() is None
            assert watched, f"the job ended before {what}:\n{self.told}"
            assert time.monotonic() < until, f"not within {LIMIT_S:g} s: {what}\n{self.told}\n{self.log}"
            time.sleep(0.05 if self.watcher else 0.5)

    def wait_for_steps(self, count: int) -> None:
        """Waits until it has trained so many steps."""
        self.wait_until(lambda: len(losses(self.run)) >= count, f"{count} steps")

    def ended(self) -> int:
        """The watcher's exit code; the job has ended then."""
        assert self.watcher is not None
        try:
            return self.watcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"job {self.number} has not ended:\n{self.told}\n{self.log}") from None


def submit(env: Mapping[str, str], folder: Path, *words: str, steps: int = STEPS) -> Job:
    """Hands a tiny training to SLURM, on two CPU ranks of one node unless the words say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = (
        "--scheduler",
        "slurm",
        "--out",
        str(folder / "run"),
        "--submit",
        "--watch",
        *(words or ("--cpu", "--gpus", "2")),
    )
    told = folder / "watched"
    with told.open("wb") as file:
        watcher = subprocess.Popen(
            launch_command(*asked, steps=steps),
            cwd=folder,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    until = time.monotonic() + LIMIT_S
    while not (found := re.search(r"submitted job (\d+)", told.read_text())):
        if watcher.poll() is not None or time.monotonic() > until:
            watcher.kill()
            raise AssertionError(f"nothing was submitted:\n{told.read_text()}")
        time.sleep(0.05)
    return Job(found[1], folder, watcher, env)


def submit_script(env: Mapping[str, str], folder: Path, gpus: str) -> Job:
    """Hands SLURM the script of an engine that does not find its ranks by itself, so that torchrun has to."""
    words = ("-m", "meshwright", "train", RECIPE, *TRAINING, f"train.steps={STEPS}", "--tiny", "--dataset", "mock")
    program = Program(words=(*words, "--out", str(folder / "run")))
    asked = Asked(name="torchrun", program=program, cluster=cluster(gpus), cpu=True, python=sys.executable)
    sbatch = ["sbatch", "--parsable"]
    done = subprocess.run(
        sbatch,
        input=script(asked),
        cwd=folder,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return Job(done.stdout.strip(), folder, None, env)


def losses(run: Path) -> dict[int, set[float]]:
    """Every loss that was told for each step, in whichever life of the run."""
    found: dict[int, set[float]] = {}
    path = run / "metrics.jsonl"
    for text in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if text.endswith("\n") and (line := json.loads(text))["kind"] == "step":
            found.setdefault(line["step"], set()).add(line["loss"])
    return found

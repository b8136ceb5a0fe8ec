"""Kills, signals and damage: does a training come back as if nothing had happened? Writes results/faults.json.

    python benchmarks/faults.py [--kills 30] [--flips 200] [--seed 0]

The soak trains a tiny model on two ranks and kills it (kill -9), again and again: one rank or the whole job, at any
moment, or aimed at a checkpoint that is being written or given its name. Every life goes on from what the one before it
left. In the end every loss must be that of a run that was left in peace, bit for bit, and every step must have seen its
own samples, each sample once. Further: a signal in every phase of a run, and bits flipped, bytes cut off and files
removed in every kind of file of a checkpoint, which must all be noticed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks are forked from this process

import argparse
import json
import multiprocessing as mp
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from meshwright import api
from meshwright.engine.checkpoint.files import DamagedError
from meshwright.engine.checkpoint.folder import LATEST, MANIFEST, Folder
from meshwright.engine.checkpoint.load import find_problems
from meshwright.engine.checkpoint.metadata import read_manifest
from meshwright.engine.metrics.jsonl import read
from meshwright.errors import MeshwrightError

for _needed in ("transformers.models.llama.modeling_llama", "meshwright.engine.trainer"):
    import_module(_needed)  # once here, not in every life

RESULTS = Path(__file__).parent / "results" / "faults.json"
RECIPE = "llama3_8b_pretrain_config"
RANKS, BATCH = 2, 8
STEPS, SAVE_EVERY = 24, 3
LIMIT_S = 300.0  # for machines that have much else to do
PHASES = ("build", "step", "evaluation", "save", "flush")
LOOK_S = 0.002


# The training, in a process of its own, with marks at the places to hit


def train(folder: str, steps: int, more: tuple[str, ...] = (), slow: str = "") -> None:
    """Trains in this process's ranks; leaves with the exit code of however it ends. `slow` is a phase to linger in."""
    _mark_phases(Path(folder), slow)
    overrides = [
        *("layout.tp=1", "layout.sp=false", f"train.global_batch_size={BATCH}", f"train.steps={steps}"),
        *("checkpoint.keep=2", *more),
    ]
    with (Path(folder) / "stderr").open("a", buffering=1) as stderr:
        sys.stderr = stderr
        try:
            api.train(RECIPE, tiny=True, nproc=RANKS, quiet=True, out=folder, timeout_s=LIMIT_S, overrides=overrides)
        except MeshwrightError as error:
            print(f"{type(error).__name__}: {error}", file=stderr)
            os._exit(error.exit_code)
    os._exit(0)


def _mark_phases(folder: Path, slow: str) -> None:
    """Makes every rank write down, in files of its own, where it is and which samples it sees."""
    from meshwright.engine import worker
    from meshwright.engine.checkpoint.folder import Folder
    from meshwright.engine.checkpoint.save import Saver
    from meshwright.engine.data.sampler import Loader
    from meshwright.engine.trainer import Trainer

    places = (
        ("build", worker, "build_trainer"),
        ("step", Trainer, "forward_backward"),
        ("evaluation", Trainer, "evaluate"),
        ("flush" if slow == "flush" else "save", Saver, "_write_rank_file"),
        ("publish", Folder, "publish"),
    )
    for phase, owner, name in places:
        setattr(owner, name, _marked(getattr(owner, name), folder, phase, 0.4 if phase == slow else 0.0))
    batch = Loader.batch

    def noted(self: Any, step: int) -> Any:
        found = batch(self, step)
        if torch.is_grad_enabled():  # not an evaluation
            _note(folder / f"samples.{os.getpid()}", f"{step} {' '.join(map(str, found.numbers))}")
        return found

    Loader.batch = noted  # type: ignore[method-assign]


def _marked(inner: Callable[..., Any], folder: Path, phase: str, linger_s: float) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        _note(folder / f"phases.{os.getpid()}", phase)
        time.sleep(linger_s)
        return inner(*args, **kwargs)

    return outer


def _note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def started(folder: Path, steps: int, more: tuple[str, ...] = (), slow: str = "") -> Any:
    """The training, begun in a child."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("phases.*"):
        old.unlink()
    child = mp.get_context("fork").Process(target=train, args=(str(folder), steps, more, slow))
    child.start()
    return child


def ended(child: Any) -> int:
    """The exit code of a training, which must end."""
    child.join(LIMIT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise RuntimeError("a run did not end")
    return int(child.exitcode)


def ranks_in(folder: Path, phase: str) -> list[int]:
    """The process ids of the ranks that have been in a phase."""
    found = []
    for path in folder.glob("phases.*"):
        with suppress(OSError):
            if phase in path.read_text().split():
                found.append(int(path.suffix[1:]))
    return found


def wait_for(folder: Path, phase: str, child: Any, ranks: int = 1) -> list[int]:
    """Waits until so many ranks are in a phase; none where the run ended before."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and child.is_alive():
        if len(found := ranks_in(folder, phase)) >= ranks:
            return found
        time.sleep(LOOK_S)
    return []


# What must hold afterwards


def losses_of(folder: Path) -> dict[int, set[float]]:
    """Every loss ever logged for each step."""
    found: dict[int, set[float]] = {}
    for line in read(folder / "metrics.jsonl"):
        if line["kind"] == "step":
            found.setdefault(line["step"], set()).add(line["loss"])
    return found


def faults_of(folder: Path, reference: dict[int, set[float]], steps: int) -> list[str]:
    """What differs from a run in peace; nothing when the training came back as it should."""
    logged, found = losses_of(folder), []
    for step in range(1, steps + 1):
        if logged.get(step, set()) != reference[step]:
            found.append(f"step {step}: losses {sorted(logged.get(step, set()))} instead of {sorted(reference[step])}")
    seen: dict[int, set[tuple[int, ...]]] = {}
    for path in folder.glob("samples.*"):
        for line in path.read_text().splitlines():
            step, *numbers = map(int, line.split())
            seen.setdefault(step, set()).add(tuple(numbers))
    for step in range(steps):
        # Two ranks, each with its own part, the same in every life: together the step's samples, each once.
        numbers = sorted(number for part in seen.get(step, ()) for number in part)
        if numbers != list(range(step * BATCH, (step + 1) * BATCH)):
            found.append(f"step {step + 1}: samples {numbers}")
    return found


def in_peace(folder: Path, steps: int, more: tuple[str, ...] = ()) -> dict[int, set[float]]:
    """The losses of a run that nobody disturbs."""
    code = ended(started(folder, steps, more))
    if code:
        raise RuntimeError(f"the undisturbed run failed with {code}: {(folder / 'stderr').read_text()}")
    return losses_of(folder)


# The soak


def soak(work: Path, kills: int, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Kills a training that many times; what was hit, and what was wrong in the end."""
    chance, more = random.Random(seed), (f"checkpoint.save_every={SAVE_EVERY}",)
    reference = in_peace(work / "peace", steps, more)
    hits: dict[str, int] = {}
    faults: list[str] = []
    lives = number = 0
    while sum(hits.values()) < kills:
        folder = work / f"soak{number}"
        while True:
            lives += 1
            hit = _life(folder, steps, more, chance, sum(hits.values()) < kills)
            if hit == "":
                break
            hits[hit] = hits.get(hit, 0) + 1
        faults += faults_of(folder, reference, steps)
        number += 1
    return {"kills": sum(hits.values()), "hit": hits, "lives": lives, "trainings": number, "faults": faults}


def _life(folder: Path, steps: int, more: tuple[str, ...], chance: random.Random, kill: bool) -> str:
    """One life of a training: where it was hit, or nothing when it came to its end."""
    child = started(folder, steps, more)
    aim = chance.choice(("step", "step", "save", "publish", "any moment"))
    if kill and wait_for(folder, "build" if aim == "any moment" else aim, child, ranks=1):
        time.sleep(chance.uniform(0, 1.5) if aim in ("any moment", "step") else chance.uniform(0, 0.02))
        ranks = ranks_in(folder, "build")
        whole = chance.random() < 0.5 or not ranks
        victim = child.pid if whole else chance.choice(ranks)
        if child.is_alive():
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            code = ended(child)
            if code:
                return f"{'job' if whole else 'rank'}, {aim}"
            return ""
    code = ended(child)
    if code:
        raise RuntimeError(f"a run that nobody killed ended with {code}: {(folder / 'stderr').read_text()[-3000:]}")
    return ""


# Signals


def signalled(work: Path, phase: str, number: signal.Signals, steps: int = 6) -> list[str]:
    """Asks a run to end in one phase, then lets another go on: what was wrong."""
    more = (
        *("checkpoint.save_every=2", "train.eval_every=2", "train.eval_steps=2", "checkpoint.grace_s=30"),
        f"checkpoint.async_save={'true' if phase == 'flush' else 'false'}",
    )
    reference = in_peace(work / f"peace-{phase}", steps, more)
    folder = work / f"asked-{phase}-{number.name}"
    child = started(folder, steps, more, slow=phase)
    if not wait_for(folder, phase, child):
        return [f"{phase}: never reached"]
    os.kill(child.pid, number)
    code, found = ended(child), []
    if code != 75:
        found.append(f"{phase}: exit code {code} instead of 75: {(folder / 'stderr').read_text()[-1500:]}")
    if phase != "build" and not Folder(folder).steps():
        found.append(f"{phase}: nothing was saved")
    if again := ended(started(folder, steps, more)):
        found.append(f"{phase}: going on failed with {again}")
    return found + [f"{phase}: {fault}" for fault in faults_of(folder, reference, steps)]


# Damage


def damages(data: bytes, flips: int, chance: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """A file's content with one bit flipped, with bytes cut off or added, empty, and gone."""
    for _ in range(flips):
        place, bit = chance.randrange(len(data)), chance.randrange(8)
        yield f"bit {bit} of byte {place}", data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
    for length in sorted({0, 1, len(data) // 2, len(data) - 1, *(chance.randrange(len(data)) for _ in range(8))}):
        yield f"cut to {length} bytes", data[:length]
    yield "a byte too many", data + b"\0"
    yield "gone", None


def noticed(folder: Folder, step: int, name: str) -> bool:
    """Whether damage to a file is found."""
    if name != LATEST:
        return bool(find_problems(folder.step_path(step)))
    try:
        return folder.latest() != step  # a pointer that is gone is found by its absence
    except DamagedError:
        return True


def damage(run: Path, flips: int, seed: int) -> dict[str, Any]:
    """Damages every file of the newest checkpoint in turn; how much of it was noticed."""
    chance, folder = random.Random(seed), Folder(run)
    step = folder.steps()[-1]
    files = {name: folder.step_path(step) / name for name in (MANIFEST, *read_manifest(folder.step_path(step)).files)}
    files[LATEST] = folder.path / LATEST
    tried: dict[str, int] = {}
    missed: list[str] = []
    if find_problems(folder.step_path(step)):
        missed.append("a good checkpoint was taken for damaged")
    for name, path in files.items():
        data = path.read_bytes()
        for what, content in damages(data, flips, chance):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            tried[name] = tried.get(name, 0) + 1
            if not noticed(folder, step, name):
                missed.append(f"{name}: {what}")
            path.write_bytes(data)
    return {"tried": tried, "missed": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="meshwright-faults-"))
    killed = soak(work, given.kills, given.seed)
    print(f"soak: {killed['kills']} kills {killed['hit']}, {killed['lives']} lives, {len(killed['faults'])} faults")
    asked = {
        f"{number.name} in {phase}": signalled(work, phase, number)
        for number, phases in ((signal.SIGTERM, PHASES), (signal.SIGUSR1, ("step",)))
        for phase in phases
    }
    for name, found in asked.items():
        print(f"{name}: {found or 'left with 75, went on bit for bit'}")
    harmed = damage(work / "peace", given.flips, given.seed)
    print(f"damage: {sum(harmed['tried'].values())} tried, {len(harmed['missed'])} missed")
    good = not (killed["faults"] or harmed["missed"] or any(asked.values()))
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": round(time.monotonic() - began),
        "good": good,
        "soak": {**killed, "steps": STEPS, "save_every": SAVE_EVERY, "ranks": RANKS},
        "signals": asked,
        "damage": harmed,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if good:
        shutil.rmtree(work)
    else:
        print(f"what is left is in {work}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

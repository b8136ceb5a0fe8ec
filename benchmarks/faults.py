"""Kill, signal and corrupt training runs and check that they resume bit for bit. Writes results/faults.json.

    python benchmarks/faults.py [--kills 30] [--flips 200] [--seed 0]

The soak test trains a tiny model on two ranks and kills it (kill -9) repeatedly: one rank or the whole job, at any
moment, or while a checkpoint is being written or published. Every attempt resumes from the previous one. In the end
every loss must equal that of an undisturbed run, bit for bit, and every step must have seen its own samples, each
once. Further: a signal in every phase of a run, and flipped bits, truncated and removed files of every type of
checkpoint file, which must all be detected.
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
    import_module(_needed)  # once here, not in every attempt

RESULTS = Path(__file__).parent / "results" / "faults.json"
RECIPE = "llama3_8b_pretrain_config"
RANKS, BATCH = 2, 8
STEPS, SAVE_EVERY = 24, 3
LIMIT_S = 300.0  # generous, for busy machines
PHASES = ("build", "step", "evaluation", "save", "flush")
POLL_S = 0.002


# The training, in its own process, with marks in the phases to hit


def train(folder: str, steps: int, more: tuple[str, ...] = (), slow: str = "") -> None:
    """Train in this process's ranks and exit with the run's exit code; `slow` is a phase to slow down."""
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
    """Make every rank record its phases and samples in its own files."""
    from meshwright.engine import worker
    from meshwright.engine.checkpoint.folder import Folder
    from meshwright.engine.checkpoint.save import Saver
    from meshwright.engine.data.sampler import Loader
    from meshwright.engine.trainer import Trainer

    hooks = (
        ("build", worker, "build_trainer"),
        ("step", Trainer, "forward_backward"),
        ("evaluation", Trainer, "evaluate"),
        ("flush" if slow == "flush" else "save", Saver, "_write_rank_file"),
        ("publish", Folder, "publish"),
    )
    for phase, owner, name in hooks:
        setattr(owner, name, _with_mark(getattr(owner, name), folder, phase, 0.4 if phase == slow else 0.0))
    batch = Loader.batch

    def recorded(self: Any, step: int) -> Any:
        found = batch(self, step)
        if torch.is_grad_enabled():  # not an evaluation
            _append(folder / f"samples.{os.getpid()}", f"{step} {' '.join(map(str, found.numbers))}")
        return found

    Loader.batch = recorded  # type: ignore[method-assign]


def _with_mark(inner: Callable[..., Any], folder: Path, phase: str, linger_s: float) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        _append(folder / f"phases.{os.getpid()}", phase)
        time.sleep(linger_s)
        return inner(*args, **kwargs)

    return outer


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def started(folder: Path, steps: int, more: tuple[str, ...] = (), slow: str = "") -> Any:
    """Start the training in a child process."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("phases.*"):
        old.unlink()
    child = mp.get_context("fork").Process(target=train, args=(str(folder), steps, more, slow))
    child.start()
    return child


def ended(child: Any) -> int:
    """Return the exit code of a training, which must end."""
    child.join(LIMIT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise RuntimeError("a run did not end")
    return int(child.exitcode)


def ranks_in(folder: Path, phase: str) -> list[int]:
    """Return the process ids of the ranks that have entered a phase."""
    found = []
    for path in folder.glob("phases.*"):
        with suppress(OSError):
            if phase in path.read_text().split():
                found.append(int(path.suffix[1:]))
    return found


def wait_for(folder: Path, phase: str, child: Any, ranks: int = 1) -> list[int]:
    """Wait until `ranks` ranks have entered a phase; return none if the run ended before."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and child.is_alive():
        if len(found := ranks_in(folder, phase)) >= ranks:
            return found
        time.sleep(POLL_S)
    return []


# Checks afterwards


def losses_of(folder: Path) -> dict[int, set[float]]:
    """Return all losses that were logged for each step."""
    found: dict[int, set[float]] = {}
    for line in read(folder / "metrics.jsonl"):
        if line["kind"] == "step":
            found.setdefault(line["step"], set()).add(line["loss"])
    return found


def faults_of(folder: Path, reference: dict[int, set[float]], steps: int) -> list[str]:
    """Return the differences from an undisturbed run."""
    losses, found = losses_of(folder), []
    for step in range(1, steps + 1):
        if losses.get(step, set()) != reference[step]:
            found.append(f"step {step}: losses {sorted(losses.get(step, set()))} instead of {sorted(reference[step])}")
    seen: dict[int, set[tuple[int, ...]]] = {}
    for path in folder.glob("samples.*"):
        for line in path.read_text().splitlines():
            step, *numbers = map(int, line.split())
            seen.setdefault(step, set()).add(tuple(numbers))
    for step in range(steps):
        # Each rank has the same part in every attempt: together the step's samples, each once.
        numbers = sorted(number for part in seen.get(step, ()) for number in part)
        if numbers != list(range(step * BATCH, (step + 1) * BATCH)):
            found.append(f"step {step + 1}: samples {numbers}")
    return found


def undisturbed(folder: Path, steps: int, more: tuple[str, ...] = ()) -> dict[int, set[float]]:
    """Return the losses of an undisturbed run."""
    code = ended(started(folder, steps, more))
    if code:
        raise RuntimeError(f"the undisturbed run failed with {code}: {(folder / 'stderr').read_text()}")
    return losses_of(folder)


# Soak test


def soak(work: Path, kills: int, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Kill a training `kills` times; return what was hit and the faults at the end."""
    rng, more = random.Random(seed), (f"checkpoint.save_every={SAVE_EVERY}",)
    reference = undisturbed(work / "peace", steps, more)
    hits: dict[str, int] = {}
    faults: list[str] = []
    attempts = number = 0
    while sum(hits.values()) < kills:
        folder = work / f"soak{number}"
        while True:
            attempts += 1
            hit = _attempt(folder, steps, more, rng, sum(hits.values()) < kills)
            if hit == "":
                break
            hits[hit] = hits.get(hit, 0) + 1
        faults += faults_of(folder, reference, steps)
        number += 1
    return {"kills": sum(hits.values()), "hit": hits, "lives": attempts, "trainings": number, "faults": faults}


def _attempt(folder: Path, steps: int, more: tuple[str, ...], rng: random.Random, kill: bool) -> str:
    """Run one attempt of a training; return where it was killed, or an empty string if it completed."""
    child = started(folder, steps, more)
    aim = rng.choice(("step", "step", "save", "publish", "any moment"))
    if kill and wait_for(folder, "build" if aim == "any moment" else aim, child, ranks=1):
        time.sleep(rng.uniform(0, 1.5) if aim in ("any moment", "step") else rng.uniform(0, 0.02))
        ranks = ranks_in(folder, "build")
        kill_job = rng.random() < 0.5 or not ranks
        victim = child.pid if kill_job else rng.choice(ranks)
        if child.is_alive():
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            code = ended(child)
            if code:
                return f"{'job' if kill_job else 'rank'}, {aim}"
            return ""
    code = ended(child)
    if code:
        raise RuntimeError(f"an undisturbed run ended with {code}: {(folder / 'stderr').read_text()[-3000:]}")
    return ""


# Signals


def signalled(work: Path, phase: str, number: signal.Signals, steps: int = 6) -> list[str]:
    """Send a signal to a run in one phase, resume it, and return the faults."""
    more = (
        *("checkpoint.save_every=2", "train.eval_every=2", "train.eval_steps=2", "checkpoint.grace_s=30"),
        f"checkpoint.async_save={'true' if phase == 'flush' else 'false'}",
    )
    reference = undisturbed(work / f"peace-{phase}", steps, more)
    folder = work / f"signal-{phase}-{number.name}"
    child = started(folder, steps, more, slow=phase)
    if not wait_for(folder, phase, child):
        return [f"{phase}: never reached"]
    os.kill(child.pid, number)
    code, found = ended(child), []
    if code != 75:
        found.append(f"{phase}: exit code {code} instead of 75: {(folder / 'stderr').read_text()[-1500:]}")
    if phase != "build" and not Folder(folder).steps():
        found.append(f"{phase}: nothing was saved")
    if exit_code := ended(started(folder, steps, more)):
        found.append(f"{phase}: resuming failed with {exit_code}")
    return found + [f"{phase}: {fault}" for fault in faults_of(folder, reference, steps)]


# Damage


def damages(data: bytes, flips: int, rng: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Yield a file's content with one bit flipped, truncated, extended, empty, and removed."""
    for _ in range(flips):
        position, bit = rng.randrange(len(data)), rng.randrange(8)
        yield (
            f"bit {bit} of byte {position}",
            data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :],
        )
    for length in sorted({0, 1, len(data) // 2, len(data) - 1, *(rng.randrange(len(data)) for _ in range(8))}):
        yield f"truncated to {length} bytes", data[:length]
    yield "a byte too many", data + b"\0"
    yield "removed", None


def detected(folder: Folder, step: int, name: str) -> bool:
    """Return whether damage to a file is detected."""
    if name != LATEST:
        return bool(find_problems(folder.step_path(step)))
    try:
        return folder.latest() != step  # a missing pointer is detected by its absence
    except DamagedError:
        return True


def damage(run: Path, flips: int, seed: int) -> dict[str, Any]:
    """Damage every file of the latest checkpoint in turn; return what was tried and what was not detected."""
    rng, folder = random.Random(seed), Folder(run)
    step = folder.steps()[-1]
    files = {name: folder.step_path(step) / name for name in (MANIFEST, *read_manifest(folder.step_path(step)).files)}
    files[LATEST] = folder.path / LATEST
    tried: dict[str, int] = {}
    missed: list[str] = []
    if find_problems(folder.step_path(step)):
        missed.append("a valid checkpoint was reported as damaged")
    for name, path in files.items():
        data = path.read_bytes()
        for what, content in damages(data, flips, rng):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            tried[name] = tried.get(name, 0) + 1
            if not detected(folder, step, name):
                missed.append(f"{name}: {what}")
            path.write_bytes(data)
    return {"tried": tried, "missed": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started_at = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="meshwright-faults-"))
    soaked = soak(work, args.kills, args.seed)
    print(f"soak: {soaked['kills']} kills {soaked['hit']}, {soaked['lives']} attempts, {len(soaked['faults'])} faults")
    signals = {
        f"{number.name} in {phase}": signalled(work, phase, number)
        for number, phases in ((signal.SIGTERM, PHASES), (signal.SIGUSR1, ("step",)))
        for phase in phases
    }
    for name, found in signals.items():
        print(f"{name}: {found or 'exited with 75, resumed bit for bit'}")
    damaged = damage(work / "peace", args.flips, args.seed)
    print(f"damage: {sum(damaged['tried'].values())} tried, {len(damaged['missed'])} missed")
    good = not (soaked["faults"] or damaged["missed"] or any(signals.values()))
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": round(time.monotonic() - started_at),
        "good": good,
        "soak": {**soaked, "steps": STEPS, "save_every": SAVE_EVERY, "ranks": RANKS},
        "signals": signals,
        "damage": damaged,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if good:
        shutil.rmtree(work)
    else:
        print(f"run folders kept in {work}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Makes the verification cards of the shipped recipes: docs/cards/NAME.json.

    python -m benchmarks.verify [--jobs 2] [--only NAME…] [--checks rules,estimate,dryrun,tiny] [--stale] [--again]

Rules and estimates of all recipes are made at once, in seconds. Dry runs and tiny trainings are made one by one, each
in a process of its own, and written to the card when they end: an interrupted run goes on where it was. A check that
did not fail, of a recipe and with versions that are still the same, is not made again. Ends with 1 if a check failed
of a recipe that is not withdrawn.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # ranks are forked from a process that has computed

import argparse
import multiprocessing as mp
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from meshwright.dryrun import checks, verification
from meshwright.errors import InputError
from meshwright.recipes import index

CARDS = Path(__file__).parents[1] / "docs" / "cards"
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "transformers", "meshwright.engine.trainer")
GRACE_S = 10.0  # for a check that is told to end


@dataclass(frozen=True)
class Task:
    """A check that is to be made."""

    recipe: str
    check: str


@dataclass(frozen=True)
class Running:
    """A check in its process."""

    task: Task
    process: BaseProcess
    answer: Connection
    began: float = field(default_factory=time.monotonic)


def made_in_a_process(task: Task, answer: Connection) -> None:
    """Makes a check and tells what came of it."""
    answer.send(checks.make(task.check, index.load(task.recipe)))
    answer.close()


def quick(folder: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Rules and estimates, always made anew; writes the cards that changed."""
    for name in names:
        recipe, card = index.load(name), verification.card_of(folder, name)
        for check in (one for one in wanted if one not in checks.EXECUTED):
            card = checks.compared(card.with_check(check, checks.make(check, recipe)))
        if card != verification.read(folder, name):
            verification.write(folder, card)


def tasks(folder: Path, names: Sequence[str], wanted: Sequence[str], again: bool) -> list[Task]:
    """What the engine still has to run."""
    found = []
    for check in (one for one in checks.EXECUTED if one in wanted):
        for name in names:
            known = verification.card_of(folder, name).check(check)
            if again or not verification.is_fresh(known, checks.versions(check, index.load(name))):
                found.append(Task(name, check))
    return found


def answers(todo: Sequence[Task], jobs: int) -> Iterator[tuple[Task, verification.Check[Any]]]:
    """The checks in the order they end, so many at a time."""
    context = mp.get_context("forkserver")  # a process that has computed cannot be forked; this one only imports
    if any(task.check in checks.EXECUTED for task in todo[1:]):  # worth it from the second on
        context.set_forkserver_preload(list(PRELOADED))
    waiting, running = list(reversed(todo)), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_started(context, waiting.pop()))
            ready = wait([one.answer for one in running] + [one.process.sentinel for one in running])
            for one in [one for one in running if one.answer in ready or one.process.sentinel in ready]:
                running.remove(one)
                yield one.task, _answer(one)
    finally:
        _end(running)


def _started(context: Any, task: Task) -> Running:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=made_in_a_process, args=(task, there))
    process.start()
    there.close()
    return Running(task, process, here)


def _answer(one: Running) -> verification.Check[Any]:
    try:
        found: verification.Check[Any] = one.answer.recv()
    except EOFError:
        one.process.join()
        recipe = index.load(one.task.recipe)
        return checks.died(one.task.check, recipe, one.process.exitcode, time.monotonic() - one.began)
    one.process.join()
    return found


def _end(running: Sequence[Running]) -> None:
    """Ends what still runs, and its ranks with it."""
    for one in running:
        one.process.terminate()
    for one in running:
        one.process.join(GRACE_S)
        if one.process.is_alive():
            one.process.kill()
            one.process.join()


def execute(folder: Path, todo: Sequence[Task], jobs: int) -> None:
    """Makes checks that run the engine, writes each to its card and tells how far it is."""
    spent: dict[str, list[float]] = {}
    for number, (task, check) in enumerate(answers(todo, jobs), 1):
        verification.write(folder, verification.card_of(folder, task.recipe).with_check(task.check, check))
        spent.setdefault(task.check, []).append(check.seconds)
        left = _seconds_left(todo[number:], spent) / jobs
        told = check.reason or _in_short(check)
        print(
            f"{number}/{len(todo)} {check.outcome:<14} {task.check:<6} {task.recipe:<52} {check.seconds:6.1f} s"
            f"  {left / 60:.0f} min left  {told}",
            flush=True,
        )


def _seconds_left(todo: Sequence[Task], spent: dict[str, list[float]]) -> float:
    """By what checks of the same name took; by any where none ended yet."""
    mean = {name: sum(values) / len(values) for name, values in spent.items()}
    any_of_them = sum(mean.values()) / len(mean)
    return sum(mean.get(task.check, any_of_them) for task in todo)


def _in_short(check: verification.Check[Any]) -> str:
    figures = check.figures
    if isinstance(figures, verification.Trained):
        losses, norms = figures.loss_difference, figures.norm_difference
        first, last = figures.losses[0], figures.losses[-1]
        return f"{figures.layout}: loss {first:.3f} → {last:.3f}, differences {losses:.0e} and {norms:.0e}"
    if isinstance(figures, verification.Executed):
        memory = figures.memory_gib
        return f"{memory['total']:.1f} of {memory['capacity']:.1f} GiB, peak in {figures.peak_phase}, {figures.peak_at}"
    return ""


def summary(folder: Path, names: Sequence[str]) -> bool:
    """Tells how the cards stand; whether every recipe with a check that failed is withdrawn."""
    found = [verification.card_of(folder, name) for name in names]
    for check in verification.CHECKS:
        outcomes = [one.outcome if (one := card.check(check)) is not None else "not made yet" for card in found]
        told = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
        print(f"{check:<9} {told}")
    for card in found:
        for name in card.failed:
            reason = getattr(card.check(name), "reason", "")
            print(
                f"failed: {card.recipe}, {name}: {reason}{f'; withdrawn: {card.withdrawn}' if card.withdrawn else ''}"
            )
    return not any(card.failed and not card.withdrawn for card in found)


def shipped(benchmark: bool) -> list[str]:
    """The names of all recipes, or of all benchmark recipes."""
    return [entry.name for entry in index.entries(benchmark=benchmark)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify")
    parser.add_argument("--jobs", type=int, default=2, help="checks that run at a time")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="recipes; all that are shipped otherwise")
    parser.add_argument("--checks", default=",".join(verification.CHECKS), help="some of them, with commas between")
    parser.add_argument("--stale", action="store_true", help="only recipes without a card or changed since theirs")
    parser.add_argument("--again", action="store_true", help="make checks anew that need not be")
    parser.add_argument("--benchmark", action="store_true", help="the benchmark recipes instead")
    parser.add_argument("--folder", type=Path, default=CARDS, help="of the cards")
    given = parser.parse_args()
    wanted = given.checks.split(",")
    if unknown := [name for name in wanted if name not in verification.CHECKS]:
        parser.error(f"--checks: {unknown[0]} is none of {', '.join(verification.CHECKS)}")
    try:
        names = [index.resolve(name) for name in given.only] or shipped(given.benchmark)
    except InputError as error:
        parser.error(str(error))
    if given.stale:
        names = [
            name
            for name in names
            if (card := verification.read(given.folder, name)) is None or verification.is_stale(card)
        ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is ended on the way out
    try:
        quick(given.folder, names, wanted)
        execute(given.folder, tasks(given.folder, names, wanted, given.again), max(given.jobs, 1))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0 if summary(given.folder, names) else 1


if __name__ == "__main__":
    sys.exit(main())

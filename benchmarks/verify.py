"""Update the verification reports of the shipped recipes: docs/data/verification.jsonl.

    python -m benchmarks.verify [--jobs 2] [--only NAME…] [--checks rules,estimate,dryrun,tiny] [--stale] [--again]

Rules and estimates of all recipes take seconds and always run. Dry runs and tiny trainings run one by one, each in a
process of its own, and each result is saved when it ends: an interrupted run resumes where it stopped. A check that did
not fail is kept as long as the recipe and the package versions are the same. Exits with 1 if a check failed for a
recipe that is not withdrawn.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # ranks are forked; threads of the parent would not survive the fork

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

PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "transformers", "meshwright.engine.trainer")
GRACE_S = 10.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Task:
    """A check to run."""

    recipe: str
    check: str


@dataclass(frozen=True)
class Running:
    """A check that runs in its process."""

    task: Task
    process: BaseProcess
    result: Connection
    started: float = field(default_factory=time.monotonic)


def run_task(task: Task, result: Connection) -> None:
    """Run a check and send its result; the target of a check's process."""
    result.send(checks.run_check(task.check, index.load(task.recipe)))
    result.close()


def run_quick_checks(path: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Run rules and estimates of all recipes, and save the reports that changed."""
    known, changed = verification.read(path), []
    for name in names:
        recipe, report = index.load(name), verification.current(known, name)
        for check in (one for one in wanted if one not in checks.ENGINE_CHECKS):
            report = checks.with_current_estimate(report.with_check(check, checks.run_check(check, recipe)))
        if report != known.get(name):
            changed.append(report)
    if changed:
        verification.update(path, changed)


def pending_tasks(path: Path, names: Sequence[str], wanted: Sequence[str], again: bool) -> list[Task]:
    """Return the checks that still have to run the engine."""
    reports = verification.read(path)
    found = []
    for check in (one for one in checks.ENGINE_CHECKS if one in wanted):
        for name in names:
            known = verification.current(reports, name).check(check)
            if again or not verification.is_fresh(known, checks.versions(check, index.load(name))):
                found.append(Task(name, check))
    return found


def results(todo: Sequence[Task], jobs: int) -> Iterator[tuple[Task, verification.Check[Any]]]:
    """Run the checks, `jobs` at a time, and yield each when it ends."""
    context = mp.get_context("forkserver")  # the server only imports: a process that ran torch cannot be forked
    if any(task.check in checks.ENGINE_CHECKS for task in todo[1:]):  # preloading pays off from the second task on
        context.set_forkserver_preload(list(PRELOADED))
    waiting, running = list(reversed(todo)), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(context, waiting.pop()))
            ready = wait([one.result for one in running] + [one.process.sentinel for one in running])
            for one in [one for one in running if one.result in ready or one.process.sentinel in ready]:
                running.remove(one)
                yield one.task, _receive(one)
    finally:
        _terminate(running)


def _start(context: Any, task: Task) -> Running:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_task, args=(task, sender))
    process.start()
    sender.close()
    return Running(task, process, receiver)


def _receive(one: Running) -> verification.Check[Any]:
    try:
        check: verification.Check[Any] = one.result.recv()
    except EOFError:
        one.process.join()
        recipe = index.load(one.task.recipe)
        return checks.crashed(one.task.check, recipe, one.process.exitcode, time.monotonic() - one.started)
    one.process.join()
    return check


def _terminate(running: Sequence[Running]) -> None:
    """End the processes that still run, and their ranks with them."""
    for one in running:
        one.process.terminate()
    for one in running:
        one.process.join(GRACE_S)
        if one.process.is_alive():
            one.process.kill()
            one.process.join()


def run_engine_checks(path: Path, todo: Sequence[Task], jobs: int) -> None:
    """Run checks that need the engine, save each when it ends and print the progress."""
    spent: dict[str, list[float]] = {}
    for number, (task, check) in enumerate(results(todo, jobs), 1):
        report = verification.current(verification.read(path), task.recipe)
        verification.update(path, [report.with_check(task.check, check)])
        spent.setdefault(task.check, []).append(check.seconds)
        left = _seconds_left(todo[number:], spent) / jobs
        print(
            f"{number}/{len(todo)} {check.outcome:<14} {task.check:<6} {task.recipe:<52} {check.seconds:6.1f} s"
            f"  {left / 60:.0f} min left  {check.reason or _summary_line(check)}",
            flush=True,
        )


def _seconds_left(todo: Sequence[Task], spent: dict[str, list[float]]) -> float:
    """Estimate from the mean duration of the same check, or of any check if none of that name has ended."""
    mean = {name: sum(values) / len(values) for name, values in spent.items()}
    overall = sum(mean.values()) / len(mean)
    return sum(mean.get(task.check, overall) for task in todo)


def _summary_line(check: verification.Check[Any]) -> str:
    figures = check.figures
    if isinstance(figures, verification.TinyRunResult):
        losses, norms = figures.loss_difference, figures.norm_difference
        first, last = figures.losses[0], figures.losses[-1]
        return f"{figures.layout}: loss {first:.3f} → {last:.3f}, differences {losses:.0e} and {norms:.0e}"
    if isinstance(figures, verification.DryRunResult):
        memory = figures.memory_gib
        return f"{memory['total']:.1f} of {memory['capacity']:.1f} GiB, peak in {figures.peak_phase}, {figures.peak_at}"
    return ""


def print_summary(path: Path, names: Sequence[str]) -> bool:
    """Print the outcomes; return whether every recipe with a failed check is withdrawn."""
    known = verification.read(path)
    reports = [verification.current(known, name) for name in names]
    for check in verification.CHECKS:
        outcomes = [one.outcome if (one := report.check(check)) is not None else "not run yet" for report in reports]
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
        print(f"{check:<9} {counts}")
    for report in reports:
        withdrawn = f"; withdrawn: {report.withdrawn}" if report.withdrawn else ""
        for name in report.failed:
            print(f"failed: {report.recipe}, {name}: {getattr(report.check(name), 'reason', '')}{withdrawn}")
    return not any(report.failed and not report.withdrawn for report in reports)


def shipped(benchmark: bool) -> list[str]:
    """Return the names of all recipes, or of all benchmark recipes."""
    return [entry.name for entry in index.entries(benchmark=benchmark)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify")
    parser.add_argument("--jobs", type=int, default=2, help="checks to run at a time")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="recipes to verify (default: all)")
    parser.add_argument("--checks", default=",".join(verification.CHECKS), help="checks to run, comma-separated")
    parser.add_argument("--stale", action="store_true", help="only recipes without a report or changed since theirs")
    parser.add_argument("--again", action="store_true", help="rerun checks that are up to date")
    parser.add_argument("--benchmark", action="store_true", help="verify the benchmark recipes instead")
    parser.add_argument("--file", type=Path, default=verification.REPORTS, help="file of the reports")
    args = parser.parse_args()
    wanted = args.checks.split(",")
    if unknown := [name for name in wanted if name not in verification.CHECKS]:
        parser.error(f"--checks: {unknown[0]} is none of {', '.join(verification.CHECKS)}")
    try:
        names = [index.resolve(name) for name in args.only] or shipped(args.benchmark)
    except InputError as error:
        parser.error(str(error))
    if args.stale:
        known = verification.read(args.file)
        names = [name for name in names if name not in known or verification.is_stale(known[name])]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # exit through the cleanup of `results`
    try:
        run_quick_checks(args.file, names, wanted)
        run_engine_checks(args.file, pending_tasks(args.file, names, wanted, args.again), max(args.jobs, 1))
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        return 130
    return 0 if print_summary(args.file, names) else 1


if __name__ == "__main__":
    sys.exit(main())

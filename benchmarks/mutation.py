"""Mutation testing: change one operator of the code at random, and see whether a test fails.

`make mutation` samples mutants over the rooms below and writes how many the default tests caught. Each mutant is the
source with one change. The kept answers of its room run on it first, which take seconds; what they miss goes to the
other tests of its room, one file at a time, until one fails.

    python -m benchmarks.mutation --count 200 --seed 1 --jobs 14 --minutes 9
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/meshwright")


class Room(NamedTuple):
    """Files, the kept answers that should notice a change in them, and their other tests."""

    files: tuple[str, ...]
    kept: tuple[str, ...]
    others: tuple[str, ...]


PLANS = "tests/planner/test_kept_answers.py"
ROOMS = {
    "rules": Room(
        ("rules/*.py",),
        ("tests/rules/test_edges.py", PLANS),
        ("tests/rules", "tests/planner", "tests/advice"),
    ),
    "costs": Room(
        ("costs/*.py",),
        ("tests/costs/test_kept_estimates.py", PLANS),
        ("tests/costs", "tests/planner", "tests/advice"),
    ),
    "planner": Room(
        ("planner/*.py",), (PLANS,), ("tests/planner", "tests/advice", "tests/first_hour/test_09_cost_and_time.py")
    ),
    "models": Room(
        ("models/*.py",),
        ("tests/models/test_kept_models.py",),
        ("tests/models", "tests/recipes", "tests/costs/test_kept_estimates.py", PLANS),
    ),
    "step": Room(
        ("engine/trainer.py", "engine/gradients.py", "engine/losses.py", "engine/schedules.py",
         "engine/optimizers/*.py"),
        ("tests/engine/test_step_by_hand.py",),
        ("tests/engine/test_schedules.py", "tests/engine/test_losses.py", "tests/engine/test_optimizers.py",
         "tests/first_hour/test_11_adam8bit.py", "tests/engine/test_mtp.py", "tests/engine/test_train.py",
         "tests/engine/test_parity.py"),
    ),
}  # fmt: skip
SKIPPED = ("costs/measurements", "costs/runs_table", "costs/accuracy", "__init__")
"""Files about benchmark tables and reports, not about answers."""
EQUIVALENT = {
    ("flops.py", "visible * 1.0", "(visible / 1.0)"): "one",
    (
        "smallest_cluster.py",
        "least_state_gib(case) * case.cluster.world",
        "(least_state_gib(case) / case.cluster.world)",
    ): "a bound that saves searches in vain: with a lower one they are made and find nothing",
}
"""Changes that were read and cannot change an answer: file, before and after, with the reason. They are not sampled."""
SLOWEST = 12.0  # a mutant that takes so many times as long as the code itself is caught: it would not end
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one operator."""

    room: str
    file: str
    line: int
    before: str
    after: str
    start: int
    end: int


@dataclass
class Result:
    """Whether the tests caught a mutant, and which test did."""

    mutant: Mutant
    caught: bool = False
    by: str = ""
    seconds: float = 0.0
    unfinished: list[str] = field(default_factory=list)  # tests that had no time left


def mutants_of(room: str, file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = file.read_text(encoding="utf-8")
    offsets = [0]
    for text in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(text))
    for node in ast.walk(ast.parse(source)):
        for changed in _changes(node):
            start = offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            relative = str(file.relative_to(ROOT))
            yield Mutant(room, relative, node.lineno, ast.unparse(node), changed, start, end)  # type: ignore[attr-defined]


def _changes(node: ast.AST) -> Iterator[str]:
    """Yield the node as source with one operator swapped; annotations and string joins are left alone."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in SWAPS:
                ops = list(node.ops)
                ops[place] = SWAPS[type(operator)]()  # type: ignore[call-overload]
                yield f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text_or_type(node):
        yield f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(node.op)](), node.right))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"  # type: ignore[arg-type]


def _is_text_or_type(node: ast.BinOp) -> bool:
    """Return whether an operator joins texts or types: `int | None`, "a" + "b"."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Constant | ast.JoinedStr)]
    kinds = {"int", "float", "str", "None", "bool", "dict", "tuple", "list", "Any", "Column"}
    texts = any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", 0), str) for part in parts)
    types = any(isinstance(part, ast.Name) and (part.id in kinds or part.id[:1].isupper()) for part in parts)
    nothing = any(isinstance(part, ast.Constant) and part.value is None for part in parts)
    return texts or (isinstance(node.op, ast.BitOr) and (types or nothing))


def files_of(room: str) -> list[Path]:
    """Return the files of a room in which operators are changed."""
    files = sorted(file for pattern in ROOMS[room].files for file in (ROOT / PACKAGE).glob(pattern))
    return [file for file in files if not any(part in str(file) for part in SKIPPED)]


def sample(count: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Return mutants of the rooms, the same number of each, in random order."""
    chosen: list[Mutant] = []
    for number, room in enumerate(rooms):
        found = [mutant for file in files_of(room) for mutant in mutants_of(room, file)]
        found = [one for one in found if (Path(one.file).name, one.before, one.after) not in EQUIVALENT]
        share = count // len(rooms) + (number < count % len(rooms))
        chosen += random.Random(seed).sample(found, min(share, len(found)))
    random.Random(seed).shuffle(chosen)  # a run that is stopped has mutants of every room
    return chosen


def overlay(folder: Path, mutant: Mutant | None) -> Path:
    """Make a source folder of links to the package's files, with the mutant's file changed; return it."""
    source, target = ROOT / "src", folder / "src"
    parts = Path(mutant.file).relative_to("src").parts if mutant else ()
    for depth in range(len(parts)):
        inside = Path(*parts[:depth])
        (target / inside).mkdir(parents=True, exist_ok=True)
        for entry in (source / inside).iterdir():
            if entry.name == "__pycache__" and depth == len(parts) - 1:
                _link_caches(entry, target / inside / "__pycache__", Path(parts[-1]).stem)
            elif entry.name != parts[depth]:
                (target / inside / entry.name).symlink_to(entry)
    if mutant is None:
        return source
    text = (ROOT / mutant.file).read_bytes()
    (folder / mutant.file).write_bytes(text[: mutant.start] + mutant.after.encode() + text[mutant.end :])
    return target


def _link_caches(caches: Path, target: Path, without: str) -> None:
    """Link the compiled files of a folder but those of the changed file."""
    target.mkdir()
    for entry in caches.iterdir():
        if entry.name.partition(".")[0] != without:
            (target / entry.name).symlink_to(entry)


def pytest(
    tests: Sequence[str], mutant: Mutant | None, limit_s: float, left_out: Iterable[str] = ()
) -> tuple[int, str]:
    """Run tests on a mutant or on the code itself; return the exit status, 124 at the limit, and the output."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{overlay(Path(folder), mutant)}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/hypothesis",
            **({"PYTHONDONTWRITEBYTECODE": "1"} if mutant else {}),
        }
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
        command += ["--basetemp", f"{folder}/tmp", *(f"--deselect={test}" for test in left_out)]
        command += [*(["-x"] if mutant else []), *tests]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=max(limit_s, 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own session: the ranks that a test started end too
                process.communicate()
                return 124, ""
        return process.returncode, output


def failed_tests(output: str) -> list[str]:
    """Return the names of failed tests, and of files that could not be read, from pytest's summary."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [line.partition(" ")[2].partition(" - ")[0].strip() for line in lines]


class Baseline:
    """What a test file does without a mutant, found before its first use: which tests fail, how long it takes."""

    def __init__(self, ends: float) -> None:
        self.ends = ends
        self.left_out: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self._locks: dict[str, Lock] = defaultdict(Lock)

    def measure(self, test: str) -> None:
        """Run a file once."""
        with self._locks[test]:
            if test in self.seconds:
                return
            began = time.monotonic()
            code, output = pytest([test], None, self.ends - began)
            failed = failed_tests(output)
            self.left_out[test] = failed if code in (0, 1, 5) else [test, *failed]
            self.seconds[test] = time.monotonic() - began
            if code not in (0, 5):
                names = ", ".join(failed) if code == 1 else "all of it"
                print(f"left out, because it fails without a mutant: {test}: {names[:300]}", flush=True)

    def limit(self, test: str) -> float:
        return SLOWEST * self.seconds[test] + 60


def test_files(tests: Iterable[str]) -> list[str]:
    """Return the files of some files and folders."""
    found: dict[str, None] = {}
    for test in tests:
        path = ROOT / test
        inside = sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.exists() else []
        found |= dict.fromkeys(str(file.relative_to(ROOT)) for file in inside)
    return list(found)


def try_file(result: Result, test: str, baseline: Baseline, sure: bool = False) -> None:
    """Run one file on a mutant that no test has caught yet; with `sure`, a failure has to be repeated."""
    if result.caught:
        return
    baseline.measure(test)
    left, left_out = baseline.ends - time.monotonic(), baseline.left_out[test]
    if test in left_out:  # nothing of it can run here
        return
    if left < baseline.seconds[test]:
        result.unfinished.append(test)
        return
    began, limit = time.monotonic(), baseline.limit(test)
    code, output = pytest([test], result.mutant, min(left, limit), left_out)
    result.seconds += time.monotonic() - began
    if code == 124 and left < limit:
        result.unfinished.append(test)
    elif code not in (0, 5):  # 5: nothing was selected
        failed = failed_tests(output)[:1]
        if sure and failed and not _fails_again(failed[0], result.mutant, limit):
            left_out += [one for one in failed if one not in left_out]
        else:
            by = failed[0] if failed else f"{test} {'did not end' if code == 124 else 'failed'}"
            result.caught, result.by = True, by


def _fails_again(test: str, mutant: Mutant, limit_s: float) -> bool:
    """Return whether a test fails on the mutant again and passes without it; one about speed may fail by chance."""
    return pytest([test], mutant, limit_s)[0] not in (0, 5) and pytest([test], None, limit_s)[0] == 0


def run(chosen: Sequence[Mutant], jobs: int, ends: float) -> list[Result]:
    """Run kept answers on every mutant, then the other tests on those that they missed."""
    results, baseline = [Result(mutant) for mutant in chosen], Baseline(ends)
    kept = {room: test_files(ROOMS[room].kept) for room in ROOMS}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(baseline.measure, dict.fromkeys(test for one in results for test in kept[one.mutant.room])))

        def by_kept_answers(result: Result) -> None:
            for test in kept[result.mutant.room]:
                try_file(result, test, baseline)

        list(pool.map(by_kept_answers, results))
        missed = [one for one in results if not one.caught]
        print(f"kept answers caught {len(results) - len(missed)} of {len(results)}", flush=True)
        others = {room: [test for test in test_files(ROOMS[room].others) if test not in kept[room]] for room in ROOMS}
        tasks = [(place, test, one) for one in missed for place, test in enumerate(others[one.mutant.room])]
        tasks.sort(key=lambda task: task[0])
        list(pool.map(lambda task: try_file(task[2], task[1], baseline, sure=True), tasks))
    return results


def report(results: Sequence[Result]) -> None:
    """Print the survivors, and a line per room."""
    for one in sorted(results, key=lambda one: (one.mutant.file, one.mutant.line)):
        if not one.caught:
            late = f"  ({len(one.unfinished)} test files had no time)" if one.unfinished else ""
            change = f"{one.mutant.before}  ->  {one.mutant.after}"
            print(f"SURVIVED {one.mutant.file}:{one.mutant.line}  {change[:240]}{late}")
    caught = Counter(one.mutant.room for one in results if one.caught)
    total = Counter(one.mutant.room for one in results)
    print(f"{'room':10}{'caught':>8}{'of':>6}{'share':>8}")
    for room in ROOMS:
        if total[room]:
            print(f"{room:10}{caught[room]:8}{total[room]:6}{caught[room] / total[room]:8.0%}")
    print(f"{'all':10}{caught.total():8}{total.total():6}{caught.total() / total.total():8.0%}")


def main() -> None:
    """Sample, run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time; what is left has survived")
    parser.add_argument("--out", default="build/mutation.json")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    results = run(sample(options.count, options.seed, options.rooms), options.jobs, ends)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8")
    report(results)


if __name__ == "__main__":
    main()

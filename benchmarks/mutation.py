"""Mutation testing: change one operator of the code at random, and see whether a test fails.

`make mutation` samples mutants over the rooms below and writes how many the tests caught. Each mutant is a copy of the
source with one change; the tests of its room run on it, the fastest first, until one fails.

    python -m benchmarks.mutation --count 200 --seed 1 --jobs 2 --out build/mutation.json
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/meshwright")
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rules": (("rules/*.py",), ("tests/rules", "tests/planner", "tests/advice")),
    "costs": (("costs/*.py",), ("tests/costs", "tests/planner", "tests/advice", "tests/cli")),
    "planner": (("planner/*.py",), ("tests/planner", "tests/advice", "tests/first_hour/test_09_cost_and_time.py")),
    "models": (("models/*.py",), ("tests/models", "tests/recipes", "tests/costs")),
    "step": (
        ("engine/trainer.py", "engine/gradients.py", "engine/losses.py", "engine/schedules.py",
         "engine/optimizers/*.py"),
        ("tests/engine/test_losses.py", "tests/engine/test_schedules.py", "tests/engine/test_optimizers.py",
         "tests/engine/test_mtp.py", "tests/engine/test_train.py", "tests/engine/test_parity.py"),
    ),
}  # fmt: skip
"""Room → its files, and the tests that should notice."""
SKIPPED = ("costs/measurements", "costs/runs_table", "costs/accuracy", "__init__")
"""Files about benchmark tables and reports, not about answers."""
LIMIT_S = 420.0
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


@dataclass(frozen=True)
class Result:
    """Whether the tests caught a mutant, and which test did."""

    mutant: Mutant
    caught: bool
    by: str
    seconds: float


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


def sample(count: int, seed: int) -> list[Mutant]:
    """Return mutants of all rooms, the same number of each."""
    chosen: list[Mutant] = []
    for number, (room, (patterns, _)) in enumerate(ROOMS.items()):
        files = sorted(file for pattern in patterns for file in (ROOT / PACKAGE).glob(pattern))
        files = [file for file in files if not any(part in str(file) for part in SKIPPED)]
        found = [mutant for file in files for mutant in mutants_of(room, file)]
        share = count // len(ROOMS) + (number < count % len(ROOMS))
        chosen += random.Random(seed).sample(found, min(share, len(found)))
    return chosen


def failing(test: str) -> list[str]:
    """Return the tests of a file or folder that fail without any mutant; they notice nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", test]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [line.split()[1] for line in lines]


def run(mutant: Mutant, left_out: list[str]) -> Result:
    """Run the tests of a mutant's room on a copy of the source with the change."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        target = Path(folder) / mutant.file
        source = target.read_bytes()
        target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}/src:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/hypothesis",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        command += ["--tb=no", "--basetemp", f"{folder}/tmp", *(f"--deselect={test}" for test in left_out)]
        tests = [test for test in ROOMS[mutant.room][1] if (ROOT / test).exists()]
        for test in tests:
            left = LIMIT_S - (time.monotonic() - began)
            try:
                done = subprocess.run(
                    [*command, test], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(left, 1)
                )
            except subprocess.TimeoutExpired:
                return Result(mutant, False, "time limit", time.monotonic() - began)
            if done.returncode not in (0, 5):  # 5: nothing was selected
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return Result(mutant, True, failed[0] if failed else test, time.monotonic() - began)
    return Result(mutant, False, "", time.monotonic() - began)


def main() -> None:
    """Sample, run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS))
    parser.add_argument("--out", default="build/mutation.json")
    options = parser.parse_args()
    chosen = [mutant for mutant in sample(options.count, options.seed) if mutant.room in options.rooms]
    random.Random(options.seed).shuffle(chosen)  # a run that is stopped has mutants of every room
    results: list[Result] = []
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    tests = sorted({test for room in options.rooms for test in ROOMS[room][1] if (ROOT / test).exists()})
    with ThreadPoolExecutor(options.jobs) as pool:
        left_out = [test for found in pool.map(failing, tests) for test in found]
        print(f"{len(left_out)} tests fail without a mutant and are left out: {' '.join(left_out)}"[:2000], flush=True)
        for result in pool.map(lambda mutant: run(mutant, left_out), chosen):
            results.append(result)
            one = result.mutant
            state = "caught  " if result.caught else "SURVIVED"
            print(f"{state} {one.file}:{one.line}  {one.before}  ->  {one.after}  {result.by}"[:220], flush=True)
            out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
    caught = Counter(result.mutant.room for result in results if result.caught)
    total = Counter(result.mutant.room for result in results)
    for room in total:
        print(f"{room}: {caught[room]} of {total[room]} caught")
    print(f"all: {sum(caught.values())} of {sum(total.values())} caught")


if __name__ == "__main__":
    main()

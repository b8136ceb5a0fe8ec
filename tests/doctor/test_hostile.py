"""Logs made to exhaust memory or time: both stay within limits that the process itself enforces."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from meshwright import doctor
from meshwright.doctor.formats.text import MAX_LENGTH, lines_of
from meshwright.errors import InputError

SOURCES = Path(doctor.__file__).parents[1]
LIMIT = 3 * 1024**3  # bytes of address space; the program itself takes about a half
SECONDS = 60

READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
from meshwright import doctor
from meshwright.errors import InputError
try:
    doctor.examine(doctor.read(sys.argv[1]))
except InputError as error:
    print(error.reason)
"""

STEP = b"step 10/100  loss 2.5000  lr 1.00e-04\n"
BOMBS = {
    "empty lines": (b"\n" * (1 << 22), 16),
    "many empty lines": (b"\n" * (1 << 22), 128),
    "short lines": (b"a\n" * (1 << 21), 128),
    "carriage returns": (b"7%|\r" * (1 << 20), 128),
    "NUL bytes": (b"\0" * (1 << 22), 128),
    "one line": (b"a" * (1 << 22), 128),
    "many parts": (b"a\n", 60_000),
    "equal steps": (STEP * (1 << 13), 240),
}


def _bomb(path: Path, block: bytes, count: int) -> None:
    """Write a compressed file of so many equal blocks; parts of gzip may follow each other."""
    path.write_bytes(gzip.compress(block, 1) * count)


QUICK = ("empty lines", "many parts")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BOMBS]
)
def test_a_small_compressed_file_takes_little_memory(name: str, tmp_path: Path) -> None:
    block, count = BOMBS[name]
    path = tmp_path / "train.log.gz"
    _bomb(path, block, count)
    program = textwrap.dedent(READ).format(limit=LIMIT, seconds=SECONDS)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True, text=True, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    if name in ("short lines", "carriage returns"):
        assert "has more than 2,000,000 lines; the limit is 2,000,000 lines" in done.stdout


PIECES = (
    *(
        "1",
        "1,",
        "1.",
        "1e",
        "-",
        " ",
        "  ",
        "\t",
        ".",
        "..",
        "=",
        ":",
        "|",
        "| ",
        "{",
        "}",
        "'",
        '"',
        "[",
        "(",
        "a",
        "a-",
    ),
    *("a.", "/", "_", "A", "0:", "step", "step ", "loss", "loss:", "'loss': ", "'loss': 1 ", "{'loss': 1, ", '"loss":'),
    *('"step":1,', '{"a":', "iteration ", "iteration 1/1 |", " ..", "NCCL ", "[rank0]", "rank 0: ", "CANCELLED AT "),
    *(
        "Traceback ",
        "Error",
        "aError",
        "function: '",
        "missing ranks: {",
        "1/1 [",
        "tps 1(",
        "memory (MB)",
        "| loss 1 ",
    ),
    *("MnRtt/Rnk: 1ms/1 | ", "%|", "100%|"),
)
STARTS = (
    *("", "step: 1  loss: ", "iteration 1/ 1 | ", "{'loss': ", "step 1 | epoch 0 | loss ", '{"step": 1, "loss": '),
    "Epoch 0: ",
)


def _check_lines(step: int) -> None:
    lines = [(start + piece * MAX_LENGTH)[: MAX_LENGTH - 1] for start in STARTS for piece in PIECES]
    for line in lines[::step]:
        begun = time.process_time()
        with suppress(InputError):
            doctor.examine(doctor.read_text(f"{line}\n", "log"))
        taken = time.process_time() - begun
        assert taken < 0.8, (line[:60], taken)


def test_a_long_line_is_read_in_linear_time() -> None:
    """One line of 19 kB took 5 s: rows of digits were tried in every split."""
    _check_lines(17)


@pytest.mark.slow
def test_every_long_line_is_read_in_linear_time() -> None:
    _check_lines(1)


def _check_patterns(pieces: Sequence[str]) -> None:
    """Check every pattern of the doctor, also those that only some lines reach."""
    modules = [module for name, module in sys.modules.items() if name.startswith("meshwright.doctor")]
    patterns = {id(one): one for module in modules for value in vars(module).values() for one in _patterns(value)}
    assert len(patterns) > 100
    texts = [next(lines_of(piece * (MAX_LENGTH // len(piece)))).text for piece in pieces]
    for pattern in patterns.values():
        for piece, text in zip(pieces, texts, strict=True):
            begun = time.process_time()
            pattern.search(text)
            taken = time.process_time() - begun
            assert taken < 0.4, (pattern.pattern, piece, taken)


def test_no_pattern_takes_quadratic_time() -> None:
    _check_patterns(PIECES[::9])


@pytest.mark.slow
def test_no_pattern_takes_quadratic_time_on_any_line() -> None:
    _check_patterns(PIECES)


def _patterns(value: object) -> list[re.Pattern[str]]:
    """Return the patterns in a value of a module."""
    if isinstance(value, re.Pattern):
        return [value]
    if isinstance(value, dict):
        return [one for item in value.values() for one in _patterns(item)]
    if isinstance(value, tuple | list):
        return [one for item in value for one in _patterns(item)]
    return []


@pytest.mark.parametrize(
    "text", ["step {odd}/9  loss 1.0000  lr 1.00e-04\n", "step {i}/9  loss {jump}.0000  lr 1.00e-04\n"]
)
def test_many_restarts_and_jumps_take_linear_time(text: str) -> None:
    """A start per line and a jump per line were compared with all the others."""
    lines = [text.format(i=i, odd=i % 2 + 1, jump=9 if i % 30 == 0 else 1) for i in range(20_000)]
    begun = time.process_time()
    doctor.examine(doctor.read_text("".join(lines), "log"))
    assert time.process_time() - begun < 8

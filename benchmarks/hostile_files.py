"""Run commands on files made to exhaust memory or time; record seconds, memory and the message of each.

`python -m benchmarks.hostile_files --save` writes the table. It exits with 1 if a command exceeds its limits or fails
without an error message.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "hostile_files.json"
SOURCES = Path(__file__).parents[1] / "src"
CPU_S, MEMORY_MIB = 60, 1536  # limits of one command
KNOWN_EXITS = (0, 1, 2, 3)  # of a report or of an error with its message; a signal or 70 is a failure
LOG, CONFIG, MODEL = (("doctor",),), (("check",), ("import",)), (("inspect",), ("recommend", "--gpus", "8xH100"))
STEP = b"step 10/100  loss 2.5000  lr 1.00e-04\n"
DEEP = 20_000
SCRIPT = b"torchrun pretrain_gpt.py --num-layers "


def _alias_bomb() -> bytes:
    """Return YAML whose aliases expand to 10^20 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
    return "\n".join([*lines, "layout: *a19", ""]).encode()


FILES: Mapping[str, tuple[str, Callable[[], bytes], tuple[tuple[str, ...], ...]]] = {
    "gzip bomb, 512 MiB of empty lines": ("train.log.gz", lambda: gzip.compress(b"\n" * (1 << 22), 1) * 128, LOG),
    "gzip bomb, 512 MiB in one line": ("train.log.gz", lambda: gzip.compress(b"a" * (1 << 22), 1) * 128, LOG),
    "gzip bomb, 500,000 equal steps": ("train.log.gz", lambda: gzip.compress(STEP * (1 << 13), 1) * 60, LOG),
    "one line of 100 MB": ("train.log", lambda: b"step 1 loss " + b"1" * 100_000_000, LOG),
    "a million short lines": ("train.log", lambda: b"a\n" * 1_000_000, LOG),
    "500,000 steps": ("train.log", lambda: b"".join(b"step %d/500000  loss 2.5\n" % n for n in range(500_000)), LOG),
    "NUL bytes": ("train.log", lambda: b"\0" * 20_000_000, LOG),
    "invalid UTF-8": ("train.log", lambda: (b"\xff\xfe\xc3\x28" * 10 + b"\n") * 200_000, LOG),
    "invalid UTF-8 in a script": ("run.sh", lambda: SCRIPT + b" \xff\xfe --x \xc3\x28\n", CONFIG),
    "NUL bytes in a script": ("run.sh", lambda: b"torchrun pretrain_gpt.py \0" * 10_000, CONFIG),
    "one word of 5 MB in a script": ("run.sh", lambda: SCRIPT + b"9" * 5_000_000, CONFIG),
    "YAML aliases": ("config.yaml", _alias_bomb, CONFIG),
    "deep YAML": ("config.yaml", lambda: b"[" * DEEP + b"]" * DEEP, CONFIG),
    "deep TOML": ("config.toml", lambda: b"a = " + b"[" * DEEP + b"]" * DEEP, CONFIG),
    "deep JSON": ("ds_config.json", lambda: b'{"a":' * DEEP + b"1" + b"}" * DEEP, CONFIG),
    "deep config.json": ("config.json", lambda: b'{"a":' * DEEP + b"1" + b"}" * DEEP, MODEL),
    "config.json of one huge number": ("config.json", lambda: b'{"num_layers": ' + b"9" * 1_000_000 + b"}", MODEL),
    "config.json of a million layer types": (
        "config.json",
        lambda: json.dumps({"model_type": "llama", "layer_types": ["full_attention"] * 1_000_000}).encode(),
        MODEL,
    ),
}  # fmt: skip


def run(words: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Run one command within its limits; return what it took and how it ended."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    started = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "meshwright", *words, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace", cwd=folder, env=environment,
        preexec_fn=limit,  # this process has one thread
    )  # fmt: skip
    assert started.stdout is not None
    text = started.stdout.read()
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    return {
        "exit": started.returncode,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(time.monotonic() - begun, 1),
        "memory_mib": round(used.ru_maxrss / 1024),
        "message": _message(text),
    }


def _message(text: str) -> str:
    """Return the error of a response, or what was found."""
    try:
        answer = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return text.strip()[-200:]
    error = answer.get("error")
    return str(error["message"])[:200] if error else f"{len(answer.get('findings', ()))} findings"


def rows(names: str = "") -> Iterator[dict[str, Any]]:
    """Yield the result of every command on every file."""
    for name, (file, content, commands) in FILES.items():
        if names not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            body = content()
            (Path(folder) / file).write_bytes(body)
            for verb, *options in commands:
                found = run((verb, file, *options), Path(folder))
                row = {"file": name, "bytes": len(body), "command": verb, **found}
                yield {**row, "problems": _problems(row)}


def _problems(row: Mapping[str, Any]) -> list[str]:
    found = [] if row["exit"] in KNOWN_EXITS and "Traceback" not in row["message"] else [f"ended with {row['exit']}"]
    found += [f"{row['cpu_s']} s of CPU time"] if row["cpu_s"] > CPU_S else []
    return found + ([f"{row['memory_mib']} MiB"] if row["memory_mib"] > MEMORY_MIB else [])


def main() -> int:
    """Run all; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    found = []
    for row in rows(given.only):
        found.append(row)
        print(json.dumps(row), flush=True)
    if given.save:
        text = {"limits": {"cpu_s": CPU_S, "memory_mib": MEMORY_MIB}, "rows": found}
        RESULTS.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    return int(any(row["problems"] for row in found))


if __name__ == "__main__":
    sys.exit(main())

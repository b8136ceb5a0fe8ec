"""Run on this machine's GPU what a user types, and set the measured speed and memory beside the estimate.

    python benchmarks/as_typed.py CASES.txt OUT.json [--minutes M] [--only WORD]

Every line of CASES is the rest of a `meshwright bench` command, or `recommend …`: then the training command that
`recommend` prints is run as `bench` (same recipe, same overrides). Steps are set by `train.steps=N` on the line, or 8.
A line that ends with `| note` keeps the note in the result. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

CASE_LIMIT_S = 240
MESHWRIGHT = (sys.executable, "-m", "meshwright")


def cases(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each case's command line and note; `#` starts a comment."""
    for line in path.read_text().splitlines():
        command, _, note = line.partition("#")[0].partition("|")
        if command.strip():
            yield command.strip(), note.strip()


def bench_words(command: str) -> list[str]:
    """Return the words of `bench` for a case; `recommend` is asked for its training command."""
    words = shlex.split(command)
    if words[0] == "recommend":
        words = recommended_words(answered([*words, "--json"], 60))
    if not any(word.startswith("train.steps=") for word in words):
        words.append("train.steps=8")
    return words


def recommended_words(answer: dict[str, Any]) -> list[str]:
    """Return the words of `bench` for the training command in an answer of `recommend`."""
    if "commands" not in answer or "meshwright" not in answer["commands"]:
        raise RuntimeError(f"no training command: {answer.get('error') or answer.get('no_command')}")
    words = shlex.split(answer["commands"]["meshwright"])[2:]
    if "--dataset" in words:  # bench makes its own data
        at = words.index("--dataset")
        del words[at : at + 2]
    return words


def answered(words: list[str], limit_s: float) -> dict[str, Any]:
    """Return the JSON that a meshwright command prints; RuntimeError with its last words otherwise."""
    env = os.environ | {"NO_COLOR": "1"}
    done = subprocess.run([*MESHWRIGHT, *words], capture_output=True, text=True, timeout=limit_s, env=env, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()[-1500:]}") from None
    return answer


def measured(command: str, note: str) -> dict[str, Any]:
    """Run one case and return its row."""
    row: dict[str, Any] = {"case": command, "note": note}
    started = monotonic()
    try:
        words = bench_words(command)
        row["command"] = "meshwright bench " + shlex.join(words)
        answer = answered(["bench", *words, "--json"], CASE_LIMIT_S)
        if "error" in answer:
            raise RuntimeError(answer["error"]["message"])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return row | {"error": str(error)[-1500:], "wall_s": round(monotonic() - started, 1)}
    return row | figures(answer) | {"wall_s": round(monotonic() - started, 1)}


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a run measured, next to its estimate."""
    estimate = answer["estimate"] or {}
    return {
        "layout": answer["layout"],
        "precision": answer["precision"],
        "kernels": answer["kernels"],
        "seq_length": answer["seq_length"],
        "global_batch_size": answer["global_batch_size"],
        "step_s": answer["step_s"],
        "step_parts_s": answer["step_parts_s"],
        "tokens_per_s": answer["tokens_per_s_per_gpu"],
        "mfu": answer["mfu"],
        "memory_gib": answer["memory_gib"],
        "estimate": {"step_s": estimate.get("step_s"), "memory_gib": (estimate.get("memory_gib") or {}).get("total")},
        "losses": answer["losses"],
        "grad_norms": answer["grad_norms"],
        "finite": all(math.isfinite(value) for value in answer["losses"] + answer["grad_norms"]),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as one line of the table."""
    if "error" in row:
        return f"{'FAILED':>9} {row['wall_s']:6.0f} s  {row['case']}\n          {row['error'][-400:]}"
    memory, guess = row["memory_gib"], row["estimate"]
    speed = "" if not guess["step_s"] else f"{guess['step_s'] / row['step_s'] - 1:+6.0%}"
    space = "" if not guess["memory_gib"] else f"{guess['memory_gib'] / memory['reserved'] - 1:+6.0%}"
    return (
        f"{row['tokens_per_s']:9,.0f} {row['mfu'] or 0:5.0%} {speed:>6} |"
        f" {memory['peak']:6.1f} {memory['reserved']:6.1f} {space:>6} |"
        f" {row['wall_s']:4.0f} s {'' if row['finite'] else 'NaN/inf '}{row['case']}"
    )


def main() -> None:
    """Run the cases within the time given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{gpu}, torch {torch.__version__}, transformers {transformers.__version__}",
        "made_by": "python benchmarks/as_typed.py " + " ".join(sys.argv[1:]),
        "rows": [],
    }
    end = monotonic() + 60 * options.minutes
    print(" tokens/s   MFU  est/s |  alloc reserv   est. |  wall  command", flush=True)
    for command, note in cases(options.cases):
        if options.only not in command:
            continue
        if monotonic() > end:
            print(f"  not run  {command}", flush=True)
            continue
        row = measured(command, note)
        result["rows"].append(row)
        options.out.write_text(json.dumps(result, indent=1))
        print(line(row), flush=True)


if __name__ == "__main__":
    main()

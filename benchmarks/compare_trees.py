"""Compare two versions of the source on one GPU: speed, memory and losses of the commands that `recommend` prints.

    python benchmarks/compare_trees.py BEFORE/src AFTER/src OUT.json [--steps 6] [--batch 8] [--models NAME …] [--cpu]

For each case, the command that `recommend MODEL --gpus 1xH200 --goal GOAL` of the newer tree prints is run with `bench`
instead of `train` in both trees, one after the other. --batch replaces the global batch size, to keep steps short.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

CASES = (
    ("llama32-1b", "pretrain"),
    ("olmoe-7b", "pretrain"),
    ("qwen3-4b", "sft"),
    ("gemma3-1b", "sft"),
    ("llama3-8b", "peft"),
    ("nemotron-nano-9b-v2", "peft"),
    ("gpt-oss-20b", "peft"),
)
FAST = ("kernels.compile=true", "kernels.loss=fused_linear")
TINY = ("--tiny", "--nproc", "1")


def meshwright(tree: Path, words: list[str]) -> dict[str, Any]:
    """Run a command of a tree and return its JSON object."""
    env = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "meshwright", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        return {"error": (done.stderr or done.stdout)[-600:]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def recommended(tree: Path, model: str, goal: str) -> list[str]:
    """Return the arguments of the recommended training command, without dataset and rank count."""
    plan = meshwright(tree, ["recommend", model, "--gpus", "1xH200", "--goal", goal])
    words = shlex.split(plan["commands"]["meshwright"])[2:]
    for flag in ("--dataset", "--nproc"):
        if flag in words:
            position = words.index(flag)
            del words[position : position + 2]
    return words


def row(tree: Path, words: list[str]) -> dict[str, Any]:
    """Return throughput, memory and losses of one run."""
    started = time.monotonic()
    found = meshwright(tree, ["bench", *words])
    kept = {key: found[key] for key in ("losses", "tokens_per_s_per_gpu", "mfu", "memory_gib", "error") if key in found}
    return kept | {"wall_s": round(time.monotonic() - started, 1)}


def main() -> None:
    """Run every case in both trees, print one line each and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--models", nargs="*", default=[model for model, _ in CASES])
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU, to test this script")
    options = parser.parse_args()
    chosen = [case for case in CASES if case[0] in options.models]
    size = (f"train.steps={options.steps}", f"train.global_batch_size={options.batch}", *(TINY if options.cpu else ()))
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "rows": [],
    }
    for model, goal in chosen:
        words = recommended(options.after, model, goal)
        variants = {"eager": (), "compiled": FAST} if model == "llama32-1b" else {"eager": ()}
        for variant, more in variants.items():
            arguments = [*words, *more, *size]
            pair = {name: row(getattr(options, name), arguments) for name in ("before", "after")}
            command = shlex.join(["meshwright", "bench", *arguments])
            result["rows"].append({"model": model, "goal": goal, "variant": variant, "command": command, **pair})
            print(model, goal, variant, summary(pair), flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


def summary(pair: dict[str, dict[str, Any]]) -> str:
    """Format both runs in one line."""
    speeds = " → ".join(f"{one.get('tokens_per_s_per_gpu') or 0:,.0f}" for one in pair.values())
    peaks = " → ".join(f"{one.get('memory_gib', {}).get('peak', 0):.3f}" for one in pair.values())
    losses = " → ".join(f"{one['losses'][-1]:.5f}" if one.get("losses") else "-" for one in pair.values())
    errors = "".join(f"\n{name}: {one['error']}" for name, one in pair.items() if "error" in one)
    return f"tokens/s {speeds}; peak GiB {peaks}; last loss {losses}{errors}"


if __name__ == "__main__":
    main()

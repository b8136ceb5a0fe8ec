"""Measure the CPU time of CLI commands (whole process, best and median of several runs): a table and a JSON file.

make bench
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median

RUNS = 7
LIMIT_S = 0.4
COMMANDS = {
    "python alone": [sys.executable, "-c", "pass"],
    "import meshwright": [sys.executable, "-c", "import meshwright"],
    "recommend llama3-8b 8xH100 sft": ["recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft"],
    "recommend … --json": ["recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--json"],
    "recommend deepseek-v3 1024xH100": ["recommend", "deepseek-v3", "--gpus", "1024xH100", "--goal", "pretrain"],
    "recommend kimi-k2 1024xGB200": ["recommend", "kimi-k2", "--gpus", "1024xGB200", "--goal", "pretrain", "--json"],
    "recommend … --explain": ["recommend", "llama3-70b", "--gpus", "64xH100", "--goal", "pretrain", "--explain"],
    "check llama3_70b_pretrain_config": ["check", "llama3_70b_pretrain_config"],
    "recipes (index of all)": ["recipes", "--json"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """Return user plus system seconds of one run of a command."""
    command = arguments if arguments[0] == sys.executable else [sys.executable, "-m", "meshwright", *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print and save the table; return 1 if `recommend` exceeds its limit."""
    rows = {}
    for name, arguments in COMMANDS.items():
        times = [cpu_seconds(arguments) for _ in range(RUNS)]
        rows[name] = {"best_s": round(min(times), 3), "median_s": round(median(times), 3)}
        print(f"{name:<36} best {rows[name]['best_s']:.3f} s   median {rows[name]['median_s']:.3f} s")
    result = {
        "date": date.today().isoformat(),
        "command": "make bench",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "runs": RUNS,
        "cpu_seconds": rows,
    }
    out = Path(__file__).parent / "results" / "adviser_speed.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if rows["recommend llama3-8b 8xH100 sft"]["median_s"] < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())

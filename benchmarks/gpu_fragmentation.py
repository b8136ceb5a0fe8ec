"""Find what keeps reserved GPU memory above allocated memory: bench runs under different allocator settings.

    python benchmarks/gpu_fragmentation.py --minutes 8.5 --out FILE [--case 'qwen3_4b sft 4096 4']...   (on a GPU)

Every setting runs each case (in the words of calibration_set.py) in a process of its own. A thread reads the
allocator's counters every few milliseconds; whenever reserved memory grows after the first step, it takes a snapshot.
The report has, for each setting, the peaks of allocated and reserved memory, the part of the step in which reserved
memory last grew, free bytes by stream, and the free blocks between tensors by the code that allocated the tensor
behind the hole: what keeps it from being reused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import calibration_set

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_fragmentation.json"
CASES = ("qwen3_4b sft 4096 4", "olmoe_7b pretrain 4096 2", "llama32_1b pretrain 4096 8")
STEPS = 5
TICK_S = 0.004
GROWTH = 64 * 2**20  # bytes of growth that are worth a snapshot
GIB = 2**30
SHOWN = 10
MARK = "FRAGMENTATION "
# name -> allocator settings, and whether FSDP on one rank has streams of its own
SETTINGS: dict[str, tuple[str, bool]] = {
    "one stream": ("expandable_segments:False", False),
    "FSDP's streams": ("expandable_segments:False", True),
    "expandable, one stream": ("expandable_segments:True", False),
    "expandable, FSDP's streams": ("expandable_segments:True", True),
}


# --- one run, in a child process -------------------------------------------------------------------------------------


class Sampler(threading.Thread):
    """Reads the allocator's counters while the main thread trains."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.part, self.step, self.ends = "build", 0, False
        self.allocated = self.reserved = 0
        self.growth: list[dict[str, Any]] = []
        self.holes: dict[str, Any] = {}

    def run(self) -> None:
        import torch

        seen = 0
        while not self.ends:
            time.sleep(TICK_S)
            if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                continue
            reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
            self.reserved, self.allocated = max(self.reserved, reserved), max(self.allocated, allocated)
            if reserved > seen + GROWTH:
                seen = reserved
                where = {"step": self.step, "part": self.part}
                self.growth.append({**where, "reserved": reserved / GIB, "allocated": allocated / GIB})
                if self.step > 1:
                    self.holes = {**where, **summary(torch.cuda.memory._snapshot()["segments"])}


def summary(segments: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return free GiB by stream, in all and between tensors, and the largest holes by the tensor behind them."""
    free: Counter[str] = Counter()
    used: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for segment in segments:
        stream = f"stream {segment['stream']}"
        blocks = segment["blocks"]
        for number, block in enumerate(blocks):
            if not block["state"].startswith("inactive"):
                used[stream] += block["size"]
                sizes[site(block)] += block["size"]
                continue
            free[stream] += block["size"]
            following = next((one for one in blocks[number + 1 :] if not one["state"].startswith("inactive")), None)
            behind[site(following) if following else "end of its segment"] += block["size"]
    return {
        "free_gib": _gib(free),
        "used_gib": _gib(used),
        "holes_before_gib": _gib(behind),
        "largest_owners_gib": _gib(sizes),
    }


def site(block: Mapping[str, Any]) -> str:
    """Return the innermost line of our code, or of a model's or compiled code, that allocated a block."""
    places = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in block.get("frames", ())]
    for marks in (("meshwright/",), ("torchinductor", "transformers/"), ("_composable/fsdp", "fsdp/"), ("torch/",)):
        for place in places:
            if any(mark in place for mark in marks):
                kept = next(mark for mark in marks if mark in place)
                return place[place.rfind(kept) :][:90]
    return places[0][-90:] if places else "unknown"


def _gib(counts: Counter[str]) -> dict[str, float]:
    return {name: round(size / GIB, 2) for name, size in counts.most_common(SHOWN) if size > GIB // 50}


def child(case: str, streams: bool, smoke: bool) -> None:
    """Run one case as `bench` with the sampler beside it, and print what was found."""
    import torch

    from meshwright.cli.run import run
    from meshwright.engine import worker
    from meshwright.engine.parallelize import fsdp

    sampler = Sampler()
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1)
        sampler.start()
    if streams:
        fsdp.use_one_stream = lambda stage: None
    part, step = worker._Run.part, worker._Run.step

    def watched_part(self: Any, name: str) -> Any:
        sampler.part = name
        return part(self, name)

    def watched_step(self: Any, number: int) -> None:
        sampler.step = number + 1
        step(self, number)

    worker._Run.part, worker._Run.step = watched_part, watched_step  # type: ignore[method-assign]
    words = [word for word in calibration_set.bench_words(case) if not word.startswith("train.steps")]
    if smoke:
        words = [word for word in words if not word.startswith(("kernels.compile", "data.seq_length"))]
        words += ["--tiny", "kernels.compile=false", "data.seq_length=64"]
    sys.argv = ["meshwright", "bench", *words, f"train.steps={STEPS}"]
    code: Any = 0
    try:
        run()
    except SystemExit as ended:
        code = ended.code
    sampler.ends = True
    found: dict[str, Any] = {"exit": code, "allocated_gib": sampler.allocated / GIB}
    found["reserved_gib"] = sampler.reserved / GIB
    if torch.cuda.is_available():
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    found |= {"growth": sampler.growth[-6:], "at_last_growth": sampler.holes}
    print("\n" + MARK + json.dumps(found), flush=True)


# --- the parent ------------------------------------------------------------------------------------------------------


def measured(case: str, name: str, limit_s: float, smoke: bool) -> dict[str, Any]:
    """Run a case under a setting and return its row."""
    conf, streams = SETTINGS[name]
    # torch 2.11 reads both names; the older one wins, so only one is set.
    env = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    env |= {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    words = [sys.executable, __file__, "--child", "--case", case, *(["--streams"] if streams else [])]
    words += ["--smoke"] if smoke else []
    row: dict[str, Any] = {"case": case, "setting": name}
    started = time.monotonic()
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, env=env, check=False)
    except subprocess.TimeoutExpired:
        return row | {"error": f"took longer than {limit_s:.0f} s"}
    wall = {"wall_s": round(time.monotonic() - started, 1)}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return row | wall | json.loads(line.removeprefix(MARK))
    return row | wall | {"error": done.stderr[-600:]}


def shown(row: Mapping[str, Any]) -> str:
    """Return a row as text: one line, and what lies around the holes."""
    if "error" in row:
        return f"FAILED {row['case']}, {row['setting']}: {row['error']}"
    ratio = row["reserved_gib"] / row["allocated_gib"] - 1 if row["allocated_gib"] else 0.0
    last = row["growth"][-1] if row["growth"] else {"step": 0, "part": "-"}
    lines = [
        f"{row['allocated_gib']:7.1f} {row['reserved_gib']:7.1f} {ratio:+6.1%}  last growth: step {last['step']} "
        f"{last['part']:<18} {row['case']}, {row['setting']}"
    ]
    holes = row["at_last_growth"]
    lines += [f"          free {holes['free_gib']}"] if holes else []
    lines += [
        f"          {size:6.2f} GiB free before {place}" for place, size in holes.get("holes_before_gib", {}).items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after this time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--case", action="append", help="in the words of calibration_set.py; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="tiny models on CPU: only tests this script")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--streams", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.case[0], args.streams, args.smoke)
        return 0
    end = time.monotonic() + 60 * args.minutes
    rows: list[dict[str, Any]] = []
    print("  alloc  reserv", flush=True)
    for case in args.case or CASES:
        for name in SETTINGS:
            left = end - time.monotonic()
            if left < 20.0:
                print(f"not run: {case}, {name}")
                continue
            rows.append(measured(case, name, min(180.0, left + 20.0), args.smoke))
            print(shown(rows[-1]), flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

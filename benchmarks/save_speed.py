"""Measure how long a step waits for a checkpoint: synchronous and asynchronous saves.

    python benchmarks/save_speed.py [--parameters 8.03e9] [--layers 32] [--out DIR] [--saves 2] [--json FILE]

Builds bf16 weights and optimizer state with fp32 master weights and moments (14 bytes per parameter) in the shape of a
model of that size, on the GPU if there is one, and saves them both ways. Blocked is the time until training can
continue; the device's time for the copy is reported separately, because an update has to wait for it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from meshwright.engine.checkpoint.files import total_size
from meshwright.engine.checkpoint.folder import Folder
from meshwright.engine.checkpoint.metadata import State, read_manifest
from meshwright.engine.checkpoint.save import Saver
from meshwright.engine.checkpoint.shards import Shard
from meshwright.engine.rank_env import Process
from meshwright.recipes.types import Checkpoint

DTYPES = {"model": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def state(parameters: float, layers: int, device: torch.device) -> list[Shard]:
    """Return tensors of a model of that size: seven matrices per layer, embedding and head (a tenth in total)."""
    shares = [0.05, 0.05] + [0.9 / layers / 7] * (7 * layers)
    found = []
    for number, share in enumerate(shares):
        rows = max(1, round(parameters * share / 4096))
        for name, dtype in DTYPES.items():
            tensor = torch.ones(rows, 4096, dtype=dtype, device=device)
            found.append(Shard(f"{name}/{number}", (rows, 4096), (0, 0), tensor))
    return found


class FixedSaver(Saver):
    """A saver of given shards."""

    def __init__(self, folder: Folder, shards: list[Shard], device: torch.device, settings: Checkpoint) -> None:
        trainer: Any = SimpleNamespace(device=device, stages=[], optimizer=SimpleNamespace(param_groups=[]))
        super().__init__(folder, trainer, Process(), settings)
        self.args = shards

    def _shards(self) -> list[Shard]:
        return self.args


def timed(saver: Saver, step: int, device: torch.device) -> dict[str, float]:
    """Return the seconds of a save until training can continue, until the state is copied, until it is on disk."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    saver.save(State(step, 0, 1, {}, {}, None, {}, None, 0, {}))
    blocked = time.perf_counter() - started
    saver.before_update()
    if device.type == "cuda":
        torch.cuda.synchronize()
    copied = time.perf_counter() - started
    saver.settle()
    return {"blocked_s": blocked, "copied_s": copied, "whole_s": time.perf_counter() - started}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=8.03e9)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--out", help="a folder on the disk to measure")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shards = state(args.parameters, args.layers, device)
    gib = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in shards) / 2**30
    out = Path(tempfile.mkdtemp(prefix="meshwright-save-", dir=args.out))
    rows: dict[str, Any] = {}
    for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
        folder = Folder(out / name)
        saver = FixedSaver(folder, shards, device, Checkpoint(async_save=asynchronous, keep=1))
        started = time.perf_counter()
        saver.prepare()
        rows[name] = {"prepare_s": time.perf_counter() - started}
        runs = [timed(saver, step, device) for step in range(1, args.saves + 1)]
        rows[name] |= {key: min(one[key] for one in runs) for key in runs[0]}
        rows[name]["gib"] = total_size(read_manifest(folder.step_path(args.saves)).files) / 2**30
        shutil.rmtree(out / name)
    shutil.rmtree(out)
    waits = rows["asynchronous"]["copied_s"] / rows["synchronous"]["blocked_s"]
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})"
    print(f"{args.parameters / 1e9:.2f} billion parameters, {gib:.1f} GiB on {where}")
    print(f"{'':14}{'blocked':>10}{'copied':>10}{'on disk':>10}{'prepared':>10}   seconds, best of {args.saves}")
    for name, row in rows.items():
        values = (row["blocked_s"], row["copied_s"], row["whole_s"], row["prepare_s"])
        print(f"{name:14}" + "".join(f"{value:10.3f}" for value in values))
    print(f"the copy takes {waits:.1%} of a synchronous save")
    result = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/save_speed.py", *sys.argv[1:]]),
        "device": where,
        "torch": torch.__version__,
        "gib": round(gib, 2),
        "copied_over_synchronous": round(waits, 4),
        **rows,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    else:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

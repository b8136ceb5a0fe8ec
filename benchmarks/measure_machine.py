"""Measure this machine's GPU and write one JSON file: matmuls, attention, memory, launches, optimizer.

python benchmarks/measure_machine.py OUT.json
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path

import torch

from meshwright.engine.measure import measure_all


def main(out: str) -> None:
    """Print each point as it is measured and save them all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points = []
    for point in measure_all(device):
        print(json.dumps(point), flush=True)
        points.append(point)
    result = {
        "date": date.today().isoformat(),
        "command": f"python benchmarks/measure_machine.py {Path(out).name}",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "points": points,
    }
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

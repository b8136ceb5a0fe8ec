"""Measures this machine's GPU for a calibration profile."""

from __future__ import annotations

import os
from datetime import date
from typing import Any

import torch

from meshwright.clusters import Gpu, gpu
from meshwright.costs.calibrate import MachineProfile, from_points
from meshwright.engine.measure import measure_all
from meshwright.errors import InputError


def measured() -> tuple[MachineProfile, list[dict[str, Any]]]:
    """Return the profile of this machine's GPU and its measured points; under torchrun, with collectives."""
    known = this_gpu()
    device = _join()
    points = list(measure_all(device))
    source = f"meshwright calibrate on {known.name}, torch {torch.__version__}, {date.today().isoformat()}"
    return from_points(points, known, source), points


def this_gpu() -> Gpu:
    """Return the catalog entry of this machine's GPU."""
    if not torch.cuda.is_available():
        raise InputError(
            "no GPU was found to measure",
            field="calibrate",
            fix=("run it on the machine that trains", "meshwright calibrate RUNS.csv"),
        )
    return gpu(torch.cuda.get_device_name())


def _join() -> torch.device:
    """Return this rank's GPU; joins a process group if there are several ranks."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("nccl")
    return device

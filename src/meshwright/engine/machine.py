"""This machine's GPU: found, measured and described as a calibration profile."""

from __future__ import annotations

import os
from datetime import date
from typing import Any

import torch

from meshwright.clusters import Gpu, gpu
from meshwright.costs.calibrate import OwnProfile, from_points
from meshwright.engine.measure import measure_all
from meshwright.errors import InputError


def measured() -> tuple[OwnProfile, list[dict[str, Any]]]:
    """The profile of this machine's GPU and the points behind it; with collectives when torchrun started several."""
    known = this_gpu()
    device = _join()
    points = list(measure_all(device))
    source = f"meshwright calibrate on {known.name}, torch {torch.__version__}, {date.today().isoformat()}"
    return from_points(points, known, source), points


def this_gpu() -> Gpu:
    """The catalogue entry of the GPU in this machine."""
    if not torch.cuda.is_available():
        raise InputError(
            "no GPU was found to measure",
            field="calibrate",
            fix=("run it on the machine that trains", "meshwright calibrate RUNS.csv"),
        )
    return gpu(torch.cuda.get_device_name())


def _join() -> torch.device:
    """The rank's own GPU, in a process group when several ranks were started."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("nccl")
    return device

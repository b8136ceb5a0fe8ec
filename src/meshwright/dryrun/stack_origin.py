"""Which line of code made a block of memory, and what kind of memory that makes it."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch


class Origin(NamedTuple):
    """Where a block of memory comes from."""

    part: str
    source: str
    recomputing: bool  # whether the forward pass is being run again


# What memory is that was made below a file, the innermost first; the rest is activations.
PARTS_BY_FILE = (
    ("torch/distributed/fsdp/", "buffers"),
    ("torch/distributed/pipelining/", "buffers"),
    ("meshwright/engine/losses.py", "logits"),
    ("meshwright/engine/kernels/cross_entropy.py", "logits"),
    ("meshwright/engine/parallelize/lm_loss.py", "logits"),
    ("meshwright/engine/optimizers/", "buffers"),
    ("meshwright/engine/gradients.py", "buffers"),
    ("meshwright/engine/kernels/optimizer_kernels.py", "buffers"),
)
PASSED_OVER = (
    "torch/",
    "meshwright/dryrun/",
    "meshwright/engine/kernels/device_caps.py",
    "contextlib.py",
    "functools.py",
)
# What stands before the part of a path that is told; Python's own files are below its library.
ROOTS = (sysconfig.get_path("stdlib") + "/", "site-packages/", "dist-packages/", "/src/")
RECOMPUTE = "torch/utils/checkpoint.py"
BACKWARD = "torch/autograd/graph.py"
DEEPEST = 80  # frames looked at


class _Place(NamedTuple):
    path: str
    name: str
    part: str | None  # None where the frames around it decide
    shown: bool


@cache
def _place(code: CodeType) -> _Place:
    path = Path(code.co_filename).as_posix()
    for root in ROOTS:
        path = path.rpartition(root)[2] if root in path else path
    part = next((part for start, part in PARTS_BY_FILE if path.startswith(start)), None)
    shown = part is not None or not path.startswith(PASSED_OVER)
    return _Place(path, code.co_qualname, part, shown)


def origin_of(frame: FrameType | None) -> Origin:
    """The innermost line outside torch that is at work; in torch's own backward pass, the operation it is of."""
    source, part, depth = "", None, 0
    recomputing = False
    while frame is not None and depth < DEEPEST:
        place = _place(frame.f_code)
        if place.shown and not source:
            source = f"{place.path}:{frame.f_lineno} in {place.name}"
            part = place.part
        if place.path == RECOMPUTE:
            recomputing = recomputing or "recompute" in place.name or "unpack" in place.name
        if place.path == BACKWARD:
            if not source:
                node = torch._C._current_autograd_node()
                source = f"backward of {node.name().removesuffix('Backward0') if node is not None else 'the step'}"
            break
        frame, depth = frame.f_back, depth + 1
    return Origin(part or "activations", source or "torch", recomputing)

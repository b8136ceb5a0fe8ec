"""Finds the line of code that allocated a block, and the part of memory it belongs to."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch


class Origin(NamedTuple):
    """Where an allocation comes from."""

    part: str
    source: str
    recomputing: bool  # whether activation recomputation is running


# The part of memory that code in a file allocates, innermost frame first; the rest is activations.
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
HIDDEN = ("torch/", "meshwright/dryrun/", "meshwright/engine/kernels/device_caps.py", "contextlib.py", "functools.py")
# Path prefixes to strip; Python's own files are below its library.
ROOTS = (sysconfig.get_path("stdlib") + "/", "site-packages/", "dist-packages/", "/src/")
RECOMPUTE = "torch/utils/checkpoint.py"
BACKWARD = "torch/autograd/graph.py"
MAX_FRAMES = 80  # frames


class _CodeLocation(NamedTuple):
    path: str
    name: str
    part: str | None  # None if the enclosing frames decide
    shown: bool


@cache
def _location(code: CodeType) -> _CodeLocation:
    path = Path(code.co_filename).as_posix()
    for root in ROOTS:
        path = path.rpartition(root)[2] if root in path else path
    part = next((part for start, part in PARTS_BY_FILE if path.startswith(start)), None)
    shown = part is not None or not path.startswith(HIDDEN)
    return _CodeLocation(path, code.co_qualname, part, shown)


def origin_of(frame: FrameType | None) -> Origin:
    """Return the innermost line outside torch; in autograd's backward pass, the operation it differentiates."""
    source, part, depth = "", None, 0
    recomputing = False
    while frame is not None and depth < MAX_FRAMES:
        location = _location(frame.f_code)
        if location.shown and not source:
            source = f"{location.path}:{frame.f_lineno} in {location.name}"
            part = location.part
        if location.path == RECOMPUTE:
            recomputing = recomputing or "recompute" in location.name or "unpack" in location.name
        if location.path == BACKWARD:
            if not source:
                node = torch._C._current_autograd_node()
                source = f"backward of {node.name().removesuffix('Backward0') if node is not None else 'the step'}"
            break
        frame, depth = frame.f_back, depth + 1
    return Origin(part or "activations", source or "torch", recomputing)

"""Where a tensor lies, what that device can do, and whether there is anything in the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

DRY = "drygpu"  # the device of a dry run: a GPU without memory
CPU = (0, 0)  # pretended in place of a GPU's: a device that computes as a CPU does


@dataclass
class FakeGpu:
    """What the pretended device can compute. No context variable: a compiler cannot look into those."""

    capability: tuple[int, int] = (9, 0)


FAKE_GPU = FakeGpu()

# Operations of our own that make memory in between, and what they do; a dry run carries it out one by one.
STEPS: dict[Any, Callable[..., Any]] = {}


def is_gpu(device: torch.device | str) -> bool:
    """Whether a device is a GPU, be it one that a dry run pretends."""
    return _computes_as_gpu(torch.device(device).type)


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor lies on a GPU, be it one that a dry run pretends."""
    return _computes_as_gpu(tensor.device.type)


def _computes_as_gpu(kind: str) -> bool:
    return kind == "cuda" or (kind == DRY and FAKE_GPU.capability != CPU)


def is_dry(tensor: Tensor) -> bool:
    """Whether a tensor lies on the device that a dry run pretends."""
    return tensor.device.type == DRY


def has_data(tensor: Tensor) -> bool:
    """Whether there are numbers in a tensor: not on the meta device, nor in a dry run, be it of the host's memory."""
    return not (tensor.is_meta or is_dry(tensor) or isinstance(tensor, FakeTensor))


def capability(device: torch.device | str | None = None) -> tuple[int, int]:
    """What a GPU can compute, by NVIDIA's numbers."""
    if device is not None and torch.device(device).type == DRY:
        return FAKE_GPU.capability
    return torch.cuda.get_device_capability(device)


def launch(program: str, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Runs one of our Triton programs; in a dry run there is nothing to run it on."""
    if any(is_dry(arg) for arg in args if isinstance(arg, Tensor)):
        return
    from meshwright.engine.kernels import _triton

    getattr(_triton, program)[grid](*args, **settings)


def outputs_alone(function: Callable[..., Any], *args: Any) -> Any:
    """What a function gives when it runs as one kernel, in a dry run: its outputs and nothing in between."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    shapes = function(*tree_map_only(Tensor, lambda one: torch.empty_like(one, device="meta"), args))
    return tree_map_only(Tensor, lambda one: torch.empty_like(one, device=device), shapes)

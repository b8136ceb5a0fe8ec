"""Device capabilities: real GPUs, the simulated GPU of a dry run, and tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

DRY = "drygpu"  # the device of a dry run: a GPU without memory
CPU = (0, 0)  # capability of a simulated device that computes like a CPU


@dataclass
class FakeGpu:
    """Compute capability of the simulated device. Not a context variable: torch.compile cannot trace those."""

    capability: tuple[int, int] = (9, 0)


FAKE_GPU = FakeGpu()

# Decompositions of our custom ops: a dry run runs them, to see the memory of intermediate tensors.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}


def is_gpu(device: torch.device | str) -> bool:
    """Return whether a device is a GPU, real or simulated."""
    return _computes_as_gpu(torch.device(device).type)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU, real or simulated."""
    return _computes_as_gpu(tensor.device.type)


def _computes_as_gpu(device_type: str) -> bool:
    return device_type == "cuda" or (device_type == DRY and FAKE_GPU.capability != CPU)


def is_dry(tensor: Tensor) -> bool:
    """Return whether a tensor is on the simulated device of a dry run."""
    return tensor.device.type == DRY


def has_data(tensor: Tensor) -> bool:
    """Return whether a tensor has data: not on the meta device, nor in a dry run, also of host memory."""
    return not (tensor.is_meta or is_dry(tensor) or isinstance(tensor, FakeTensor))


def capability(device: torch.device | str | None = None) -> tuple[int, int]:
    """Return the CUDA compute capability of a device."""
    if device is not None and torch.device(device).type == DRY:
        return FAKE_GPU.capability
    return torch.cuda.get_device_capability(device)


def launch(program: str, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch one of our Triton kernels, of `_triton` or as "module.kernel"; does nothing in a dry run."""
    if any(is_dry(arg) for arg in args if isinstance(arg, Tensor)):
        return
    module, _, name = program.rpartition(".")
    getattr(import_module(f"meshwright.engine.kernels.{module or '_triton'}"), name)[grid](*args, **settings)


def outputs_only(function: Callable[..., Any], *args: Any) -> Any:
    """Return empty outputs of a function in a dry run, as if it ran as one kernel without intermediates."""
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    shapes = function(*tree_map_only(Tensor, lambda one: torch.empty_like(one, device="meta"), args))
    return tree_map_only(Tensor, lambda one: torch.empty_like(one, device=device), shapes)

"""Measures a rank's memory by part, for comparison with the estimate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

GIB = 1024**3


class MemoryParts(msgspec.Struct, frozen=True):
    """GiB on one rank; weights, gradients, optimizer and other sum to the peak."""

    weights: float
    gradients: float
    optimizer: float
    other: float  # activations and buffers on a GPU; the rest of the process on a CPU
    peak: float  # most allocated bytes (GPU), or the largest resident size (CPU)
    reserved: float  # by the caching allocator (GPU), or the current resident size (CPU)

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "other")}


def memory_parts(
    parameters: Iterable[torch.Tensor],
    gradients: Iterable[torch.Tensor | None],
    optimizer_state: Iterable[torch.Tensor],
    device: torch.device,
    gradients_gib: float | None = None,
) -> MemoryParts:
    """Return the memory of this rank's weights, gradients and optimizer state on the device, and the peak.

    Tensors that share a storage count once; tensors on another device (offloaded to the host) do not count.
    `gradients_gib` is their size at the peak, measured earlier in the step: there are none between steps.
    """
    seen: set[int] = set()
    weights, grads, state = (_gib(tensors, device, seen) for tensors in (parameters, gradients, optimizer_state))
    grads = grads if gradients_gib is None else gradients_gib
    return with_peak(MemoryParts(weights, grads, state, 0.0, 0.0, 0.0), device)


def with_peak(parts: MemoryParts, device: torch.device) -> MemoryParts:
    """Return the same weights, gradients and optimizer state with the peak and the reserved memory of now."""
    peak, reserved = _cuda_gib(device) if device.type == "cuda" else resident_gib()
    other = max(0.0, peak - parts.weights - parts.gradients - parts.optimizer)
    return msgspec.structs.replace(parts, other=other, peak=peak, reserved=reserved)


def optimizer_tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's `state` at any nesting depth."""
    import torch

    found: list[torch.Tensor] = []
    rest: list[Any] = list(state.values())
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            rest.extend(value.values())
        elif isinstance(value, list | tuple):
            rest.extend(value)
    return found


def compare_with_estimate(
    measured: MemoryParts, estimate_gib: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """Return each part as measured and as estimated; the estimate's finer parts are summed as `other`."""
    known = {name: estimate_gib.get(name) for name in ("weights", "gradients", "optimizer")}
    rest = [estimate_gib[name] for name in ("activations", "logits", "buffers") if name in estimate_gib]
    known["other"] = sum(rest) if rest else None
    known["peak"] = estimated_peak(estimate_gib)
    values = {**measured.parts, "peak": measured.peak}
    return {name: {"measured": values[name], "estimate": known[name]} for name in values}


def estimated_peak(estimate_gib: Mapping[str, float]) -> float | None:
    """Return the estimated peak as torch reports it: without CUDA context and communicators."""
    return estimate_gib["total"] - estimate_gib.get("overhead", 0.0) if "total" in estimate_gib else None


def resident_gib() -> tuple[float, float]:
    """Return the largest and the current resident size of this process."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return max(peak, now) / GIB, now / GIB


def _cuda_gib(device: torch.device) -> tuple[float, float]:
    import torch

    return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB


def _gib(tensors: Iterable[torch.Tensor | None], device: torch.device, seen: set[int]) -> float:
    total = 0
    for tensor in tensors:
        local = _local(tensor)
        if local is None or local.device.type != device.type:
            continue
        storage = local.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total / GIB


def _local(tensor: Any) -> torch.Tensor | None:
    """Return this rank's shard of a tensor."""
    if tensor is None:
        return None
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local

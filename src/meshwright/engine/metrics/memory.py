"""What the memory of a rank holds, beside what was estimated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

GIB = 1024**3


class MemoryParts(msgspec.Struct, frozen=True):
    """GiB on one rank; weights, gradients, optimizer and other add up to the peak."""

    weights: float
    gradients: float
    optimizer: float
    other: float  # activations and buffers on a GPU; the rest of the process on a CPU
    peak: float  # most that was allocated at once (GPU), or the largest resident size (CPU)
    reserved: float  # what the allocator holds (GPU), or the present resident size (CPU)

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "other")}


def memory_parts(
    parameters: Iterable[torch.Tensor],
    gradients: Iterable[torch.Tensor | None],
    optimizer_state: Iterable[torch.Tensor],
    device: torch.device,
) -> MemoryParts:
    """What the weights, gradients and optimizer state of this rank take on the device, and the peak of all together.

    Tensors that share a storage count once, those kept elsewhere (offloaded to the host) not at all.
    """
    seen: set[int] = set()
    weights, grads, state = (_gib(tensors, device, seen) for tensors in (parameters, gradients, optimizer_state))
    peak, reserved = _cuda_gib(device) if device.type == "cuda" else resident_gib()
    other = max(0.0, peak - weights - grads - state)
    return MemoryParts(weights, grads, state, other, peak, reserved)


def optimizer_tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """The tensors of an optimizer's `state`, however deep they lie."""
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


def beside_estimate(measured: MemoryParts, estimate_gib: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Each part as measured and as estimated; what the estimate tells apart beyond our parts is `other` there."""
    known = {name: estimate_gib.get(name) for name in ("weights", "gradients", "optimizer")}
    rest = [estimate_gib[name] for name in ("activations", "logits", "buffers") if name in estimate_gib]
    known["other"] = sum(rest) if rest else None
    known["peak"] = estimated_peak(estimate_gib)
    values = {**measured.parts, "peak": measured.peak}
    return {name: {"measured": values[name], "estimate": known[name]} for name in values}


def estimated_peak(estimate_gib: Mapping[str, float]) -> float | None:
    """What torch would report as the most it allocated; CUDA context and communicators are not torch's."""
    return estimate_gib["total"] - estimate_gib.get("overhead", 0.0) if "total" in estimate_gib else None


def resident_gib() -> tuple[float, float]:
    """Largest and present resident size of this process."""
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
    """This rank's part of a tensor that is cut over ranks."""
    if tensor is None:
        return None
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local

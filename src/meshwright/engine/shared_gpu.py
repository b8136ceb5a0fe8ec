"""Several ranks on one GPU: the backend they need, the memory each may take, and sends through host memory.

NCCL refuses two ranks on a GPU. Gloo has collectives of CUDA tensors, which it copies through host memory, but its send
and receive abort the process on them: those tensors are copied to the host here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from meshwright.engine.rank_env import Process
from meshwright.errors import InputError

if TYPE_CHECKING:
    import torch

CONTEXT_GIB = 1.0  # of every process on a GPU, outside torch's allocator


def ranks_per_gpu(process: Process, gpus: int) -> int:
    """Return how many ranks of this machine share a GPU; 1 if the launcher gave each rank its own."""
    bound = process.how == "slurm" and gpus == 1  # each task sees its own GPU only
    return 1 if bound or gpus < 1 else math.ceil(process.local_world / gpus)


def choose_backend(process: Process, device_type: str, gpus: int) -> Literal["gloo", "nccl"]:
    """Return the process group's backend: NCCL on GPUs, gloo on CPUs and where ranks outnumber the GPUs."""
    if device_type == "cpu":
        if process.backend == "nccl":
            raise InputError(
                "NCCL needs a GPU for every rank; these ranks train on CPU",
                field="--backend",
                value="nccl",
                fix=("--backend gloo",),
            )
        return "gloo"
    shared = ranks_per_gpu(process, gpus) > 1
    if process.backend == "nccl" and shared:
        raise InputError(
            f"NCCL needs a GPU for every rank; this machine has {gpus} for {process.local_world} ranks",
            field="--backend",
            value="nccl",
            fix=("--backend gloo", f"--nproc {gpus}"),
        )
    return "gloo" if shared or process.backend == "gloo" else "nccl"


def limit_memory(process: Process, gpus: int) -> None:
    """Limit this rank's allocator to its part of a shared GPU, so that one rank cannot take that of the others."""
    import torch

    ranks = ranks_per_gpu(process, gpus)
    if ranks > 1:
        total = torch.cuda.get_device_properties(process.device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, 1 / ranks - CONTEXT_GIB * 2**30 / total), process.device)


def describe(process: Process) -> str:
    """Return what a user must know of a run whose ranks share GPUs, or use gloo by choice; empty for others."""
    import torch

    if process.device.type == "cpu":
        return ""
    gpus = torch.cuda.device_count()
    host = "collectives use gloo and go through host memory: a trial of the layout, not its speed"
    if ranks_per_gpu(process, gpus) > 1:
        return f"{process.local_world} ranks share {gpus} GPU{'s' * (gpus > 1)}; {host}"
    return f"--backend gloo: {host}" if process.backend == "gloo" and process.world > 1 else ""


def sends_through_host(device_type: str, group: Any) -> bool:
    """Return whether tensors of a device must be copied to the host to be sent in this group."""
    import torch.distributed as dist

    return device_type == "cuda" and group is not None and "gloo" in str(dist.get_backend(group))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, complete when this returns."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())

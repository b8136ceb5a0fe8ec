"""Joins and leaves the process group of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meshwright.engine.allocator_settings import use_expandable_segments
from meshwright.engine.faults import within
from meshwright.engine.rank_env import Process
from meshwright.engine.shared_gpu import choose_backend, limit_memory
from meshwright.errors import InputError

if TYPE_CHECKING:
    import torch

COLLECTIVE_TIMEOUT_S = 1800.0
ABORT_S = 10.0


@contextmanager
def join(process: Process, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Iterator[Process]:
    """Initialize the process group for the block and destroy it afterwards.

    If the block raises, the group is aborted without waiting for the other ranks.
    """
    import torch.distributed as dist

    device, backend = _set_device(process)
    before = sys.excepthook  # torch's prints tracebacks with a rank, also those of a program that goes on afterwards
    dist.init_process_group(
        backend,
        rank=process.rank,
        world_size=process.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
        **_rendezvous(process),
    )
    try:
        yield process
        if process.world > 1:
            dist.barrier()  # the rank that hosts the store must leave last
    except BaseException:
        within(ABORT_S, _abort)
        raise
    else:
        dist.destroy_process_group()
    finally:
        sys.excepthook = before


def _set_device(process: Process) -> tuple[torch.device, str]:
    """Make this rank's GPU the current one; return the device and the backend of the process group."""
    import torch

    device = process.device
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    backend = choose_backend(process, device.type, count)
    if device.type == "cpu":
        return device, backend
    if process.gpu >= count and (count == 0 or backend == "nccl"):
        raise InputError(
            f"rank {process.rank} needs GPU {process.gpu}; this machine has {count}",
            field="--nproc" if process.how == "nproc" else "LOCAL_RANK",
            value=process.local_world if process.how == "nproc" else process.local_rank,
            fix=(f"start {count} ranks per machine",) if count else ("run on a machine with GPUs",),
        )
    use_expandable_segments()
    torch.cuda.set_device(device)
    limit_memory(process, count)
    return device, backend


def _rendezvous(process: Process) -> dict[str, Any]:
    """Return the store or address through which the ranks find each other; a single rank needs no port."""
    import torch.distributed as dist

    if process.how == "nproc":
        return {"store": dist.FileStore(str(process.store), process.world)}  # type: ignore[attr-defined]  # not in torch's stubs
    if process.world == 1:
        return {"store": dist.HashStore()}  # type: ignore[attr-defined]  # not in torch's stubs
    if process.how == "torchrun":
        return {"store": _torchrun_store(process)}
    return {"init_method": f"tcp://{process.master_address}:{process.master_port}"}


def _torchrun_store(process: Process) -> Any:
    """Return torchrun's store with a prefix per restart, so that keys of earlier attempts are not seen."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", process.rank, process.world))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]  # not in torch's stubs


def _abort() -> None:
    """Leave the process group without waiting for collectives that will never finish."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()

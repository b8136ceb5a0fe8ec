"""The rank of this process, read from the environment variables of torchrun or SLURM.

Torch is imported only where a device is needed: `--nproc` sets variables that torch reads on import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.choices import Backend
from meshwright.errors import InputError

if TYPE_CHECKING:
    import torch

Launcher = Literal["alone", "nproc", "torchrun", "slurm"]
DeviceType = Literal["auto", "cuda", "cpu"]

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# srun numbers its steps from 0; the batch script, interactive shells and the like have special numbers from here.
FIRST_SPECIAL_STEP = 0xFFFFFFFA
# Below the ephemeral ports of Linux (32768 and up), which another process may hold.
PORTS = range(20_000, 32_000)
STEPS_PER_JOB = 16  # concurrent steps of one job get different ports


@dataclass(frozen=True)
class Process:
    """One rank of a run: its number, its device, and how it reaches the other ranks."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    how: Launcher = "alone"
    master_address: str = ""
    master_port: int = 0
    gpu: int = 0  # index of this rank's GPU among the visible ones
    device_type: DeviceType = "auto"  # auto: the GPU if there is one
    backend: Backend = "auto"  # auto: NCCL, or gloo on CPUs and where ranks outnumber the GPUs
    folder: str = ""  # of --nproc: holds the store file and the exit reasons of ranks

    @property
    def device(self) -> torch.device:
        """The torch device of this rank."""
        import torch

        wants_cpu = self.device_type == "cpu" or (self.device_type == "auto" and not torch.cuda.is_available())
        # Ranks that outnumber the GPUs share them in turn.
        return torch.device("cpu") if wants_cpu else torch.device("cuda", self.gpu % max(1, torch.cuda.device_count()))

    @property
    def store(self) -> Path:
        """The file of the FileStore through which ranks of --nproc find each other."""
        return Path(self.folder) / "store"

    @property
    def exit_reason(self) -> Path:
        """The file to which a rank of --nproc writes why it exits, when it cannot send a message."""
        return Path(self.folder) / f"exit_reason_{self.rank}"


def detect(env: Mapping[str, str] = os.environ) -> Process | None:
    """Return this process as a rank of torchrun or SLURM; None if neither started it."""
    if any(name in env for name in TORCHRUN_VARIABLES):
        return _validated(_from_torchrun(env))
    if _is_slurm_task(env):
        return _validated(_from_slurm(env))
    return None


def _from_torchrun(env: Mapping[str, str]) -> Process:
    unset = tuple(f"unset {name}" for name in TORCHRUN_VARIABLES if name in env)
    rank, world = _number(env, "RANK", fix=unset), _number(env, "WORLD_SIZE", least=1, fix=unset)
    alone_here = "LOCAL_RANK=0 with one process per machine"
    local_rank = _number(env, "LOCAL_RANK", fix=("start the run with torchrun", alone_here))
    return Process(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=_number(env, "LOCAL_WORLD_SIZE", least=1, default=local_rank + 1 if world > 1 else 1),
        how="torchrun",
        master_address=_master_address(env) if world > 1 else env.get("MASTER_ADDR", ""),
        master_port=_number(env, "MASTER_PORT", least=1, default=None if world > 1 else 0),
        gpu=local_rank,
    )


def _master_address(env: Mapping[str, str]) -> str:
    if address := env.get("MASTER_ADDR", "").strip():
        return address
    raise InputError(
        "is not set, so the ranks cannot find each other",
        field="MASTER_ADDR",
        fix=("start the run with torchrun", "MASTER_ADDR=the host name of rank 0"),
    )


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process; the batch script and interactive shells have SLURM's variables too."""
    if not all(env.get(name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")):
        return False
    return _number(env, "SLURM_STEP_ID") < FIRST_SPECIAL_STEP


def _from_slurm(env: Mapping[str, str]) -> Process:
    world, local_rank = _number(env, "SLURM_NTASKS", least=1), _number(env, "SLURM_LOCALID", default=0)
    visible = [one for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return Process(
        rank=_number(env, "SLURM_PROCID"),
        world=world,
        local_rank=local_rank,
        local_world=_tasks_here(env, world),
        how="slurm",
        master_address=env.get("MASTER_ADDR", "").strip() or _first_slurm_host(env, world),
        master_port=_number(env, "MASTER_PORT", least=1, default=_slurm_port(env)),
        gpu=0 if len(visible) == 1 else local_rank,  # one visible: SLURM bound a GPU to each task
    )


def _tasks_here(env: Mapping[str, str], world: int) -> int:
    """Return the tasks on this node: `SLURM_NTASKS_PER_NODE=4`, or this node's entry of a list like `4(x2),3`."""
    if env.get("SLURM_NTASKS_PER_NODE"):
        return min(_number(env, "SLURM_NTASKS_PER_NODE", least=1), world)
    name = "SLURM_STEP_TASKS_PER_NODE" if env.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    text, node = env.get(name, ""), _number(env, "SLURM_NODEID", default=0)
    for entry in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if found is None:
            raise InputError("is not a list of tasks per node such as 4(x2),3", field=name, value=text)
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1])
    return _number(env, "SLURM_LOCALID", default=0) + 1 if world > 1 else 1


def _first_slurm_host(env: Mapping[str, str], world: int) -> str:
    if world == 1:
        return ""  # no other ranks
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if text := env.get(name, "").strip():
            return next(hosts(text, name))
    raise InputError(
        "is not set, so the ranks cannot find each other",
        field="SLURM_JOB_NODELIST",
        fix=("start the run with srun", "MASTER_ADDR=the host name of rank 0"),
    )


def _slurm_port(env: Mapping[str, str]) -> int:
    """Return a port that is equal on all ranks of a step and differs from most other steps."""
    job = _number(env, "SLURM_JOB_ID", default=_number(env, "SLURM_JOBID", default=0))
    return PORTS[(job * STEPS_PER_JOB + _number(env, "SLURM_STEP_ID", default=0)) % len(PORTS)]


def hosts(nodelist: str, field: str = "SLURM_JOB_NODELIST") -> Iterator[str]:
    """Yield the host names of a SLURM node list in order: `gpu[01-03,07],login` → gpu01, gpu02, gpu03, gpu07, login."""
    entries = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if not entries or ",".join(entries) != nodelist:
        raise _bad_nodelist(nodelist, field)
    for entry in entries:
        yield from _expanded(entry.strip(), nodelist, field)


def _expanded(entry: str, nodelist: str, field: str) -> Iterator[str]:
    """Yield the hosts of one entry; with several brackets, the last one varies fastest."""
    opened = entry.find("[")
    if opened < 0:
        if not entry:
            raise _bad_nodelist(nodelist, field)
        yield entry
        return
    closed = entry.index("]", opened)
    for number in _numbers(entry[opened + 1 : closed], nodelist, field):
        rest = entry[closed + 1 :]
        for tail in _expanded(rest, nodelist, field) if rest else [""]:
            yield entry[:opened] + number + tail


def _numbers(ranges: str, nodelist: str, field: str) -> Iterator[str]:
    """Expand `01-03,07` to 01, 02, 03, 07; a range keeps the width of its first number."""
    for one in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", one.strip(), re.ASCII)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise _bad_nodelist(nodelist, field)
        first, last = found[1], found[2] or found[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _bad_nodelist(nodelist: str, field: str) -> InputError:
    return InputError("is not a SLURM node list such as gpu[01-03,07]", field=field, value=nodelist)


def _validated(process: Process) -> Process:
    """Return the process; raise InputError if its rank and world numbers contradict each other."""
    slurm = process.how == "slurm"
    pairs = (
        ("SLURM_PROCID" if slurm else "RANK", process.rank, "SLURM_NTASKS" if slurm else "WORLD_SIZE", process.world),
        (
            "SLURM_LOCALID" if slurm else "LOCAL_RANK",
            process.local_rank,
            "SLURM_NTASKS_PER_NODE" if slurm else "LOCAL_WORLD_SIZE",
            process.local_world,
        ),
    )
    for name, number, of, count in pairs:
        if number >= count:
            raise InputError(f"must be below {of}={count}; ranks count from 0", field=name, value=number)
    if process.local_world > process.world:
        name = pairs[1][2]
        raise InputError(f"must not exceed {pairs[0][2]}={process.world}", field=name, value=process.local_world)
    return process


def _number(
    env: Mapping[str, str], name: str, least: int = 0, default: int | None = None, fix: tuple[str, ...] = ()
) -> int:
    text = env.get(name, "").strip()
    if not text:
        if default is not None:
            return default
        raise InputError(
            "is not set, but other variables mark this process as a rank of a distributed run", field=name, fix=fix
        )
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least):
        raise InputError(f"must be an integer of at least {least}", field=name, value=text, fix=fix)
    return int(text)

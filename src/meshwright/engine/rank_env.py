"""Who started this process, read from the environment: torchrun, SLURM or nobody.

Torch is imported only where a device is asked for: `--nproc` has settings to make before torch is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.errors import InputError

if TYPE_CHECKING:
    import torch

How = Literal["alone", "nproc", "torchrun", "slurm"]
DeviceType = Literal["auto", "cuda", "cpu"]

TORCHRUN_SIGNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Slurm numbers the steps that srun starts from 0; the batch script, an interactive shell and the like lie above.
FIRST_SPECIAL_STEP = 0xFFFFFFFA
# Below the ports that Linux hands out by itself (32768 and up), so that none of those is in the way.
PORTS = range(20_000, 32_000)
STEPS_PER_JOB = 16  # steps of one job that run side by side get ports of their own


@dataclass(frozen=True)
class Process:
    """One rank of a run: its place among the others, and how it finds them."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    how: How = "alone"
    master_address: str = ""
    master_port: int = 0
    gpu: int = 0  # index of this rank's GPU among those it sees
    device_type: DeviceType = "auto"  # auto: the GPU where there is one
    folder: str = ""  # where ranks of --nproc meet and leave their last words

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        import torch

        wants_cpu = self.device_type == "cpu" or (self.device_type == "auto" and not torch.cuda.is_available())
        return torch.device("cpu") if wants_cpu else torch.device("cuda", self.gpu)

    @property
    def store(self) -> Path:
        """The file through which ranks of --nproc find each other."""
        return Path(self.folder) / "store"

    @property
    def last_words(self) -> Path:
        """The file in which a rank of --nproc that must end at once says why."""
        return Path(self.folder) / f"last_words_{self.rank}"


def detect(env: Mapping[str, str] = os.environ) -> Process | None:
    """The rank that torchrun or SLURM made of this process; None when it was started alone."""
    if any(name in env for name in TORCHRUN_SIGNS):
        return _checked(_from_torchrun(env))
    if _is_a_slurm_task(env):
        return _checked(_from_slurm(env))
    return None


def _from_torchrun(env: Mapping[str, str]) -> Process:
    unset = tuple(f"unset {name}" for name in TORCHRUN_SIGNS if name in env)
    rank, world = _number(env, "RANK", fix=unset), _number(env, "WORLD_SIZE", least=1, fix=unset)
    alone_here = "LOCAL_RANK=0 where every process has a machine of its own"
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
        fix=("start the run with torchrun", "MASTER_ADDR=the name of the machine of rank 0"),
    )


def _is_a_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process; the batch script and an interactive shell also see SLURM's variables."""
    if not all(env.get(name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")):
        return False
    return _number(env, "SLURM_STEP_ID") < FIRST_SPECIAL_STEP


def _from_slurm(env: Mapping[str, str]) -> Process:
    world, local_rank = _number(env, "SLURM_NTASKS", least=1), _number(env, "SLURM_LOCALID", default=0)
    seen = [one for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return Process(
        rank=_number(env, "SLURM_PROCID"),
        world=world,
        local_rank=local_rank,
        local_world=_tasks_here(env, world),
        how="slurm",
        master_address=env.get("MASTER_ADDR", "").strip() or _first_slurm_host(env, world),
        master_port=_number(env, "MASTER_PORT", least=1, default=_slurm_port(env)),
        gpu=0 if len(seen) == 1 else local_rank,  # one in sight: SLURM gave each task a GPU of its own
    )


def _tasks_here(env: Mapping[str, str], world: int) -> int:
    """Tasks on this node: `SLURM_NTASKS_PER_NODE=4`, else this node's entry of a list such as `4(x2),3`."""
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
        return ""  # nobody to find
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if text := env.get(name, "").strip():
            return next(hosts(text, name))
    raise InputError(
        "is not set, so the ranks cannot find each other",
        field="SLURM_JOB_NODELIST",
        fix=("start the run with srun", "MASTER_ADDR=the name of the machine of rank 0"),
    )


def _slurm_port(env: Mapping[str, str]) -> int:
    """The same port on every rank of a step, another one for most other steps."""
    job = _number(env, "SLURM_JOB_ID", default=_number(env, "SLURM_JOBID", default=0))
    return PORTS[(job * STEPS_PER_JOB + _number(env, "SLURM_STEP_ID", default=0)) % len(PORTS)]


def hosts(nodelist: str, field: str = "SLURM_JOB_NODELIST") -> Iterator[str]:
    """The host names of a SLURM node list in order: `gpu[01-03,07],login` gives gpu01, gpu02, gpu03, gpu07, login."""
    entries = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if not entries or ",".join(entries) != nodelist:
        raise _bad_nodelist(nodelist, field)
    for entry in entries:
        yield from _expanded(entry.strip(), nodelist, field)


def _expanded(entry: str, nodelist: str, field: str) -> Iterator[str]:
    """The hosts of one entry; several brackets vary like the digits of a number, the last one fastest."""
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
    """`01-03,07` as 01, 02, 03, 07: a range keeps the width of its first number."""
    for one in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", one.strip(), re.ASCII)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise _bad_nodelist(nodelist, field)
        first, last = found[1], found[2] or found[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _bad_nodelist(nodelist: str, field: str) -> InputError:
    return InputError("is not a SLURM node list such as gpu[01-03,07]", field=field, value=nodelist)


def _checked(process: Process) -> Process:
    """The process, when its numbers agree with each other."""
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
        raise InputError("is not set, though this process looks like one rank of several", field=name, fix=fix)
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least):
        raise InputError(f"must be a whole number of at least {least}", field=name, value=text, fix=fix)
    return int(text)

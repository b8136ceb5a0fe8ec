"""Detect the GPUs of this machine with nvidia-smi."""

from __future__ import annotations

from collections import Counter

import msgspec

from meshwright.clusters.catalogue import gpu
from meshwright.clusters.types import Cluster
from meshwright.errors import InputError

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
TIMEOUT_S = 20  # without persistence mode, the driver needs seconds per GPU to start
EXAMPLE = "8xH100"
DESCRIBE = (
    'describe it in a TOML file (gpu = "nearest known GPU", gpus_per_node, memory_gib and other differences) '
    f"and pass its path instead of auto, or pass a known cluster such as {EXAMPLE}"
)


def this_machine() -> Cluster:
    """Return one node with the GPUs that nvidia-smi lists."""
    return read_nvidia_smi(_run_nvidia_smi())


def read_nvidia_smi(output: str) -> Cluster:
    """Return one node with the GPUs of an nvidia-smi listing of names and total memory."""
    import csv

    rows = [(row[0].strip(), row[-1].strip()) for row in csv.reader(output.splitlines()) if len(row) >= 2]
    if not rows:
        raise _not_found("nvidia-smi lists no GPU")
    names = Counter(name for name, _ in rows)
    if len(names) > 1:
        mix = " and ".join(f"{count} of {name}" for name, count in names.items())
        raise _bad(f"this machine has several GPU types ({mix}); pass the ones to plan for, such as {EXAMPLE}")
    name = rows[0][0]
    if "MIG" in name.upper().split():
        raise _bad(f"{name} is a MIG slice of a GPU; {DESCRIBE}")
    memory_gib = min(_memory_gib(name, memory) for _, memory in rows)
    try:
        known = gpu(name)
    except InputError as error:
        raise _bad(f"{error.reason} Or {DESCRIBE}") from None
    return Cluster(msgspec.structs.replace(known, memory_gib=memory_gib), nodes=1, gpus_per_node=len(rows))


def _run_nvidia_smi() -> str:
    import subprocess

    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _not_found(f"nvidia-smi timed out after {TIMEOUT_S} s") from None
    except OSError:
        raise _not_found("nvidia-smi not found") from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise _not_found(f"nvidia-smi failed: {output[0][:200] if output else f'exit code {done.returncode}'}")
    return done.stdout


def _memory_gib(name: str, text: str) -> float:
    number, _, unit = text.partition(" ")
    if not number.isascii() or not number.isdigit() or int(number[:12]) == 0 or unit not in ("", "MiB"):
        raise _bad(f"the driver reports the memory of {name} as {text!r}; {DESCRIBE}")
    return round(int(number[:12]) / 1024, 2)


def _not_found(why: str) -> InputError:
    return _bad(f"no GPU found on this machine ({why}); pass the cluster to plan for, such as {EXAMPLE} or 4x8xH200")


def _bad(reason: str) -> InputError:
    return InputError(reason, field="gpus", value="auto", fix=[EXAMPLE])

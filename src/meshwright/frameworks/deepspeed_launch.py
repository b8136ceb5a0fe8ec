"""The GPUs that the launcher of DeepSpeed starts processes on, compared with those that the user gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.clusters import Cluster
from meshwright.frameworks.types import as_int
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

NODES, PER_NODE = "--num_nodes", "--num_gpus"
OPEN = ("include", "exclude")  # options that choose among the hosts of a file


def more_gpus_than_given(launch: LaunchCommand, given: Cluster | None) -> Iterator[Finding]:
    """Yield more processes than given GPUs; a launcher without a number of GPUs uses all of every node."""
    options = launch.launcher_args
    nodes = as_int(launch.nodes, 7) or 1
    stated = as_int(launch.gpus_per_node, 7)
    if given is None or launch.launcher != "deepspeed" or any(one in options for one in OPEN):
        return
    each = stated or given.gpus_per_node
    at = launch.nodes if nodes > 1 else launch.gpus_per_node
    if nodes * each <= given.world or at is None or at.unresolved:
        return
    text = f"{PER_NODE} {each}" if nodes == 1 else f"{NODES} {nodes} starts {nodes} × {each} processes"
    name, most = (PER_NODE, given.gpus_per_node) if nodes == 1 else (NODES, given.world // each)
    other = f"; for all of them: --gpus {nodes}x{each}x{given.gpu.name}" if nodes > 1 else ""
    message = f"{text}, but {given} has {given.world} GPU{'s' * (given.world != 1)}{other}"
    fix = (f"deepspeed {name} {most}",) if most else ()
    yield Finding("launch.gpus", "error", name, message, fix, file=at.file, line=at.line)

"""A launcher that srun starts on every node without the number of nodes: each node trains on its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from meshwright.frameworks.framework import Content
from meshwright.frameworks.node_rank import FIRST_NODE, has_known_options, is_one_of_several
from meshwright.frameworks.types import as_int
from meshwright.rules.rule import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

RULE = "launch.separate-runs"


class Joins(NamedTuple):
    """How a launcher learns of other nodes."""

    options: tuple[str, ...]
    variable: str  # prefix of variables that do the same
    missing: str


LAUNCHERS = {
    "torchrun": Joins(("nnodes", "num-nodes", "standalone"), "PET_", "torchrun starts without --nnodes, which is 1"),
    "deepspeed": Joins(("hostfile", "no-ssh", "launcher", "include", "exclude", "num-nodes", "node-rank"),
                       "DLTS_HOSTFILE", "deepspeed starts without --hostfile"),
}  # fmt: skip


def separate_runs(content: Content, launch: LaunchCommand) -> Iterator[Finding]:
    """Yield that the tasks of srun do not join: nothing tells the launcher of other nodes."""
    how = LAUNCHERS.get(launch.launcher)
    nodes = as_int(launch.job.get("nodes"), 7) or 0
    if how is None or not launch.under_srun or nodes < 2 or (as_int(launch.job.get("ntasks"), 7) or nodes) < 2:
        return
    held = (*(content.script.variables if content.script else ()), *launch.env)
    if any(one in launch.launcher_args for one in how.options) or any(one.startswith(how.variable) for one in held):
        return
    if is_one_of_several(content, launch) or not has_known_options(content, launch):
        return
    text = f"srun starts the launcher on {nodes} nodes, and {how.missing}: {nodes} separate trainings of one node each"
    at = launch.program
    yield Finding(RULE, "error", "--nnodes", text, (_fix(launch, nodes, held),), file=at.file, line=at.line)


def _fix(launch: LaunchCommand, nodes: int, held: tuple[str, ...]) -> str:
    """Return torchrun's options that make the nodes one training."""
    words = ["torchrun", "--nnodes", str(nodes)]
    each = as_int(launch.gpus_per_node, 7)
    if launch.launcher != "torchrun" and each:
        words += ["--nproc-per-node", str(each)]
    if "rdzv-endpoint" not in launch.launcher_args:
        head = "$MASTER_ADDR" if "MASTER_ADDR" in held else FIRST_NODE
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={head}:29500"]
    return " ".join(words)

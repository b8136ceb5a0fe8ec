"""The GPUs that a SLURM job requests, compared with those of the nodes that it is checked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.clusters import Cluster, gpu, is_known
from meshwright.display import plural
from meshwright.frameworks.types import SourcedValue, as_int
from meshwright.rules.rule import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

RULE = "launch.gpus"
OPTIONS = ("gpus-per-node", "gres", "gpus-per-task", "gpus")


def requested_gpus(launch: LaunchCommand) -> tuple[int, SourcedValue, str] | None:
    """Return the GPUs per node that the job requests, where, and the option as written; None if unknown."""
    from meshwright.frameworks.shell import sbatch

    setting = sbatch.gpus_per_node(launch.job)
    count = as_int(setting, 7)
    named = next((one for one in OPTIONS if one in launch.job), "")
    return (count, setting, f"--{named}={launch.job[named].value}") if setting is not None and count and named else None


def more_than_a_node_has(launch: LaunchCommand, given: Cluster, fixes: list[str]) -> Iterator[Finding]:
    """Yield more GPUs per node than the given nodes have; `fixes` start fewer processes too."""
    found = requested_gpus(launch)
    if found is None or found[0] <= given.gpus_per_node:
        return
    count, at, option = found
    have = given.gpus_per_node
    message = f"{option} requests {count} GPUs per node, but a node of {given} has {plural(have, 'GPU')}: no node fits"
    job = [f"#SBATCH {option.removesuffix(str(count))}{have}"] if option.endswith(str(count)) else []
    yield Finding(RULE, "error", option.partition("=")[0], message, (*job, *fixes), at.file, at.line)


def other_type(launch: LaunchCommand, given: Cluster | None) -> Iterator[str]:
    """Yield a note if the job requests another type of GPU than it is checked for."""
    if given is None or not launch.gpu or not is_known(launch.gpu):
        return
    family = launch.gpu.lower().split("-")[0]
    stated = ((key, launch.job[key]) for key in (*OPTIONS, "constraint") if key in launch.job)
    found = next(((key, one) for key, one in stated if family in str(one.value).lower()), None)
    if found is None or gpu(launch.gpu).name.split("-")[0] == given.gpu.name.split("-")[0]:
        return  # 40 or 80 GB: a job names both a100
    key, at = found
    yield f"{at.file}:{at.line} --{key}={at.value} requests another GPU; the figures are for {given.gpu.name}"

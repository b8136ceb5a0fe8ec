"""The GPUs of the SLURM job whose nodes each start `accelerate launch`, which is given numbers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.types import as_int

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

PART = ("nodelist", "relative")  # options of srun that start its command on some of the nodes


def job_gpus(content: Content, launch: LaunchCommand) -> GpuRequest:
    """Return the job's GPUs if one launch uses all of them; empty if that or a number is not known."""
    from meshwright.frameworks.shell import sbatch

    of_job = content.script.sbatch if content.script is not None else {}
    setting = sbatch.node_count(launch.job)
    nodes, each = as_int(setting, 7), as_int(sbatch.gpus_per_node(launch.job), 7)
    in_part = any(one in launch.job for one in PART) or nodes != as_int(sbatch.node_count(of_job), 7)
    is_whole = launch.under_srun or nodes == 1
    if launch.launcher != "accelerate" or len(content.launches) > 1 or in_part or not is_whole:
        return GpuRequest()
    if not nodes or not each or "CUDA_VISIBLE_DEVICES" in launch.env:
        return GpuRequest()
    return GpuRequest(nodes=nodes, gpus_per_node=each, source=setting)

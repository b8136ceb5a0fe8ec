"""Threads of the processes of a task, compared with its CPUs: more threads than CPUs slow down every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.frameworks.types import as_int
from meshwright.rules.rule import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

VARIABLE, CPUS = "OMP_NUM_THREADS", "cpus-per-task"


def too_many_threads(launch: LaunchCommand) -> Iterator[Finding]:
    """Yield threads of all processes of a task that are more than its CPUs, if both are known."""
    setting, cpus = launch.env.get(VARIABLE), as_int(launch.job.get(CPUS), 7)
    processes = 1 if launch.launcher == "srun" else as_int(launch.gpus_per_node, 7)
    tasks = 1 if launch.launcher == "srun" else as_int(launch.job.get("ntasks-per-node"), 7) or 1
    threads = as_int(setting, 7)
    if setting is None or setting.unresolved or not threads or not cpus or not processes or tasks > 1:
        return
    if threads * processes <= cpus:
        return
    many = f"{processes} processes" if processes > 1 else "a process"
    text = f"{VARIABLE}={threads} in {many} of a task with --{CPUS}={cpus}: {threads * processes} threads"
    fix = f"export {VARIABLE}={max(1, cpus // processes)}"
    yield Finding("launch.environment", "warning", VARIABLE, text, (fix,), file=setting.file, line=setting.line)

"""Programs that srun starts once per rank without a launcher: nothing maps SLURM's numbers to RANK and WORLD_SIZE."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.load import program_path
from meshwright.frameworks.node_rank import FIRST_NODE, INNER_SHELL, is_one_of_several
from meshwright.frameworks.trainer import parse_arguments
from meshwright.frameworks.types import SourcedValue, as_int
from meshwright.rules.rule import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

RULE = "launch.ranks"
MARK = "per_device_train_batch_size"  # an argument of the Trainer
RANKS = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
TASK_RANKS = f"srun bash -c '{' '.join(f'{name}=${one}' for name, one in RANKS.items())} exec python …'"
ADDRESS = "MASTER_ADDR"
READS_SLURM = re.compile(
    r"SLURM|OMPI_|PMI|mpi4py|idr_torch|submitit|deepspeed|hostlist|lightning|ray\b|meshwright|nemo|kempnerforge", re.I
)
"""A program that takes its ranks from SLURM or MPI, or uses a library that does."""
OF_TORCH = re.compile(r"init_process_group|env://|torchtitan")
OF_TRAINER = re.compile(r"\bTrainer\b|\bAccelerator\b|SFTTrainer|TrainingArguments")
SOURCED = re.compile(r"^\s*(?:source|\.)\s+(?!\S*(?:activate|conda\.sh|bashrc|profile)\b)\S", re.MULTILINE)
"""A file that may set the variables; those of virtual environments do not."""
PER_TASK = re.compile(r"\$\{?(?:SLURM_PROCID|SLURM_LOCALID)\}?")


def missing_ranks(content: Content, launch: LaunchCommand, parsed: ParsedConfig) -> Iterator[Finding]:
    """Yield that every task of srun is rank 0 of its own training, or stops: its program reads RANK and WORLD_SIZE."""
    tasks = _tasks(launch)
    if launch.launcher != "srun" or tasks < 2 or content.script is None or _may_be_set(content, launch):
        return
    kind = _kind(content, launch, parsed)
    held = launch.env
    missing = [name for name in (*RANKS, ADDRESS) if name not in held and name not in content.script.variables]
    shared = [] if INNER_SHELL.search(content.text) else [one for one in RANKS if _is_expanded(held.get(one))]
    if not kind or not (set(missing) & set(RANKS) or shared):
        return
    at = launch.program
    text = f"srun starts {tasks} tasks of {at.value}, and "
    if set(missing) & set(RANKS):
        text += f"nothing sets {', '.join(missing)}: {kind.format(tasks=tasks)}"
    else:
        text += f"{shared[0]}={held[shared[0]].value} is expanded before them: all have the number of the first"
    fix = (*((f"export {ADDRESS}={FIRST_NODE}", "export MASTER_PORT=29500") if ADDRESS in missing else ()), TASK_RANKS)
    yield Finding(RULE, "error", "RANK", text, fix, file=at.file, line=at.line)


def _tasks(launch: LaunchCommand) -> int:
    """Return the tasks that srun starts; 0 if unknown."""
    total = as_int(launch.job.get("ntasks"), 7)
    nodes, each = as_int(launch.job.get("nodes"), 7), as_int(launch.job.get("ntasks-per-node"), 7)
    return total or (nodes or 1) * (each or 0)


def _may_be_set(content: Content, launch: LaunchCommand) -> bool:
    """Return whether a container's hook, a sourced file or a wrapper may set the ranks of the tasks."""
    from meshwright.frameworks.shell.containers import container_of  # a script's interpreter, which only files need

    script = content.script
    in_container = script is not None and container_of(script) is not None
    return in_container or is_one_of_several(content, launch) or bool(SOURCED.search(content.text))


def _is_expanded(setting: SourcedValue | None) -> bool:
    return setting is not None and bool(PER_TASK.fullmatch(str(setting.value)))


def _kind(content: Content, launch: LaunchCommand, parsed: ParsedConfig) -> str:
    """Return what a program without ranks does; empty if it may take them from SLURM."""
    if parsed.entry.startswith("pretrain_"):
        return "RANK is 0 and WORLD_SIZE 1 in each, {tasks} separate trainings"
    path = program_path(content, launch.program)
    text = path.read_text("utf-8", errors="replace") if path is not None and path.is_file() else ""
    if READS_SLURM.search(text):
        return ""
    if OF_TRAINER.search(text) or (not text and MARK in parse_arguments(launch.args)):
        return "{tasks} separate trainings of one process each"
    return "torch stops, because the environment variable RANK is expected" if OF_TORCH.search(text) else ""

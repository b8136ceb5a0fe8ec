"""The number of each node that srun's tasks pass to torchrun: without a number of its own, every node is node 0."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.frameworks.framework import Content
from meshwright.frameworks.types import SourcedValue, as_int
from meshwright.rules.rule import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

RULE = "launch.node-rank"
STATIC = "static"  # torchrun's default rendezvous, which reads --node_rank
OWN_DEFAULTS = "PET_"  # torchrun reads the default of an option from this variable: PET_NODE_RANK
FIRST_NODE = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"  # where ranks of all nodes meet
TASK_VARIABLE = re.compile(r"\$\{?(SLURM_NODEID|SLURM_PROCID)\}?")
INNER_SHELL = re.compile(r"\b(?:ba)?sh\s+-\w*c\b|(?<![\w-])eval\s|<<|\\\$")
"""What may expand a variable again in a task: an inner shell, eval, a here document, an escaped variable."""


def node_rank_findings(content: Content, launch: LaunchCommand) -> Iterator[Finding]:
    """Yield a node rank that all of srun's tasks share: one value for all, or none, which is 0."""
    options, nodes = launch.launcher_args, as_int(launch.nodes, 7) or 0
    backend, rank = options.get("rdzv-backend"), options.get("node-rank")
    if launch.launcher != "torchrun" or not launch.under_srun or nodes < 2:
        return
    if (backend is not None and backend.value != STATIC) or "standalone" in options:
        return
    if rank is not None:
        message = "" if INNER_SHELL.search(content.text) else _shared(content, launch, rank)
    else:
        message = "torchrun starts without --node_rank, which is 0 then" if _is_missing(content, launch) else ""
    at = rank or launch.program
    if message:
        number = 0 if rank is None else as_int(rank, 7) or 0
        text = f"{message}: all {nodes} nodes get rank {number}"
        yield Finding(RULE, "error", "--node-rank", text, (_fix(content, launch),), file=at.file, line=at.line)


def _shared(content: Content, launch: LaunchCommand, rank: SourcedValue) -> str:
    """Return why all tasks have one --node_rank; empty if each may have its own."""
    if TASK_VARIABLE.fullmatch(str(rank.value)):
        is_expanded = not _is_in_a_script_of_the_tasks(content, launch)
        return f"--node_rank {rank.value} is expanded before srun starts the tasks" if is_expanded else ""
    number = None if rank.unresolved else as_int(rank, 7)
    if number is None or "nnodes" not in launch.launcher_args or is_one_of_several(content, launch):
        return ""
    return f"srun starts the same --node_rank {number} on every node"


def _is_missing(content: Content, launch: LaunchCommand) -> bool:
    """Return whether nothing sets --node_rank: no variable, and no option that is known only at run time."""
    held = (*(content.script.variables if content.script else ()), *launch.env)
    if "nnodes" not in launch.launcher_args or any(name.startswith(OWN_DEFAULTS) for name in held):
        return False
    return not is_one_of_several(content, launch) and has_known_options(content, launch)


def is_one_of_several(content: Content, launch: LaunchCommand) -> bool:
    """Return whether srun starts this launch on one node, as a script does that starts the nodes one by one."""
    return len(content.launches) > 1 or as_int(launch.job.get("nodes"), 7) == 1 or "nodelist" in launch.job


def _words(content: Content, launch: LaunchCommand) -> tuple[SourcedValue, ...]:
    """Return the words of the command before the program; empty if they are not known."""
    script = content.script
    commands = () if script is None else (*script.commands, *script.possible)
    command = next((one for one in commands if launch.program in one.words), None)
    return () if command is None else command.words[: command.words.index(launch.program)]


def _is_in_a_script_of_the_tasks(content: Content, launch: LaunchCommand) -> bool:
    """Return whether srun starts a script that starts torchrun: each task expands its own variables."""
    from meshwright.frameworks.shell.launch_prefixes import command_name, unwrap

    words = _words(content, launch)
    srun = next((one for one in words if command_name(one) == "srun"), None)
    start = unwrap(words).start
    return srun is not None and start < len(words) and words[start].file != srun.file


def has_known_options(content: Content, launch: LaunchCommand) -> bool:
    """Return whether this is the launcher itself, not one like it, and no variable may hold more of its options."""
    from meshwright.frameworks.shell.launch_prefixes import command_name, is_option, read_option, unwrap
    from meshwright.frameworks.shell.launcher import DISTRIBUTED, LIKE_TORCHRUN, TAKES

    words = _words(content, launch)
    words = words[unwrap(words).start :]
    at = next((at + 1 for at, word in enumerate(words) if word.value in DISTRIBUTED), 1)
    while at < len(words) and is_option(words[at]):
        _, at = read_option(words, at, TAKES[launch.launcher])
    return at == len(words) and command_name(words[0]) not in LIKE_TORCHRUN


def _fix(content: Content, launch: LaunchCommand) -> str:
    """Return the rendezvous in which the nodes get their numbers from the first node."""
    options = launch.launcher_args
    if "rdzv-endpoint" in options:
        return "torchrun --rdzv-backend=c10d"
    head, port = options.get("master-addr"), options.get("master-port")
    held = content.script is not None and "MASTER_ADDR" in content.script.variables
    name = "$MASTER_ADDR" if held or head is None else head.value
    return f"torchrun --rdzv-backend=c10d --rdzv-endpoint={name}:{port.value if port else 29500}"

"""Contradictions between a script's launcher, its SLURM job and the given GPUs, and harmful environment variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks import cut_commands, node_rank
from meshwright.frameworks.common import visible_devices
from meshwright.frameworks.deepspeed_launch import more_gpus_than_given
from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.job_signal import RULE as SIGNAL
from meshwright.frameworks.job_signal import signal_findings
from meshwright.frameworks.launch_threads import too_many_threads
from meshwright.frameworks.launch_variables import bad_variables
from meshwright.frameworks.launcher_options import misspelled_options
from meshwright.frameworks.requested_gpus import more_than_a_node_has, other_type, requested_gpus
from meshwright.frameworks.separate_runs import RULE as SEPARATE
from meshwright.frameworks.separate_runs import separate_runs
from meshwright.frameworks.shell_numbers import RULE as ARITHMETIC
from meshwright.frameworks.shell_numbers import arithmetic_findings
from meshwright.frameworks.task_ranks import RULE as RANKS
from meshwright.frameworks.task_ranks import missing_ranks
from meshwright.frameworks.types import SourcedValue, as_int
from meshwright.rules.rule import Finding, Severity

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

DEFAULT = re.compile(r"\$\{\w+:?[-=]")
FRONT_END = "front-end"  # launcher of a fine-tuning front end's command
PER_NODE = "NPROC_PER_NODE"  # processes that such a command starts on a node
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOCAL = ("localhost", "127.0.0.1", "::1")


class LaunchRule(NamedTuple):
    """A check of how a script starts its processes."""

    id: str
    severity: Severity
    symptom: str
    cause: str


RULES = (
    LaunchRule("launch.nodes", "error", "torchrun waits for nodes that never join, until the rendezvous times out",
               "the launcher and the SLURM job request different numbers of nodes"),
    LaunchRule("launch.tasks", "error", "each node starts several launchers: ports are taken and GPUs are shared",
               "srun starts its command once per task, and torchrun starts the processes of a node"),
    LaunchRule("launch.gpus", "error", "RuntimeError: CUDA error: invalid device ordinal",
               "every process needs a GPU of its own"),
    LaunchRule("launch.idle", "warning", "GPUs that are paid for stay idle",
               "the launcher starts fewer processes than there are GPUs"),
    LaunchRule("launch.head", "warning", "every node waits for itself, until the rendezvous times out",
               "localhost is another machine on each node"),
    LaunchRule(node_rank.RULE, "error", "every node waits as node 0, until the rendezvous times out",
               "all nodes have one rank: the default, or a variable that the batch script expands on its first node"),
    LaunchRule(SEPARATE, "error", "each node trains alone: same checkpoints, tokens/s of one node",
               "srun starts the launcher on every node, and nothing tells it of the other nodes"),
    LaunchRule(RANKS, "error", "each task trains alone, or ValueError: environment variable RANK expected, but not set",
               "srun sets SLURM_PROCID, and programs read RANK, LOCAL_RANK and WORLD_SIZE, which torchrun sets"),
    LaunchRule("launch.environment", "warning", "steps are many times slower, or NCCL cannot connect",
               "a variable of a debugging session stays in force, or has a value that NCCL or torch does not know"),
    LaunchRule("launch.literal-quotes", "error", "the program rejects a value, or opens a file whose name has quotes",
               "the shell removes the quotes of a command, not those inside a string that a variable holds"),
    LaunchRule(cut_commands.RULE, "warning", "--learning_rate: command not found, after a training without it",
               "a line of the command has no backslash, blanks after it, or is followed by an empty line or a comment"),
    LaunchRule(ARITHMETIC, "error", "value too great for base, or syntax error: invalid arithmetic operator",
               "bash computes with integers: 200B, 200e9 and 0.01 are none"),
    LaunchRule(SIGNAL, "warning", "the job ends at its time limit without a checkpoint of the last steps",
               "the signal before the time limit reaches nothing that saves"),
)  # fmt: skip
QUOTES_IGNORED = ("--split",)
"""Flags of which Megatron-LM reads the numbers, whatever is around them."""
SEVERITY = {one.id: one.severity for one in RULES}


def launch_findings(
    content: Content, parsed: ParsedConfig, cluster: Cluster | None, gpus: str | None, own_count: bool = False
) -> list[Finding]:
    """Return the findings about the launch that was checked; a value known only at run time contradicts nothing.

    `own_count`: the number of the GPUs is the file's own.
    """
    quoted = [*cut_commands.cut_findings(content), *arithmetic_findings(content), *_literal_quotes(content)]
    quoted += signal_findings(content, parsed)
    any_launch = imported_launch(content, parsed)
    given_on = cluster if gpus is not None else None
    environment = [] if any_launch is None else list(_environment(any_launch, given_on))
    environment += [] if any_launch is None else too_many_threads(any_launch)
    quoted += [] if any_launch is None else misspelled_options(any_launch)
    quoted += [] if any_launch is None else separate_runs(content, any_launch)
    quoted += [] if any_launch is None else missing_ranks(content, any_launch, parsed)
    launch = _checked_launch(content, parsed)
    if launch is None:
        hidden = [] if any_launch is None else list(_hidden_gpus(content, any_launch, parsed, given_on))
        hidden += [] if any_launch is None else more_gpus_than_given(any_launch, given_on)
        return [*hidden, *environment, *quoted]
    heads = [one for one in _head(launch) if not _has_default(content, one)]
    found = [*_nodes(launch, given_on), *_tasks(launch), *_gpus(launch, given_on, gpus, own_count), *heads]
    found += [*node_rank.node_rank_findings(content, launch), *environment, *quoted]
    given = _given(content, launch, cluster, gpus)
    reported = {one.rule for one in found}
    return [*found, *(one for one in given if one.severity == "error" and one.rule not in reported)]


def launch_notes(content: Content, parsed: ParsedConfig, cluster: Cluster | None, gpus: str | None) -> list[str]:
    """Return how many of the given GPUs the script uses, if it starts fewer processes: it may be meant for others.

    Also a rendezvous at localhost that is only the default of a variable.
    """
    launch = _checked_launch(content, parsed)
    found = [] if launch is None else _given(content, launch, cluster, gpus)
    heads = [] if launch is None else [one for one in _head(launch) if _has_default(content, one)]
    unset = [f"{one.file}:{one.line} {one.message}, unless the environment sets the variable" for one in heads]
    any_launch = imported_launch(content, parsed)
    unset += [] if any_launch is None or gpus is None else other_type(any_launch, cluster)
    return unset + [
        f"{one.file}:{one.line} {one.message}: to use all of them, {' '.join(one.fix)}"
        for one in found
        if one.severity != "error" and one.fix
    ]


def _given(content: Content, launch: LaunchCommand, cluster: Cluster | None, gpus: str | None) -> list[Finding]:
    if gpus is None or cluster is None:
        return []
    found = _given_gpus(launch, cluster, explicit=_is_cluster_file(gpus) or _names_nodes(gpus))
    return [one for one in found if not _has_default(content, one)]


def _is_cluster_file(gpus: str | None) -> bool:
    return gpus is not None and gpus.endswith(".toml")


def _names_nodes(gpus: str | None) -> bool:
    """Return whether the GPUs are given with their number per node."""
    return gpus is not None and gpus.lower().count("x") >= 2


def _has_default(content: Content, finding: Finding) -> bool:
    """Return whether the line leaves its value to the caller's environment: ${NODES:-1}."""
    lines = content.text.splitlines()
    own = finding.file == content.path and 0 < finding.line <= len(lines)
    return own and bool(DEFAULT.search(lines[finding.line - 1]))


def _checked_launch(content: Content, parsed: ParsedConfig) -> LaunchCommand | None:
    """Return the launch that the framework took its GPUs from, if its options are torchrun's or srun's."""
    found = imported_launch(content, parsed)
    return found if found is not None and found.launcher in ("torchrun", "srun") else None


def imported_launch(content: Content, parsed: ParsedConfig) -> LaunchCommand | None:
    """Return the launch that the framework took its GPUs from."""
    source = parsed.gpu_request.source
    found = [one for one in content.launches if source in (one.gpus_per_node, one.nodes, one.program)]
    if not found and len(content.launches) == 1:
        found = list(content.launches)
    return found[0] if found else None


def _literal_quotes(content: Content) -> Iterator[Finding]:
    """Yield the values of the first launch that reach the program with their quotes."""
    flag = ""
    for one in content.launches[0].args if content.launches else ():
        text = str(one.value)
        is_flag = text.startswith("--")
        flag, value = (text.partition("=")[0], text.partition("=")[2]) if is_flag else (flag, text)
        if one.unresolved or not flag or not value.startswith(("'", '"')):
            continue
        if flag in QUOTES_IGNORED:
            continue
        bare = value.strip("'\"")
        is_whole = len(value) > 1 and value[-1] == value[0]
        message = f"{flag} gets {value} with its quotes: the shell keeps quotes that are inside a string"
        fix = f"{flag} {bare}" if is_whole and bare else 'an array, ARGS=(…), and "${ARGS[@]}" in the command'
        found = _finding("launch.literal-quotes", flag, one, message, fix)
        is_text = is_whole and " " in bare  # one word with blanks is a description, which may have quotes
        yield msgspec.structs.replace(found, severity="warning") if is_text else found


def keeps_arguments_in_strings(content: Content) -> bool:
    """Return whether most flags of a script's program come from variables that hold a string, and not an array."""
    if not content.launches or content.script is None:
        return False
    texts = [one.value for one in content.script.variables.values() if isinstance(one.value, str)]
    held = {word for text in texts for word in text.split() if word.startswith("--")}
    flags = [word for one in content.launches[0].args if (word := str(one.value)).startswith("--")]
    return sum(flag in held for flag in flags) * 2 > len(flags)


def unquoted(text: str) -> str:
    """Return a fix of flags as it is pasted into a string; unchanged if a value has blanks, which needs an array."""
    if not text.startswith("--") or not set(text) & set("'\""):
        return text
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe in a sentence
        return text
    return text if any(not word or re.search(r"\s", word) for word in words) else " ".join(words)


def _finding(rule: str, key: str, at: SourcedValue, message: str, *fix: str) -> Finding:
    return Finding(rule, SEVERITY[rule], key, message, fix, file=at.file, line=at.line)


def _option(launch: LaunchCommand, *names: str) -> SourcedValue | None:
    return next((launch.launcher_args[name] for name in names if name in launch.launcher_args), None)


def _nodes_asked(launch: LaunchCommand) -> SourcedValue | None:
    """Return the nodes of torchrun's own option; None if it has none or leaves it open."""
    setting = _option(launch, "nnodes") if launch.launcher == "torchrun" else None
    return setting if as_int(setting, 7) else None


def _job_nodes(launch: LaunchCommand) -> tuple[int, SourcedValue] | None:
    setting = launch.job.get("nodes")
    count = as_int(setting, 7)
    return (count, setting) if setting is not None and count else None


def _nodes(launch: LaunchCommand, given: Cluster | None) -> Iterator[Finding]:
    asked, job = _nodes_asked(launch), _job_nodes(launch)
    wanted = as_int(asked, 7)
    if asked is None or job is None or not wanted or _tasks_per_node(launch) != 1 or wanted == job[0]:
        return
    if wanted < job[0] and not launch.under_srun:  # a launch per node of a part of them
        return
    count, at = job
    lines = f"lines {asked.line} and {at.line}"
    message = f"torchrun --nnodes {wanted}, but the job has --nodes={count} ({lines})"
    is_job = given is not None and given.nodes == wanted  # the user's GPUs say which of the two is wrong
    fix = f"#SBATCH --nodes={wanted}" if is_job else f"torchrun --nnodes {count}"
    yield _finding("launch.nodes", "--nodes" if is_job else "--nnodes", at if is_job else asked, message, fix)


def _tasks_per_node(launch: LaunchCommand) -> int:
    """Return how often srun starts its command on a node; 1 if that is unknown or srun does not start it."""
    if not launch.under_srun:
        return 1
    given = launch.job.get("ntasks-per-node")
    if given is not None:
        return as_int(given, 7) or 1
    total, job = as_int(launch.job.get("ntasks"), 7), _job_nodes(launch)
    return total // job[0] if total and job and total % job[0] == 0 else 1


def _tasks(launch: LaunchCommand) -> Iterator[Finding]:
    """A launcher per task is right only if torchrun counts every task as a node."""
    tasks = _tasks_per_node(launch)
    if launch.launcher != "torchrun" or tasks < 2:
        return
    asked, job = _nodes_asked(launch), _job_nodes(launch)
    open_ended = asked is None and "nnodes" in launch.launcher_args
    if open_ended or (asked is not None and (job is None or as_int(asked, 7) == job[0] * tasks)):
        return
    at = launch.job.get("ntasks-per-node") or launch.job["ntasks"]
    each = as_int(_option(launch, "nproc-per-node", "nproc"), 7)
    starts = f", and each starts {each} processes" if each else ""
    message = f"srun starts torchrun {tasks} times per node{starts}: one torchrun per node is needed"
    yield _finding("launch.tasks", "--ntasks-per-node", at, message, "#SBATCH --ntasks-per-node=1")


def _processes(launch: LaunchCommand) -> tuple[int, SourcedValue, str] | None:
    """Return the processes per node, where they are set, and the option; None if unknown."""
    if launch.launcher == "torchrun":
        setting, key = _option(launch, "nproc-per-node", "nproc"), "--nproc-per-node"
    else:
        setting, key = launch.job.get("ntasks-per-node"), "--ntasks-per-node"
    count = as_int(setting, 7)
    return (count, setting, key) if setting is not None and count else None


def _gpus(launch: LaunchCommand, given: Cluster | None, gpus: str | None, own_count: bool) -> Iterator[Finding]:
    """Compare the processes per node with the GPUs of the job, with those that are visible, and both with the nodes."""
    found = _processes(launch)
    if found is None or (_tasks_per_node(launch) > 1 and launch.launcher == "torchrun"):
        return  # several launchers per node are reported on their own
    count, at, key = found
    have = given.gpus_per_node if given is not None else 0
    if given is not None and not own_count and (_is_cluster_file(gpus) or _names_nodes(gpus)):
        absent = list(more_than_a_node_has(launch, given, [_process_fix(launch, have)] if count > have else []))
        yield from absent
        if absent:
            return
    requested = requested_gpus(launch)
    of_job = [] if requested is None else [(requested[0], f"{requested[2]} (line {requested[1].line})")]
    for have, where in (*of_job, *_visible(launch)):
        if have == count:
            continue
        rule = "launch.gpus" if count > have else "launch.idle"
        text = f"{key} {count}, but {where} gives {have} GPU{'s' * (have != 1)} per node"
        is_job = given is not None and given.gpus_per_node == count and where.startswith("--")
        yield _finding(rule, key, at, text, _gpu_fix(launch, count) if is_job else _process_fix(launch, have))
        return


def _hidden_gpus(
    content: Content, launch: LaunchCommand, parsed: ParsedConfig, given: Cluster | None
) -> Iterator[Finding]:
    """Yield more processes than visible GPUs: of a front end's command, or of accelerate launch.

    The launcher of DeepSpeed ignores CUDA_VISIBLE_DEVICES if it is given a number of GPUs.
    """
    setting, machines, key = launch.env.get(PER_NODE), 1, PER_NODE
    if launch.launcher == "accelerate":
        setting, key = parsed.settings.get("num_processes"), "num_processes"
        machines = as_int(parsed.settings.get("num_machines"), 7) or 1
    total = as_int(setting, 7)
    if setting is None or not total or launch.launcher not in ("accelerate", FRONT_END):
        return
    count = total // machines
    for have, where in _visible(launch):
        if count <= have:
            continue
        text = f"{key}={setting.value}, but {where} gives {have} GPU{'s' * (have != 1)} per node"
        if given is not None and given.gpus_per_node == count:
            fix = _variable(content, launch, VISIBLE, ",".join(map(str, range(count))))
        elif key == PER_NODE:
            fix = _variable(content, launch, PER_NODE, str(have))
        else:
            in_file = setting.file.endswith((".yaml", ".yml"))
            fix = f"num_processes: {have * machines}" if in_file else f"--num_processes {have * machines}"
        yield _finding("launch.gpus", key, setting, text, fix)


def _variable(content: Content, launch: LaunchCommand, name: str, value: str) -> str:
    """Return a variable as the script sets it: exported, or before the command."""
    lines, line = content.text.splitlines(), launch.env[name].line
    is_exported = 0 < line <= len(lines) and "export" in lines[line - 1]
    return f"{'export ' * is_exported}{name}={value}"


def _gpu_fix(launch: LaunchCommand, count: int) -> str:
    gres = launch.job.get("gres")
    option = "gres=gpu:" if gres and "gpus-per-node" not in launch.job else "gpus-per-node="
    return f"#SBATCH --{option}{count}"


def _process_fix(launch: LaunchCommand, count: int) -> str:
    option = "torchrun --nproc-per-node " if launch.launcher == "torchrun" else "#SBATCH --ntasks-per-node="
    return f"{option}{count}"


def _visible(launch: LaunchCommand) -> Iterator[tuple[int, str]]:
    """Yield the GPUs that the environment leaves visible, and where."""
    setting = launch.env.get(VISIBLE)
    devices = visible_devices(setting)
    if setting is not None and devices:
        yield len(devices), f"{VISIBLE}={setting.value} (line {setting.line})"


def _given_gpus(launch: LaunchCommand, cluster: Cluster, explicit: bool) -> list[Finding]:
    """Compare the launch with the GPUs that the user gives: more processes cannot start, fewer leave GPUs idle."""
    found, nodes = _processes(launch), _nodes_asked(launch) or (launch.nodes if launch.launcher == "srun" else None)
    if found is None:
        return []
    count, at, key = found
    have = cluster.gpus_per_node
    wanted = as_int(nodes, 7) if nodes is not None else None
    if explicit and count != have:
        rule = "launch.gpus" if count > have else "launch.idle"
        text = f"{key} {count}, but a node of {cluster} has {have} GPU{'s' * (have != 1)}"
        return [_finding(rule, key, at, text, _process_fix(launch, have))]
    if wanted is None or nodes is None or count * wanted == cluster.world:
        return []
    rule = "launch.gpus" if count * wanted > cluster.world else "launch.idle"
    text = f"{wanted} nodes × {count} processes, but {cluster} has {cluster.world} GPUs"
    job = _job_nodes(launch)
    of_job = job is not None and job[0] == wanted  # torchrun follows it, or srun starts the processes
    name = "#SBATCH --nodes=" if of_job else "torchrun --nnodes "
    fix = [f"{name}{cluster.world // count}"] if cluster.world % count == 0 else []
    return [_finding(rule, "--nodes" if of_job else "--nnodes", job[1] if of_job and job else nodes, text, *fix)]


def _several_nodes(launch: LaunchCommand) -> int:
    """Return the nodes that the launch uses if it is known to use several, or else 0."""
    count = as_int(_nodes_asked(launch) or launch.nodes, 7) or 1
    if launch.launcher == "torchrun" and "nnodes" not in launch.launcher_args and launch.launcher_args:
        count = 1
    return count if count > 1 else 0


def _head(launch: LaunchCommand) -> Iterator[Finding]:
    """Report a rendezvous at localhost, which several nodes cannot share."""
    if not _several_nodes(launch) or launch.launcher != "torchrun":
        return
    for name in ("rdzv-endpoint", "master-addr"):
        setting = launch.launcher_args.get(name)
        if setting is None or setting.unresolved:
            continue
        host, _, port = str(setting.value).partition(":")
        if host in LOCAL:
            node = node_rank.FIRST_NODE
            value = f"{node}:{port}" if port else node
            text = f"--{name} {setting.value} with {_several_nodes(launch)} nodes: each node waits at itself"
            yield _finding("launch.head", f"--{name}", setting, text, f"torchrun --{name} {value}")


def _environment(launch: LaunchCommand, given: Cluster | None) -> Iterator[Finding]:
    """Yield variables that slow the training down; the nodes are those of the launch, or else of the given GPUs."""
    is_open = launch.nodes is None and launch.launcher not in ("torchrun", "srun")
    nodes = _several_nodes(launch) or (given.nodes if is_open and given is not None and given.nodes > 1 else 0)
    values = {name: str(one.value) for name, one in launch.env.items() if not one.unresolved}
    for one in bad_variables(values, nodes):
        setting = launch.env[one.name]
        where = f" on {nodes} nodes" if one.several_nodes else ""
        text = f"{one.name}={setting.value}{where}: {one.effect_on(given, str(setting.value))}"
        found = _finding("launch.environment", one.name, setting, text, one.fix(str(setting.value)))
        yield msgspec.structs.replace(found, severity="error") if one.stops else found

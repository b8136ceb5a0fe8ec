"""#SBATCH lines of a job script, and the variables SLURM sets from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

import msgspec

from meshwright.frameworks.shell.values import Unresolved
from meshwright.frameworks.types import SourcedValue, as_int

SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "t": "time",
    "p": "partition",
    "A": "account",
    "J": "job-name",
    "G": "gpus",
    "o": "output",
    "q": "qos",
    "e": "error",
    "c": "cpus-per-task",
    "w": "nodelist",
    "x": "exclude",
    "C": "constraint",
    "d": "dependency",
    "D": "chdir",
    "a": "array",
    "i": "input",
    "m": "distribution",
    "L": "licenses",
    "M": "clusters",
    "S": "core-spec",
    "B": "extra-node-info",
    "W": "wait",
    "T": "threads",
    "r": "relative",
}
GRES = re.compile(r"gpu(?::([A-Za-z][\w.-]*))?(?::([0-9]+))?(?:\(|$)")
TYPED_COUNT = re.compile(r"(?:([A-Za-z][\w.-]*):)?([0-9]+)")
CONSTRAINT = re.compile(
    r"(?<![a-z0-9])(gb300|gb200|gh200|b300|b200|h200|h100|h800|h20|a100|a800|l40s|l40|l4|v100|mi300x|mi250x|mi325x|mi355x)(?![a-z0-9])"
)
SEVERAL_SIZES = ("a100", "v100")  # GPUs whose memory a constraint tells apart: v100-32g
USAGE = re.compile(r"(?m)^#(?!SBATCH).*\bsbatch\b(?:.*\\\n#)*.*(?:--nodes\b|\s-N\b)")
"""A comment with the command that submits the script, and sets its nodes."""
Options = Mapping[str, SourcedValue]


def read_sbatch(text: str, where: str) -> tuple[dict[str, SourcedValue], list[Unresolved]]:
    """Return the sbatch options, and the #SBATCH lines that sbatch ignores."""
    options: dict[str, SourcedValue] = {}
    unread: list[Unresolved] = []
    commands_started = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#SBATCH") and line[7:8] in (" ", "\t", ""):
            if commands_started:
                unread.append(Unresolved(line, number, where, "sbatch ignores #SBATCH lines after the first command"))
            elif not _read_line(line[7:], number, where, options):
                unread.append(Unresolved(line, number, where, "the #SBATCH line cannot be parsed"))
        elif line.strip() and not line.startswith("#"):
            commands_started = True
    if "nodes" in options and USAGE.search(text):
        reason = "the command in a comment sets the nodes when it submits the job"
        options["nodes"] = msgspec.structs.replace(options["nodes"], unresolved=reason)
    return options, unread


def _read_line(rest: str, line: int, where: str, options: dict[str, SourcedValue]) -> bool:
    try:
        words = shlex.split(rest, comments=True)
    except ValueError:
        return False
    at = 0
    while at < len(words):
        following = words[at + 1] if at + 1 < len(words) else None
        name, value, used = option(words[at], following)
        if not name:
            return False
        options[name] = SourcedValue(value, line, where)
        at += used
    return True


def option(word: str, following: str | None) -> tuple[str, str | bool, int]:
    """Return the long name, value and word count of a SLURM option; the name is empty if it is not an option."""
    follows = following is not None and not following.startswith("-")
    if word.startswith("--") and len(word) > 2:
        name, equals, value = word[2:].partition("=")
        if equals or not follows:
            return name, value if equals else True, 1
        return name, following or "", 2
    if word.startswith("-") and len(word) > 1:
        name = SHORT.get(word[1], word[1])
        if len(word) > 2:
            return name, word[2:].removeprefix("="), 1
        return (name, following or "", 2) if follows else (name, True, 1)
    return "", "", 1


def node_count(options: Options) -> SourcedValue | None:
    """Return the requested number of nodes; a range such as 2-4 is unresolved."""
    setting = options.get("nodes")
    if setting is None or setting.unresolved:
        return setting
    count = as_int(setting, digits=7)
    if count is None and (same := re.fullmatch(r"([0-9]{1,7})-\1", str(setting.value))):
        count = int(same[1])
    if count is None:
        return SourcedValue(
            str(setting.value), setting.line, setting.file, "SLURM picks the number of nodes when the job starts"
        )
    return SourcedValue(count, setting.line, setting.file)


def tasks_per_node(options: Options) -> SourcedValue | None:
    """Return the tasks per node, as given or from the total."""
    setting = options.get("ntasks-per-node")
    if setting is not None:
        count = as_int(setting, digits=7)
        return setting if count is None else SourcedValue(count, setting.line, setting.file, setting.unresolved)
    return _over_nodes(options, options.get("ntasks"))


def _over_nodes(options: Options, total: SourcedValue | None) -> SourcedValue | None:
    count, nodes = as_int(total, digits=7), node_count(options)
    known = nodes is not None and not nodes.unresolved and int(nodes.value) > 0
    if total is None or count is None or nodes is None or not known or count % int(nodes.value):
        return None
    return SourcedValue(count // int(nodes.value), total.line, total.file)


def gpus_per_node(options: Options) -> SourcedValue | None:
    """Return the requested GPUs per node."""
    for name, pattern in (("gpus-per-node", TYPED_COUNT), ("gres", GRES)):
        setting = options.get(name)
        if setting is None:
            continue
        if setting.unresolved:
            return setting
        for entry in str(setting.value).removeprefix("gres:").split(","):
            found = pattern.match(entry.strip().removeprefix("gres/"))
            if found:
                return SourcedValue(int((found[2] or "1")[:7]), setting.line, setting.file)
    per_task, tasks = _counted(options, "gpus-per-task"), tasks_per_node(options)
    if per_task is not None and tasks is not None and not tasks.unresolved and isinstance(tasks.value, int):
        return SourcedValue(per_task.value * tasks.value, per_task.line, per_task.file)
    return _over_nodes(options, _counted(options, "gpus"))


def _counted(options: Options, name: str) -> SourcedValue | None:
    """Return the count in a value such as 8 or h100:8."""
    setting = options.get(name)
    found = TYPED_COUNT.fullmatch(str(setting.value)) if setting and not setting.unresolved else None
    return SourcedValue(int(found[2][:7]), setting.line, setting.file) if setting and found else None


def gpu_type(options: Options) -> str:
    """Return the requested GPU type in lower case; empty if none or several are named."""
    for name, pattern in (
        ("gpus-per-node", TYPED_COUNT),
        ("gres", GRES),
        ("gpus", TYPED_COUNT),
        ("gpus-per-task", TYPED_COUNT),
    ):
        setting = options.get(name)
        for entry in str(setting.value).split(",") if setting and not setting.unresolved else ():
            found = pattern.match(entry.strip().removeprefix("gres/"))
            if found and found[1]:
                return found[1].lower()
    constraint = options.get("constraint")
    text = str(constraint.value).lower() if constraint else ""
    named = set(CONSTRAINT.findall(text))
    if len(named) != 1:
        return ""
    name = named.pop()
    sizes = set(re.findall(rf"(?<![a-z0-9]){name}-?(\d+)gb?(?![a-z0-9])", text))
    return f"{name}-{sizes.pop()}" if name in SEVERAL_SIZES and len(sizes) == 1 else name


def slurm_variables(options: Options) -> dict[str, SourcedValue]:
    """Return the variables that SLURM sets in a job from its #SBATCH options."""
    nodes, tasks, gpus = node_count(options), tasks_per_node(options), gpus_per_node(options)
    total = options.get("ntasks")
    if total is None and nodes and tasks and isinstance(nodes.value, int) and isinstance(tasks.value, int):
        total = SourcedValue(nodes.value * tasks.value, tasks.line, tasks.file)
    known = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": total,
        "SLURM_NPROCS": total,
        "SLURM_NTASKS_PER_NODE": options.get("ntasks-per-node"),
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": options.get("gpus-per-node"),
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task"),
        "SLURM_JOB_NAME": options.get("job-name"),
        "SLURM_JOB_PARTITION": options.get("partition"),
        "SLURM_JOB_ACCOUNT": options.get("account"),
    }
    found = {name: setting for name, setting in known.items() if setting is not None and setting.value is not True}
    return {name: _as_expansion(name, setting) if setting.unresolved else setting for name, setting in found.items()}


def _as_expansion(name: str, setting: SourcedValue) -> SourcedValue:
    """Return an unknown variable as its expansion is written: a shell that gets its text must not take it as known."""
    return msgspec.structs.replace(setting, value=f"${name}")

"""The commands of a SkyPilot task: a YAML file whose `run` is a script, started on each node of `resources`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from meshwright import config_io
from meshwright.errors import InputError

_BLOCK = re.compile(r"run:\s*[|>][-+0-9]*\s*(#.*)?")
_TASK = re.compile(r"(?m)^(resources|num_nodes|file_mounts|workdir|setup|envs):")
_VARIABLE = re.compile(r"(?:envs|secrets)\.([A-Za-z_][A-Za-z0-9_]*)")
GPUS, NODES = "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NUM_NODES"


def task_script(text: str, path: str) -> str | None:
    """Return the script of a task, each command and variable in its line of the file; None if the file is no task."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if _BLOCK.fullmatch(line)), None)
    if start is None or not _TASK.search(text):
        return None
    block: list[str] = []
    for line in lines[start + 1 :]:
        if line.strip() and not line.startswith((" ", "\t")):
            break
        block.append(line)
    indent = min((len(line) - len(line.lstrip()) for line in block if line.strip()), default=0)
    before: list[str] = [""] * (start + 1)
    for name, value, number in _variables(text, path):
        at = number - 1 if 0 < number <= start else 0  # below the commands, they would be set too late
        before[at] += f"export {name}={shlex.quote(value)}; "
    return "\n".join([*before, *(line[indent:] for line in block)]) + "\n"


def _variables(text: str, path: str) -> Iterator[tuple[str, str, int]]:
    """Yield the variables that SkyPilot sets, with their lines."""
    try:
        found = config_io.parse_leaves(text, "yaml", path, [])
    except InputError:
        return
    for key, leaf in found.items():
        if (named := _VARIABLE.fullmatch(key)) and leaf.value is not None:
            yield named[1], str(leaf.value), leaf.line
    nodes = found.get("num_nodes")
    if nodes is None or isinstance(nodes.value, int):
        yield NODES, "1" if nodes is None else str(nodes.value), 0 if nodes is None else nodes.line
    for key, leaf in found.items():
        count = str(leaf.value)
        if key == "resources.accelerators":  # H100:8, or H100 for one
            count = count.partition(":")[2] or "1"
        elif not key.startswith("resources.accelerators."):
            continue
        if count.isdigit():
            yield GPUS, count, leaf.line

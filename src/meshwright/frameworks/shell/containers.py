"""The container in which a script starts its programs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from meshwright.frameworks.shell.launch_prefixes import BIND, IMAGE, unwrap
from meshwright.frameworks.shell.launcher import launch_command
from meshwright.frameworks.shell.values import Script
from meshwright.frameworks.types import SourcedValue

TOOLS = ("apptainer", "singularity", "docker", "podman", "podman-hpc", "shifter", "enroot", "kubectl")
APPTAINER = ("apptainer", "singularity")  # two names of one tool
FOLDERS = ("pwd", "cwd")  # their options that set the working folder
PYXIS = ("container-", "no-container-")  # srun's options


class Container(msgspec.Struct, frozen=True):
    """A container and its options, as the script has them."""

    kind: str  # pyxis or apptainer; empty for another tool
    words: str
    image: str
    mounts: tuple[str, ...]  # SOURCE:/PATH, or SOURCE for both
    folder: str = ""  # in which it starts the program, if the script sets it


def container_of(script: Script) -> Container | None:
    """Return the container in which a script starts its training, or else another program; None if it uses none."""
    training = launch_command(script)
    for command in (*((training,) if training else ()), *script.commands, *script.possible):
        options = unwrap(command.words).options
        for tool in options:
            container = _pyxis(options[tool]) if tool == "srun" else _tool(tool, options[tool])
            if container is not None:
                return container
    return _pyxis(script.sbatch, "#SBATCH")


def _pyxis(options: Mapping[str, SourcedValue], start: str = "srun") -> Container | None:
    texts = {name: _text(one) for name, one in options.items() if name.startswith(PYXIS)}
    if not texts:
        return None
    words = " ".join(f"--{name}={text}" if text else f"--{name}" for name, text in texts.items())
    mounts = texts.get("container-mounts", "").split(",")
    folder = texts.get("container-workdir", "")
    return Container("pyxis", f"{start} {words}", texts.get("container-image", ""), tuple(filter(None, mounts)), folder)


def _tool(tool: str, options: Mapping[str, SourcedValue]) -> Container | None:
    if tool not in TOOLS:
        return None
    image, binds = (_text(options[name]) if name in options else "" for name in (IMAGE, BIND))
    is_apptainer = tool in APPTAINER
    words = f"{tool} exec --bind {binds} {image}" if is_apptainer and binds else f"{tool} {image}".strip()
    mounts = tuple(filter(None, binds.split(","))) if is_apptainer else ()
    folder = next((_text(options[name]) for name in FOLDERS if name in options), "") if is_apptainer else ""
    return Container("apptainer" if is_apptainer else "", words, image, mounts, folder)


def _text(one: SourcedValue) -> str:
    return "" if one.value in (None, True) else str(one.value)

"""Commands that start a front end: their program, arguments and GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.config_io.scalars import resolve
from meshwright.errors import InputError
from meshwright.frameworks.common import torchrun_gpu_request, visible_devices
from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.front_ends.describe import FrontEnd, table
from meshwright.frameworks.front_ends.keys import PROGRAM_OPTIONS
from meshwright.frameworks.hf_arguments import as_parsed
from meshwright.frameworks.trainer import open_referenced_file
from meshwright.frameworks.types import Settings, SourcedValue, as_int

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand


PER_NODE, VISIBLE = "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES"
RANK_PER_DEVICE = ("accelerate", "deepspeed")  # launchers that start one process per visible device, if none is named
FRONT_END = "front-end"  # launcher of their commands
TRAININGS = ("sft", "pt", "rlhf", "train", "dpo", "grpo", "kto", "reward", "rloo", "bco", "cpo", "orpo", "gkd")
"""Subcommands that train."""
SCRIPTS = (
    ("swift", re.compile(r"(?:^|[/.])swift[/.]cli[/.](sft|pt|rlhf)(?:\.py)?$")),
    ("megatron", re.compile(r"(?:^|[/.])swift[/.]cli[/.]_megatron[/.](sft|pt|rlhf)(?:\.py)?$")),
    ("axolotl", re.compile(r"(?:^|[/.])axolotl[/.]cli[/.](train)(?:\.py)?$")),
    ("trl", re.compile(r"(?:^|/)trl/scripts/(dpo|grpo|kto|reward|rloo)\.py$")),  # sft: with Accelerate's config
)
"""Scripts and modules of the front ends by program, as Python, torchrun and accelerate launch start them."""
CONFIGS = (".yaml", ".yml", ".json")


def training_launch(one: FrontEnd, content: Content) -> LaunchCommand | None:
    for launch in content.launches:
        program, _, subcommand = program_of(launch).partition(" ")
        if program in one.programs and subcommand in TRAININGS:
            return launch
    return None


def program_of(launch: LaunchCommand) -> str:
    """Return the program and its subcommand, `swift sft`, also if a launcher starts its script; else empty."""
    text = str(launch.program.value)
    if launch.launcher == FRONT_END:
        return text
    found = ((program, pattern.search(text)) for program, pattern in SCRIPTS)
    return next((f"{program} {script[1]}" for program, script in found if script), "")


def with_command_settings(one: FrontEnd, content: Content) -> Content:
    """Return a script with the settings of its training command, as a YAML file has them."""
    launch = training_launch(one, content) if content.format == "shell" else None
    if launch is None:
        return content
    found = command_settings(one, content, launch)
    settings = {key: msgspec.structs.replace(setting, value=_plain(setting.value)) for key, setting in found.items()}
    return msgspec.structs.replace(content, settings=settings)


def _plain(value: Any) -> Any:
    return resolve(value) if isinstance(value, str) and value else value


def command_settings(one: FrontEnd, content: Content, launch: LaunchCommand) -> dict[str, SourcedValue]:
    """Return the arguments of a command, and the settings of the file that it names."""
    arguments = _arguments(launch.args)
    written = {name: setting for name, setting in arguments.items() if name not in PROGRAM_OPTIONS}
    name = one.programs[program_of(launch).split(" ")[0]]
    older = one.removed.get(name, {})
    read = as_parsed(written, table(name), shortened=not one.uses_click, every_switch=one.uses_click, older=older)
    arguments = {**{key: arguments[key] for key in arguments if key in PROGRAM_OPTIONS}, **read}
    named = next((arg for arg in launch.args if str(arg.value).endswith(CONFIGS)), None)
    file = arguments.pop("config", None) or (named if launch.args and named is launch.args[0] else None)
    if file is None:
        return arguments
    if file is named:  # llamafactory-cli train FILE.yaml key=value
        arguments |= {key: one for word in launch.args[1:] for key, one in _override(word)}
    try:
        return {**open_referenced_file(content, file).settings, **arguments}
    except InputError:
        if not arguments:
            raise
        return arguments


def _arguments(argv: tuple[SourcedValue, ...]) -> dict[str, SourcedValue]:
    """Return `--name value …` by name; several values are a list."""
    found: dict[str, SourcedValue] = {}
    name = ""
    for word in argv:
        text = str(word.value)
        if text == "--":  # options of the launcher follow
            break
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = msgspec.structs.replace(word, value=value if equals else True)
        elif name:
            before = found[name].value
            many = [*before, text] if isinstance(before, list) else text if before is True else [before, text]
            found[name] = msgspec.structs.replace(word, value=many, line=found[name].line)
    return found


def _override(word: SourcedValue) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the key and the value of an override after a file: key=value."""
    key, equals, value = str(word.value).partition("=")
    if equals and key.isidentifier():
        yield key, msgspec.structs.replace(word, value=_plain(value))


def gpus_of(one: FrontEnd, launch: LaunchCommand) -> GpuRequest:
    """Return the GPUs of a command: NPROC_PER_NODE, or the visible devices."""
    per_node, nodes = as_int(launch.env.get(PER_NODE)), as_int(launch.env.get("NNODES"))
    devices = launch.env.get(VISIBLE)
    stated = launch.launcher_args.get("num-processes")
    if processes := as_int(stated):
        return GpuRequest(world_size=processes, source=stated)
    count = per_node or len(visible_devices(devices))
    if not per_node and launch.gpus_per_node is not None:
        return torchrun_gpu_request(launch)
    if not count or spreads_layers(one, rank_env(launch)) or ("NNODES" in launch.env and nodes is None):
        return GpuRequest()
    return GpuRequest(nodes=nodes or 1, gpus_per_node=count, source=launch.env.get(PER_NODE) or devices)


def rank_env(launch: LaunchCommand) -> Settings:
    """Return the variables of a command; the processes that its launcher starts are those of NPROC_PER_NODE."""
    started = launch.gpus_per_node or launch.launcher_args.get("num-processes")
    devices = launch.env.get(VISIBLE)
    if started is None and devices is not None and launch.launcher in RANK_PER_DEVICE:
        started = msgspec.structs.replace(devices, value=len(visible_devices(devices)))
    return launch.env if started is None else {**launch.env, PER_NODE: started}


def spreads_layers(one: FrontEnd, env: Settings) -> bool:
    """Return whether one process sees several devices: transformers then places layers on all of them."""
    several = len(visible_devices(env.get(VISIBLE))) > 1
    return several and PER_NODE not in env and not one.starts_a_rank_per_device


def subcommand_of(one: FrontEnd, content: Content) -> str:
    launch = training_launch(one, content) if content.format == "shell" else None
    return "" if launch is None else program_of(launch).partition(" ")[2]

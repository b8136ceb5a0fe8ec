"""Find the torchtitan commands in a script and parse their flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.frameworks.common import ALL_ARGUMENTS, OTHER_TASK, format_toml
from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.torchtitan.format_override import flag, flag_030, flag_main
from meshwright.frameworks.torchtitan.python_config import config_functions
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.torchtitan import SAMPLE_KEYS, TOKEN_KEYS
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

TRAIN_MODULE = re.compile(r"torchtitan\.([\w.]+\.)?train")  # of all models, or of one, such as flux
SCRIPT = re.compile(r"run_train\w*\.sh")
CONFIG_FILE = ("--job.config_file", "--job.config-file")
ASSIGNMENT = re.compile(r"\w+(\.\w+)+=")
SETTING_FLAG = re.compile(r"--(job|model|training|parallelism|optimizer|lr_scheduler|checkpoint|compile|metrics)[.]")
RECOMPUTE = re.compile(r"activation[-_]checkpoint:([\w-]+)")
CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


class Run(msgspec.Struct, frozen=True):
    """A training run that a script starts."""

    args: tuple[SourcedValue, ...]
    env: Settings
    gpu_request: GpuRequest
    program: SourcedValue  # the program argument
    by_script: bool  # started by run_train.sh, which reads environment variables


def runs(content: Content) -> Iterator[Run]:
    for launch in content.launches:
        if _starts(launch):
            yield Run(
                launch.args,
                launch.env,
                _gpu_request(launch.nodes, launch.gpus_per_node, launch.gpu),
                launch.program,
                False,
            )
    for command in content.script.commands if content.script else ():
        for index, argument in enumerate(command.words):
            if SCRIPT.fullmatch(Path(str(argument.value)).name):
                gpus = command.env.get("NGPU") or SourcedValue(8, argument.line, argument.file)
                yield Run(command.words[index + 1 :], command.env, _gpu_request(None, gpus, ""), argument, True)
                break


def _starts(launch: LaunchCommand) -> bool:
    name = str(launch.program.value)
    if _reads_config(launch) and not OTHER_TASK.search(Path(name).name):
        return True  # a trainer beside torchtitan that has its config manager
    if launch.is_module:
        return bool(TRAIN_MODULE.fullmatch(name))
    has_setting = any(
        SETTING_FLAG.match(str(arg.value).replace("-", "_").replace("__", "--", 1)) for arg in launch.args
    )
    return name.endswith("torchtitan/train.py") or (Path(name).name == "train.py" and has_setting)


def _reads_config(launch: LaunchCommand) -> bool:
    """Return whether a program is given one of torchtitan's config files."""
    words = [str(arg.value) for arg in launch.args]
    given = [*pairwise(words), *(word.partition("=")[::2] for word in words)]
    return any(flag in CONFIG_FILE and value for flag, value in given)


def _gpu_request(nodes: SourcedValue | None, per_node: SourcedValue | None, gpu: str) -> GpuRequest:
    count, gpus = as_int(nodes), as_int(per_node)
    return GpuRequest(
        nodes=count or (1 if gpus and nodes is None else None), gpus_per_node=gpus, gpu=gpu, source=per_node
    )


def parse_flags(args: Iterable[SourcedValue]) -> tuple[dict[str, SourcedValue], tuple[Finding, ...]]:
    """Parse flags: --section.key value, --section.key=value, --section.flag, --section.no-flag."""
    settings: dict[str, SourcedValue] = {}
    findings: list[Finding] = []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        text = str(argument.value)
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            values = [value] if equals else []
            max_values = 2 if name.endswith("betas") else 1
            while not equals and remaining and _is_value(remaining[0]) and len(values) < max_values:
                values.append(str(remaining[0].value))
                argument = msgspec.structs.replace(argument, unresolved=argument.unresolved or remaining[0].unresolved)
                remaining.pop(0)
            while "." not in name and remaining and ASSIGNMENT.match(str(remaining[0].value)):
                values.append(str(remaining.pop(0).value))  # a fork's --cfg-options section.key=value …
            key, parsed_value = _setting(name.replace("-", "_"), values)
            settings[key] = msgspec.structs.replace(argument, value=parsed_value)
        elif mode := RECOMPUTE.fullmatch(text):
            settings["activation-checkpoint"] = msgspec.structs.replace(argument, value=mode[1].replace("-", "_"))
        elif not argument.unresolved and text:
            message = f"unexpected argument {text}: settings are --section.key value"
            findings.append(
                Finding("torchtitan.stray-argument", "error", text, message, (), file=argument.file, line=argument.line)
            )
    return settings, tuple(findings)


def _is_flag(argument: SourcedValue) -> bool:
    text = str(argument.value)
    return text.startswith("--") or RECOMPUTE.fullmatch(text) is not None


def _is_value(argument: SourcedValue) -> bool:
    """Return whether a word may be the value of the flag before it; the script's own arguments are further flags."""
    return not _is_flag(argument) and str(argument.value) not in ALL_ARGUMENTS


def _setting(name: str, values: list[str]) -> tuple[str, Any]:
    section, _, last = name.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}" if section else last.removeprefix("no_")
    if not values:
        return (positive, False) if last.startswith("no_") and name not in config_keys("torchtitan") else (name, True)
    config_key = config_keys("torchtitan").get(name)
    if config_key is not None and config_key.type == "list":
        return name, [_value(item) for value in values for item in value.split(",")]
    return name, _value(values[0]) if len(values) == 1 else [_value(value) for value in values]


def _value(text: str) -> Any:
    plain = text.strip()
    if plain.lower() in CONSTANTS:
        return CONSTANTS[plain.lower()]
    if re.fullmatch(r"[+-]?[0-9]{1,15}", plain):
        return int(plain)
    return float(plain) if re.fullmatch(r"[+-]?[0-9]{0,15}\.?[0-9]{1,15}([eE][+-]?[0-9]{1,3})?", plain) else text


class PresetName(msgspec.Struct, frozen=True):
    """The preset (--module, --config) that a command starts from."""

    module: SourcedValue
    config: SourcedValue


def preset_of_command(run: Run, settings: Mapping[str, SourcedValue]) -> PresetName | None:
    """Return the preset, or None if the command is for the 0.2 line."""
    module, config = settings.get("module"), settings.get("config")
    if run.by_script:
        env = run.env
        module, config = module or env.get("MODULE"), config or env.get("CONFIG")
        if module is None and config is None and ("CONFIG_FILE" in env or "job.config_file" in settings):
            return None
        module = module or msgspec.structs.replace(run.program, value="llama3")
        config = config or msgspec.structs.replace(run.program, value="llama3_debugmodel")
    elif module is None and config is None:
        return None
    missing = msgspec.structs.replace(run.program, value="")
    return PresetName(module or missing, config or missing)


def counts_samples(settings: Mapping[str, SourcedValue]) -> bool:
    """Return whether a command gives batch sizes in samples, as 0.3.0 does, instead of tokens."""
    return any(key in settings for key in SAMPLE_KEYS) and not any(key in settings for key in TOKEN_KEYS)


def formatter_for(content: Content) -> Callable[[str, Any], str]:
    """Return the formatter for a file or command: TOML, or flags of 0.2, 0.3.0 or main."""
    if content.format == "toml":
        return format_toml
    if content.format == "python":
        functions = config_functions(content)
        named = content.settings.get("config")
        one = functions.get(str(named.value)) if named is not None else next(iter(functions.values()), None)
        return flag_030 if one is not None and counts_samples(one.settings) else flag_main
    run = next(runs(content), None)
    if run is None:
        return flag
    settings = parse_flags(run.args)[0]
    if preset_of_command(run, settings) is None:
        return flag
    return flag_030 if counts_samples(settings) else flag_main

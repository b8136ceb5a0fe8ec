"""Read `torchrun … run_recipe.py --recipe NAME [flags] KEY=VALUE …` or train.sh in a shell script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.common import torchrun_gpu_request
from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.load import open_file, program_path
from meshwright.frameworks.megatron_bridge import keys, snippet
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun, infer_goal, parse_value
from meshwright.frameworks.types import SourcedValue, as_int

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

RUNNERS = ("run_recipe.py", "setup_experiment.py", "run_script.py", "launch_with_nemo_run.py")
SUBMIT = "train.sh"
PACKAGE = "megatron.bridge"
TAKES_OVERRIDES = "override"  # in the names of Megatron-Bridge's functions that a program applies KEY=VALUE with
OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.\[\]-]*)(=(.*))?", re.DOTALL)
PERFORMANCE = {
    "-mr": "model", "--model_recipe_name": "model", "-ng": "gpus", "--num_gpus": "gpus", "-g": "gpu", "--gpu": "gpu",
    "-c": "precision", "--compute_dtype": "precision", "--task": "task", "-gn": "per_node",
    "--gpus_per_node": "per_node",
    "-cv": "variant", "--config_variant": "variant",
}  # fmt: skip
"""Flags of the older performance launcher, which builds a recipe name from them."""
ENVIRONMENT = ("-E", "--env", "-ce", "--custom_env_vars")
"""Its options that set environment variables: one NAME=VALUE, or several with commas between them."""


class Run(msgspec.Struct, frozen=True):
    """One call of the runner in a script."""

    program: SourcedValue
    args: tuple[SourcedValue, ...]
    gpu_request: GpuRequest = GpuRequest()
    env: dict[str, SourcedValue] = {}

    @property
    def performance(self) -> bool:
        """Whether it is the older benchmark launcher."""
        return "performance" in PurePosixPath(str(self.program.value)).parts


def runs(content: Content) -> list[Run]:
    """Return every call of the runner in a script."""
    found = [_run(one) for one in content.launches if PurePosixPath(str(one.program.value)).name in RUNNERS]
    for command in content.script.commands if content.script else ():
        named = [at for at, word in enumerate(command.words) if _is_submit(word)]
        if named and named[0] <= 1:
            words = command.words[named[0] :]
            found.append(Run(words[0], tuple(words[1:]), env=dict(command.env)))
    return found


def started(content: Content) -> tuple[LaunchCommand, Content] | None:
    """Return the first Python file of Megatron-Bridge beside a script that the script starts, and its launch."""
    for launch in content.launches:
        path = program_path(content, launch.program)
        try:
            found = open_file(path) if path is not None and path.is_file() else None
        except (InputError, OSError):
            continue
        if found is not None and PACKAGE in found.text:
            return launch, found
    return None


def names_runner(content: Content) -> bool:
    """Return whether a script mentions the runner."""
    return "training/run_recipe.py" in content.all_text


def _is_submit(word: SourcedValue) -> bool:
    path = PurePosixPath(str(word.value))
    return path.name == SUBMIT and path.parent.name in ("training", "", ".")


def _run(launch: LaunchCommand) -> Run:
    return Run(launch.program, launch.args, torchrun_gpu_request(launch), dict(launch.env))


def read(content: Content) -> ParsedRun:
    """Read the first training that a script starts."""
    found = runs(content)
    if not found and (program := started(content)) is not None:
        return _of_program(*program)
    if not found and names_runner(content):
        raise InputError(
            "builds its command at run time, so it cannot be parsed",
            field="file",
            value=content.path,
            fix=["write out the command: torchrun … run_recipe.py --recipe NAME KEY=VALUE …"],
        )
    if not found:
        raise InputError("starts no Megatron-Bridge training", field="file", value=content.path)
    first = next((run for run in found if any(str(arg.value) in NAMES for arg in run.args)), found[0])
    more = (f"the script starts {len(found)} trainings; the first was checked",) if len(found) > 1 else ()
    return _performance(first, more) if first.performance else _training(first, more)


def _of_program(launch: LaunchCommand, program: Content) -> ParsedRun:
    """Return the training of a Python file, with the GPUs and variables of its launch and the overrides that it reads.

    Options of the user's own program are listed: what they do is known only to the program.
    """
    applies = TAKES_OVERRIDES in program.text
    overrides = [one for one in launch.args if applies and OVERRIDE.fullmatch(str(one.value)) and "=" in str(one.value)]
    unread = " ".join(str(one.value) for one in launch.args if one not in overrides)
    notes = [f"the training is read from {program.path}"]
    notes += [f"not read, because only {program.path} knows its arguments: {unread}"] if unread else []
    run = snippet.read(program)
    return msgspec.structs.replace(
        run,
        settings={**run.settings, **_split(overrides)[1]},
        gpu_request=torchrun_gpu_request(launch),
        env=dict(launch.env),
        notes=(*run.notes, *notes),
    )


NAMES = ("--recipe", "--model", *PERFORMANCE)


def _training(run: Run, notes: Sequence[str]) -> ParsedRun:
    flags, overrides = _split(run.args)
    settings = {**flags, **overrides}
    recipe = settings.pop("--recipe", None)
    mode, stem = settings.get("--mode"), settings.pop("--model", None)
    if recipe is None and stem is not None:
        task = keys.MODES.get(str(mode.value) if mode else "", "")
        recipe = msgspec.structs.replace(stem, value=f"{stem.value}_{task}_config") if task else stem
    elif recipe is not None and stem is not None:
        settings["--model"] = stem
    if recipe is not None:
        settings["--recipe"] = recipe
    goal_name = keys.MODES.get(str(mode.value)) if mode is not None else None
    goal = goal_name or (infer_goal(str(recipe.value)) if recipe is not None else None)
    return ParsedRun(
        "command",
        settings,
        recipe,
        goal,  # type: ignore[arg-type]  # MODES maps to goals
        gpu_request=_gpu_request(run, settings),
        env=run.env,
        notes=tuple(notes),
    )


def _gpu_request(run: Run, settings: dict[str, SourcedValue]) -> GpuRequest:
    """Return the GPUs of torchrun, or the --nodes and --gpus-per-node of train.sh."""
    nodes, per_node = (settings.pop(key, None) for key in ("--nodes", "--gpus-per-node"))
    if nodes is None and per_node is None:
        return run.gpu_request
    return GpuRequest(
        nodes=as_int(nodes), gpus_per_node=as_int(per_node), gpu=run.gpu_request.gpu, source=per_node or nodes
    )


def _split(args: Sequence[SourcedValue]) -> tuple[dict[str, SourcedValue], dict[str, SourcedValue]]:
    """Split arguments into flags and overrides."""
    flags: dict[str, SourcedValue] = {}
    overrides: dict[str, SourcedValue] = {}
    at = 0
    while at < len(args):
        setting, text = args[at], str(args[at].value)
        if not text.startswith("-"):
            overrides |= dict(_override(setting))
            at += 1
            continue
        name, equals, joined = text.partition("=")
        if _takes_value(name) and not equals and at + 1 < len(args):
            value, at = args[at + 1], at + 2
        else:
            value, at = msgspec.structs.replace(setting, value=joined if equals else True), at + 1
            if not equals and name not in (*keys.SWITCHES, *keys.LAUNCH_SWITCHES) and _unknown_takes_value(args, at):
                at += 1
        if name not in (*keys.SWITCHES, *keys.LAUNCH_SWITCHES, *IGNORED_FLAGS):
            key = keys.FLAGS.get(name) or keys.RUNNER.get(name) or name
            flags[key] = _typed(value) if key in keys.CONVENIENCE else value
        elif name == "--deterministic":
            flags["--deterministic"] = setting
    return flags, overrides


IGNORED_FLAGS = frozenset(keys.LAUNCH) - {"--nodes", "--gpus-per-node"}


def _takes_value(name: str) -> bool:
    return name in keys.FLAGS or name in keys.RUNNER or name in keys.LAUNCH or name in PERFORMANCE


def _unknown_takes_value(args: Sequence[SourcedValue], at: int) -> bool:
    """Return whether the argument after an unknown flag is likely its value."""
    return at < len(args) and not str(args[at].value).startswith("-") and "=" not in str(args[at].value)


def _typed(setting: SourcedValue) -> SourcedValue:
    return setting if setting.unresolved else msgspec.structs.replace(setting, value=parse_value(str(setting.value)))


def _override(setting: SourcedValue) -> Iterator[tuple[str, SourcedValue]]:
    """Parse a Hydra override; keep the + on a key that does not exist, for the rule that reports it."""
    found = OVERRIDE.fullmatch(str(setting.value))
    if setting.unresolved and (found is None or found[3] is None):
        yield keys.UNREAD_ARGS, setting
        return
    if found is None or (found[3] is None and found[1] != "~"):
        if not setting.unresolved and str(setting.value).strip():
            yield f"-{setting.value}", setting
        return
    sign, key = found[1] or "", found[2]
    if sign == "~":
        yield key, msgspec.structs.replace(setting, unresolved="deleted with ~")
    elif setting.unresolved:
        yield key, msgspec.structs.replace(setting, value=found[4])
    else:
        section, _, name = key.partition(".")
        first, _, below = name.partition(".")
        exists = not sign or key in _table() or first in keys.fields(section)
        exists = exists or (bool(below) and section not in keys.SECTIONS)  # of a map, such as tokenizer kwargs
        yield (key if exists else f"+{key}"), msgspec.structs.replace(setting, value=parse_value(found[4]))


def _table() -> frozenset[str]:
    from meshwright.recipes.key_maps import config_keys

    return frozenset(config_keys(keys.KEY_MAP))


PRECISIONS = {"fp8_cs": "fp8cs", "fp8_mx": "fp8mx", "fp8_sc": "fp8sc", "fp8_ds": "fp8ds"}


def _performance(run: Run, notes: Sequence[str]) -> ParsedRun:
    """Read the older benchmark launcher: build the recipe name from its flags."""
    parts: dict[str, SourcedValue] = {}
    settings: dict[str, SourcedValue] = {}
    env = dict(run.env)
    at, args = 0, run.args
    while at < len(args):
        name, equals, joined = str(args[at].value).partition("=")
        part = PERFORMANCE.get(name)
        if name in ENVIRONMENT and (equals or at + 1 < len(args)):
            env |= _variables(msgspec.structs.replace(args[at], value=joined) if equals else args[at + 1], name)
            at += 1 if equals else 2
            continue
        if part is None:
            if equals and not name.startswith("-"):
                settings |= dict(_override(args[at]))
            at += 1
            continue
        value = msgspec.structs.replace(args[at], value=joined) if equals else args[min(at + 1, len(args) - 1)]
        parts[part] = value
        at += 1 if equals else 2
    recipe = _name(parts)
    if recipe is not None:
        settings["--recipe"] = recipe
    gpus = as_int(parts.get("gpus"))
    gpu = str(parts["gpu"].value).upper() if "gpu" in parts and not parts["gpu"].unresolved else ""
    request = GpuRequest(
        gpus_per_node=as_int(parts.get("per_node")), world_size=gpus, gpu=gpu, source=parts.get("gpus")
    )
    goal = infer_goal(str(recipe.value)) if recipe is not None else None
    return ParsedRun("command", settings, recipe, goal, gpu_request=request, env=env, notes=tuple(notes))


def _variables(setting: SourcedValue, option: str) -> dict[str, SourcedValue]:
    """Return the environment variables that an option of the performance launcher sets."""
    text = str(setting.value)
    pairs = [text] if option in ENVIRONMENT[:2] else text.split(",")
    found = (one.partition("=") for one in pairs)
    return {name: msgspec.structs.replace(setting, value=value) for name, equals, value in found if equals}


def _name(parts: dict[str, SourcedValue]) -> SourcedValue | None:
    needed = [parts.get(part) for part in ("model", "gpus", "gpu", "precision")]
    if any(setting is None for setting in needed):
        return None
    model, gpus, gpu, precision = (setting for setting in needed if setting is not None)
    task = str(parts["task"].value) if "task" in parts else "pretrain"
    format = PRECISIONS.get(str(precision.value), str(precision.value))
    variant = f"_{parts['variant'].value}" if "variant" in parts else ""
    name = f"{model.value}_{'peft' if task == 'lora' else task}_{gpus.value}gpu_{gpu.value}_{format}{variant}_config"
    unresolved = [setting.unresolved for setting in needed if setting is not None and setting.unresolved]
    return msgspec.structs.replace(model, value=name, unresolved=unresolved[0] if unresolved else "")

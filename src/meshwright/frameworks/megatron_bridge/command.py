"""The run command in a shell script: `torchrun … run_recipe.py --recipe NAME [flags] KEY=VALUE …`, or train.sh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.common import gpu_request_of
from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.megatron_bridge import keys
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun, goal_of, plain
from meshwright.frameworks.types import SourcedValue, as_int

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

RUNNERS = ("run_recipe.py", "setup_experiment.py", "run_script.py", "launch_with_nemo_run.py")
SUBMIT = "train.sh"
OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.\[\]-]*)(=(.*))?", re.DOTALL)
PERFORMANCE = {
    "-mr": "model", "--model_recipe_name": "model", "-ng": "gpus", "--num_gpus": "gpus", "-g": "gpu", "--gpu": "gpu",
    "-c": "precision", "--compute_dtype": "precision", "--task": "task", "-gn": "per_node",
    "--gpus_per_node": "per_node",
    "-cv": "variant", "--config_variant": "variant",
}  # fmt: skip
"""Flags of the older performance launcher, which puts a recipe name together."""


class Run(msgspec.Struct, frozen=True):
    """One start of the runner in a script."""

    program: SourcedValue
    args: tuple[SourcedValue, ...]
    asked: GpuRequest = GpuRequest()
    env: dict[str, SourcedValue] = {}

    @property
    def performance(self) -> bool:
        """Whether it is the older launcher of benchmarks."""
        return "performance" in PurePosixPath(str(self.program.value)).parts


def runs(content: Content) -> list[Run]:
    """Every start of the runner that a script makes."""
    found = [_run(one) for one in content.launches if PurePosixPath(str(one.program.value)).name in RUNNERS]
    for command in content.script.commands if content.script else ():
        named = [at for at, word in enumerate(command.words) if _is_submit(word)]
        if named and named[0] <= 1:
            words = command.words[named[0] :]
            found.append(Run(words[0], tuple(words[1:]), env=dict(command.env)))
    return found


def names_runner(content: Content) -> bool:
    """Whether a script speaks of the runner at all."""
    return "training/run_recipe.py" in content.text


def _is_submit(word: SourcedValue) -> bool:
    path = PurePosixPath(str(word.value))
    return path.name == SUBMIT and path.parent.name in ("training", "", ".")


def _run(one: LaunchCommand) -> Run:
    asked = gpu_request_of(one)
    if one.launcher == "torchrun" and one.nodes is None and asked.gpus_per_node is not None:
        asked = msgspec.structs.replace(asked, nodes=1)  # what torchrun takes when nobody says it
    return Run(one.program, one.args, asked, dict(one.env))


def read(content: Content) -> ParsedRun:
    """The first training that a script starts."""
    found = runs(content)
    if not found and names_runner(content):
        raise InputError(
            "puts its command together while it runs, so that nothing of it can be read",
            field="file",
            value=content.path,
            fix=["write the command out: torchrun … run_recipe.py --recipe NAME KEY=VALUE …"],
        )
    if not found:
        raise InputError("starts no training of Megatron-Bridge", field="file", value=content.path)
    first = next((run for run in found if any(str(arg.value) in NAMES for arg in run.args)), found[0])
    more = (f"the script starts {len(found)} trainings; the first was read",) if len(found) > 1 else ()
    return _performance(first, more) if first.performance else _training(first, more)


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
    goal = goal_name or (goal_of(str(recipe.value)) if recipe is not None else None)
    return ParsedRun(
        "command",
        settings,
        recipe,
        goal,  # type: ignore[arg-type]  # the values of MODES are goals
        asked=_asked(run, settings),
        env=run.env,
        notes=tuple(notes),
    )


def _asked(run: Run, settings: dict[str, SourcedValue]) -> GpuRequest:
    """The launcher's GPUs: those of torchrun, or the nodes that train.sh is told."""
    nodes, per_node = (settings.pop(key, None) for key in ("--nodes", "--gpus-per-node"))
    if nodes is None and per_node is None:
        return run.asked
    return GpuRequest(nodes=as_int(nodes), gpus_per_node=as_int(per_node), gpu=run.asked.gpu, source=per_node or nodes)


def _split(args: Sequence[SourcedValue]) -> tuple[dict[str, SourcedValue], dict[str, SourcedValue]]:
    """Flags with their values, and the overrides that come on top of them."""
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
        if name not in (*keys.SWITCHES, *keys.LAUNCH_SWITCHES, *UNREAD):
            key = keys.FLAGS.get(name) or keys.RUNNER.get(name) or name
            flags[key] = _typed(value) if key in keys.CONVENIENCE else value
        elif name == "--deterministic":
            flags["--deterministic"] = setting
    return flags, overrides


UNREAD = frozenset(keys.LAUNCH) - {"--nodes", "--gpus-per-node"}


def _takes_value(name: str) -> bool:
    return name in keys.FLAGS or name in keys.RUNNER or name in keys.LAUNCH or name in PERFORMANCE


def _unknown_takes_value(args: Sequence[SourcedValue], at: int) -> bool:
    """Whether the word after a flag that nobody knows is likely its value."""
    return at < len(args) and not str(args[at].value).startswith("-") and "=" not in str(args[at].value)


def _typed(setting: SourcedValue) -> SourcedValue:
    return setting if setting.unresolved else msgspec.structs.replace(setting, value=plain(str(setting.value)))


def _override(setting: SourcedValue) -> Iterator[tuple[str, SourcedValue]]:
    """One override in Hydra's words; what is added with + under a name that does not exist goes nowhere."""
    found = OVERRIDE.fullmatch(str(setting.value))
    if found is None or (found[3] is None and found[1] != "~"):
        if not setting.unresolved and str(setting.value).strip():
            yield f"-{setting.value}", setting
        return
    sign, key = found[1] or "", found[2]
    if sign == "~":
        yield key, msgspec.structs.replace(setting, unresolved="it is deleted with ~")
    elif setting.unresolved:
        yield key, msgspec.structs.replace(setting, value=found[4])
    else:
        section, _, name = key.partition(".")
        exists = not sign or key in _table() or name in keys.fields(section)
        yield (key if exists else f"+{key}"), msgspec.structs.replace(setting, value=plain(found[4]))


def _table() -> frozenset[str]:
    from meshwright.recipes.key_maps import config_keys

    return frozenset(config_keys(keys.TABLE))


PRECISIONS = {"fp8_cs": "fp8cs", "fp8_mx": "fp8mx", "fp8_sc": "fp8sc", "fp8_ds": "fp8ds"}


def _performance(run: Run, notes: Sequence[str]) -> ParsedRun:
    """The older launcher of benchmarks: a name from its parts."""
    parts: dict[str, SourcedValue] = {}
    settings: dict[str, SourcedValue] = {}
    at, args = 0, run.args
    while at < len(args):
        name, equals, joined = str(args[at].value).partition("=")
        part = PERFORMANCE.get(name)
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
    asked = GpuRequest(gpus_per_node=as_int(parts.get("per_node")), world_size=gpus, gpu=gpu, source=parts.get("gpus"))
    goal = goal_of(str(recipe.value)) if recipe is not None else None
    return ParsedRun("command", settings, recipe, goal, asked=asked, env=run.env, notes=tuple(notes))


def _name(parts: dict[str, SourcedValue]) -> SourcedValue | None:
    needed = [parts.get(part) for part in ("model", "gpus", "gpu", "precision")]
    if any(setting is None for setting in needed):
        return None
    model, gpus, gpu, precision = (setting for setting in needed if setting is not None)
    task = str(parts["task"].value) if "task" in parts else "pretrain"
    format = PRECISIONS.get(str(precision.value), str(precision.value))
    variant = f"_{parts['variant'].value}" if "variant" in parts else ""
    name = f"{model.value}_{'peft' if task == 'lora' else task}_{gpus.value}gpu_{gpu.value}_{format}{variant}_config"
    open_ones = [setting.unresolved for setting in needed if setting is not None and setting.unresolved]
    return msgspec.structs.replace(model, value=name, unresolved=open_ones[0] if open_ones else "")

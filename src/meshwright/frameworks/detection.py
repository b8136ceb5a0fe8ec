"""The framework of a file: named by the user, or detected."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.choices import FRONT_ENDS
from meshwright.choices import Framework as FrameworkName
from meshwright.errors import InputError, some
from meshwright.frameworks.common import OTHER_TASK
from meshwright.frameworks.framework import NOT_ESTIMATED, Content, Framework, ParsedConfig
from meshwright.frameworks.load import open_file
from meshwright.frameworks.native import is_native, looks_native, train_command
from meshwright.frameworks.other_trainers import (
    OtherLossError,
    OtherTrainerError,
    other_loss,
    other_trainer,
    rl_command,
    rl_trainer,
)
from meshwright.frameworks.registry import FORMATS, READ, framework
from meshwright.frameworks.trainer_calls import other_half
from meshwright.version import SCHEMA

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

NATIVE = "meshwright"
BOTH, HALVES = (
    "megatron-deepspeed",
    ("megatron-lm", "deepspeed"),
)  # a script with flags of one and a config of the other
STARTED: tuple[FrameworkName, ...] = (
    "megatron-bridge",
    "deepspeed",
    "accelerate",
)  # read from the Python program that a script starts
READ_COMMANDS = ("trl",)  # front ends whose commands are read as those of the Trainer
CONFIGS = (".yaml", ".yml", ".toml", ".json")
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
SET_UP = re.compile(r"/etc/|rc$|profile|conda|module|env")  # sourced files that set up the shell
CONVERTS = "--ckpt-convert-"  # flags with which Megatron-LM writes a checkpoint in another format and ends
LONGEST_NAME = 200  # characters of a path that is looked up


def framework_of(content: Content, named: str | None = None, front_ends: bool = False) -> Framework | None:
    """Return the framework of a file, as named or detected; None for a native recipe or a job that trains one.

    `front_ends`: also one whose files are only checked.
    """
    _refuse_answer(content)
    if content.format == "shell" and (named == NATIVE or train_command(content) is not None):
        _require_own_job(content, named)
        return None
    if named == NATIVE or (named is None and is_native(content)):
        return None
    if named is not None:
        return require_framework(content, named)
    try:
        return detect_framework(content, front_ends)
    except InputError:
        if looks_native(content):  # its reader says which key is missing or misspelt
            return None
        raise


def _refuse_answer(content: Content) -> None:
    """Raise InputError for what a command printed with --json: it names a layout, but is no recipe."""
    schema = content.settings.get("schema")
    if schema is None or schema.value != SCHEMA:
        return
    raise InputError(
        "is an answer printed with --json, not a recipe; meshwright recommend writes its plan as a recipe with "
        "--save FILE.toml, and every command reads that file",
        field="file",
        value=content.path,
        fix=("--save plan.toml",),
    )


def _require_own_job(content: Content, named: str | None) -> None:
    """Raise InputError for a script whose training is not that of the named framework."""
    if train_command(content) is None:
        reason = "is a script without a meshwright train command"
        try:
            fix: tuple[str, ...] = (f"--framework {detect_framework(content).name}",)
        except InputError:
            fix = ()
        raise InputError(reason, field="file", value=content.path, fix=fix)
    if named not in (None, NATIVE):
        raise InputError(
            f"{content.path} runs meshwright train", field="framework", value=named, fix=(f"--framework {NATIVE}",)
        )


def detect_framework(content: Content, front_ends: bool = False) -> Framework:
    """Return the framework that a file is for; `front_ends`: also one that is only checked."""
    end = _front_end_of(content) if content.format == "shell" else None
    if front_ends and end is not None:
        return end
    if (rewards := rl_trainer(content)) is not None:
        raise rewards
    loss = other_loss(content)
    if loss is not None and not front_ends:
        raise loss
    if end is not None and end.name not in READ_COMMANDS:  # its --deepspeed may be a name, and its defaults differ
        raise OtherTrainerError(end.title, with_settings(end, content))
    scores = {name: framework(name).detect(content) for name in READ if _may_match(name, content)}
    if not any(scores.values()):  # a script may start a program beside it that shows the framework
        others = (name for name in STARTED if name not in scores and content.format == "shell")
        scores |= {name: framework(name).detect(content) for name in others}
    best = max(scores.values(), default=0)
    found = [name for name, score in scores.items() if score == best]
    if loss is not None:
        if best == 0:
            raise loss
        return without_estimate(framework(found[0]), loss)
    if best == 0:
        seen = f"; its top-level keys are {some(sorted(content.top_level_keys()), 6)}" if content.settings else ""
        if front_ends and (found_end := _front_end_of(content)) is not None:
            return found_end
        other = other_trainer(content)
        if other is not None:
            is_read = front_ends and other.title.lower() in FRONT_ENDS  # but for its keys, which are not a training's
            raise _trains_nothing(content, other.title) if is_read else other
        if (rewards_of_command := rl_command(content)) is not None:
            raise rewards_of_command
        if (found_end := _front_end_of(content)) is not None:
            raise OtherTrainerError(found_end.title, with_settings(found_end, content))
        if (task := _without_training(content)) is not None:
            raise task
        scripts = _scripts(content)
        if not scripts and (unknown := _open_arguments(content)) is not None:
            raise unknown
        runs = f"; it runs {some(scripts, 3)}" if scripts else ""
        raise InputError(
            f"matches no supported framework{seen}{runs}",
            field="file",
            value=content.path,
            fix=[f"meshwright check {path}" for path in scripts]
            or _configs(content)
            or [f"--framework {name}" for name in _readers(content)],
        )
    if len(found) > 1:
        raise InputError(
            f"matches {' and '.join(found)}",
            field="file",
            value=content.path,
            fix=[f"--framework {name}" for name in found],
        )
    return framework(found[0])


def without_estimate(found: Framework, loss: OtherLossError) -> Framework:
    """Return the framework of a file with another loss: its keys and values are checked, as those of a front end."""

    def parse(content: Content) -> ParsedConfig:
        parsed = found.parse(content)
        note = f"the program {loss.does}: keys and values are checked, {NOT_ESTIMATED}"
        return msgspec.structs.replace(parsed, model=None, notes=(*parsed.notes, note))

    return msgspec.structs.replace(found, parse=parse)


def _without_training(content: Content) -> InputError | None:
    """Return the error for a script whose programs all do something else than train, by their names; else None."""
    programs = [Path(str(one.program.value)).name for one in content.launches]
    converts = any(str(arg.value).startswith(CONVERTS) for one in content.launches for arg in one.args)
    if not programs or not (converts or all(OTHER_TASK.search(one) for one in programs)):
        return None
    named = some(list(dict.fromkeys(programs)), 3)
    task = "converts a checkpoint" if converts else "trains nothing, by the names of its programs"
    reason = f"starts {named} and {task}: only trainings are checked"
    return InputError(reason, field="file", value=content.path)


def _trains_nothing(content: Content, title: str) -> InputError:
    """Return the error for a front end's config that generates, merges or exports."""
    reason = f"is a config of {title} that trains nothing, by its keys: only trainings are checked"
    return InputError(reason, field="file", value=content.path)


def _open_arguments(content: Content) -> InputError | None:
    """Return the error for a script whose training program gets arguments that are not in the script; else None."""
    if content.script is None:
        return None
    named = [one.what for one in content.script.unresolved if one.what.startswith("source ")]
    sources = [one for one in named if not SET_UP.search(one)]
    for launch in content.launches:
        unknown = [*_unknown_words(launch), *sources]
        if not unknown:
            continue
        program = Path(str(launch.program.value)).name
        reason = f"starts {program} with arguments that only the job knows, of {some(unknown, 3)}"
        choices = [path for path in content.script.choices if _is_read(path)]
        fix = [f"meshwright check {shlex.quote(path)}" for path in choices]
        return InputError(reason, field="file", value=content.path, fix=fix)
    return None


def _unknown_words(launch: LaunchCommand) -> list[str]:
    """Return the arguments of a launch that are unknown and may be several: no values of flags."""
    from meshwright.frameworks.shell.launch_prefixes import is_option, is_unresolved_expansion

    follows = [False, *map(is_option, launch.args)]
    words = [one for one, is_value in zip(launch.args, follows, strict=False) if not is_value]
    return [str(one.value) for one in words if is_unresolved_expansion(one)]


def _is_read(path: str) -> bool:
    """Return whether a file that a script sources shows a framework by itself."""
    try:
        return bool(detect_framework(open_file(path)))
    except InputError:
        return False


def _front_end_of(content: Content) -> Framework | None:
    if (
        content.format == "yaml"
        or any(name in content.all_text for name in ("swift", "trl", "axolotl"))
        or any(one.launcher == "front-end" for one in content.launches)
    ):
        from meshwright.frameworks.front_ends import detect_front_end

        return detect_front_end(content)
    return None


def with_settings(end: Framework, content: Content) -> Content:
    """Return a script of a front end with the settings of its command, as its YAML file has them."""
    if end.name not in FRONT_ENDS:
        return content
    from meshwright.frameworks.front_ends import FRONT_ENDS as DESCRIBED
    from meshwright.frameworks.front_ends import with_command_settings

    return with_command_settings(DESCRIBED[end.name], content)


def require_framework(content: Content, name: str) -> Framework:
    """Return the named framework; raise InputError if the file is another framework's and shows nothing of this one."""
    if name.strip().lower().replace("_", "-") in FRONT_ENDS:
        from meshwright.frameworks.front_ends import front_end

        return front_end(name, content)
    named = framework(name)
    if named.name in HALVES and _may_match(BOTH, content) and framework(BOTH).detect(content):
        return framework(BOTH)  # reads the flags and the config
    if (loss := other_loss(content)) is not None:
        raise loss
    if content.format not in FORMATS[named.name]:
        formats = " or ".join(FORMATS[named.name])
        reason = f"is a {content.format} file, and {named.title} reads {formats}"
    elif named.detect(content):
        return named
    else:
        reason = f"has no setting of {named.title}"
    try:
        found = detect_framework(content)
    except InputError:
        if content.format in FORMATS[named.name]:
            return named  # it may be an unusual file of this framework
        raise InputError(reason, field="framework", value=name) from None
    raise InputError(
        f"{reason}: it is a file of {found.title}", field="framework", value=name, fix=(f"--framework {found.name}",)
    )


def _readers(content: Content) -> list[str]:
    """Return the frameworks that read files of this format, and of a script those that find their command in it."""
    names = [name for name in READ if content.format in FORMATS[name]]
    if content.format in ("shell", "python"):  # our own files are neither
        return [name for name in names if _parses(name, content)]
    return [*names, "meshwright"]


def _parses(name: str, content: Content) -> bool:
    try:
        framework(name).parse(content)
    except InputError:
        return False
    return True


def _scripts(content: Content) -> list[str]:
    """Return the other scripts in the folder of a script that it runs."""
    if content.format != "shell" or content.folder is None:
        return []
    lines = (line.partition("#")[0] for line in content.text.splitlines() if not line.lstrip().startswith("#"))
    named = dict.fromkeys(word.strip("\"'") for line in lines for word in line.split())
    found = (content.folder / word for word in named if word.endswith(SCRIPTS) and len(word) < LONGEST_NAME)
    return [str(path) for path in found if path.is_file() and path.name != Path(content.path).name]


def _configs(content: Content) -> list[str]:
    """Return the commands that check the configs beside a script: those it names, or of its own name."""
    if content.format != "shell" or content.folder is None:
        return []
    named = [str(arg.value).rpartition("=")[2] for launch in content.launches for arg in launch.args]
    own = [f"{Path(content.path).stem}{suffix}" for suffix in CONFIGS]
    found = [content.folder / one for one in (*named, *own) if one.endswith(CONFIGS)]
    return list(dict.fromkeys(f"meshwright check {path}" for path in found if path.is_file()))


def _may_match(name: str, content: Content) -> bool:
    marks = FORMATS[name].get(content.format)
    if not marks:
        return marks is not None
    written = other_half(content) if content.format == "python" else None
    text = content.all_text + (written.text if written is not None else "")
    return any(mark in text for mark in marks)

"""The trainings that a script starts with torchtitan, and what their flags say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.frameworks.common import format_toml
from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.torchtitan.format_override import flag, flag_released, flag_today
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.torchtitan import SAMPLE_KEYS, TOKEN_KEYS
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

SCRIPT = re.compile(r"run_train\w*\.sh")
ASKED = re.compile(r"--(job|model|training|parallelism|optimizer|lr_scheduler|checkpoint|compile|metrics)[.]")
RECOMPUTE = re.compile(r"activation[-_]checkpoint:([\w-]+)")
WORDS_OF_VALUES = {"true": True, "false": False, "none": None, "null": None}


class Run(msgspec.Struct, frozen=True):
    """A training that a script starts."""

    args: tuple[SourcedValue, ...]
    env: Settings
    asked: GpuRequest
    place: SourcedValue  # the word that names the program
    by_script: bool  # with their run_train.sh, which reads variables


def runs(content: Content) -> Iterator[Run]:
    for one in content.launches:
        if _starts(one):
            yield Run(one.args, one.env, _asked(one.nodes, one.gpus_per_node, one.gpu), one.program, False)
    for command in content.script.commands if content.script else ():
        for place, word in enumerate(command.words):
            if SCRIPT.fullmatch(Path(str(word.value)).name):
                gpus = command.env.get("NGPU") or SourcedValue(8, word.line, word.file)
                yield Run(command.words[place + 1 :], command.env, _asked(None, gpus, ""), word, True)
                break


def _starts(one: LaunchCommand) -> bool:
    name = str(one.program.value)
    if one.is_module:
        return name == "torchtitan.train"
    asked = any(ASKED.match(str(arg.value).replace("-", "_").replace("__", "--", 1)) for arg in one.args)
    return name.endswith("torchtitan/train.py") or (Path(name).name == "train.py" and asked)


def _asked(nodes: SourcedValue | None, per_node: SourcedValue | None, gpu: str) -> GpuRequest:
    count, gpus = as_int(nodes), as_int(per_node)
    return GpuRequest(
        nodes=count or (1 if gpus and nodes is None else None), gpus_per_node=gpus, gpu=gpu, source=per_node
    )


def flags(args: Iterable[SourcedValue]) -> tuple[dict[str, SourcedValue], tuple[Finding, ...]]:
    """The settings of a command: --section.key value, --section.key=value, --section.flag, --section.no-flag."""
    found: dict[str, SourcedValue] = {}
    findings: list[Finding] = []
    rest = list(args)
    while rest:
        said = rest.pop(0)
        text = str(said.value)
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            values = [value] if equals else []
            most = 2 if name.endswith("betas") else 1
            while not equals and rest and not _is_word(rest[0]) and len(values) < most:
                values.append(str(rest[0].value))
                said = msgspec.structs.replace(said, unresolved=said.unresolved or rest[0].unresolved)
                rest.pop(0)
            key, typed = _setting(name.replace("-", "_"), values)
            found[key] = msgspec.structs.replace(said, value=typed)
        elif mode := RECOMPUTE.fullmatch(text):
            found["activation-checkpoint"] = msgspec.structs.replace(said, value=mode[1].replace("-", "_"))
        elif not said.unresolved and text:
            message = f"{text} stands alone: a setting is --section.key value"
            findings.append(
                Finding("torchtitan.stray-argument", "error", text, message, (), file=said.file, line=said.line)
            )
    return found, tuple(findings)


def _is_word(said: SourcedValue) -> bool:
    text = str(said.value)
    return text.startswith("--") or RECOMPUTE.fullmatch(text) is not None


def _setting(name: str, values: list[str]) -> tuple[str, Any]:
    section, _, last = name.rpartition(".")
    positive = f"{section}.{last.removeprefix('no_')}" if section else last.removeprefix("no_")
    if not values:
        return (positive, False) if last.startswith("no_") and name not in config_keys("torchtitan") else (name, True)
    word = config_keys("torchtitan").get(name)
    if word is not None and word.type == "list":
        return name, [_value(item) for value in values for item in value.split(",")]
    return name, _value(values[0]) if len(values) == 1 else [_value(value) for value in values]


def _value(text: str) -> Any:
    plain = text.strip()
    if plain.lower() in WORDS_OF_VALUES:
        return WORDS_OF_VALUES[plain.lower()]
    if re.fullmatch(r"[+-]?[0-9]{1,15}", plain):
        return int(plain)
    return float(plain) if re.fullmatch(r"[+-]?[0-9]{0,15}\.?[0-9]{1,15}([eE][+-]?[0-9]{1,3})?", plain) else text


class Named(msgspec.Struct, frozen=True):
    """The preset that a command of today starts from."""

    module: SourcedValue
    config: SourcedValue


def named_preset(run: Run, flags: Mapping[str, SourcedValue]) -> Named | None:
    """The preset, when the command speaks today's line."""
    module, config = flags.get("module"), flags.get("config")
    if run.by_script:
        env = run.env
        module, config = module or env.get("MODULE"), config or env.get("CONFIG")
        if module is None and config is None and ("CONFIG_FILE" in env or "job.config_file" in flags):
            return None
        module = module or msgspec.structs.replace(run.place, value="llama3")
        config = config or msgspec.structs.replace(run.place, value="llama3_debugmodel")
    elif module is None and config is None:
        return None
    missing = msgspec.structs.replace(run.place, value="")
    return Named(module or missing, config or missing)


def counts_samples(flags: Mapping[str, SourcedValue]) -> bool:
    """Whether a command of today counts its batch in samples, as the release 0.3.0 does."""
    return any(key in flags for key in SAMPLE_KEYS) and not any(key in flags for key in TOKEN_KEYS)


def spelling(content: Content) -> Callable[[str, Any], str]:
    """How settings are said in a file or command: TOML, flags of the 0.2 line, of 0.3.0, or of today."""
    if content.format == "toml":
        return format_toml
    run = next(runs(content), None)
    if run is None:
        return flag
    said = flags(run.args)[0]
    if named_preset(run, said) is None:
        return flag
    return flag_released if counts_samples(said) else flag_today

"""Accelerate's DeepSpeed keys compared with the arguments of transformers' Trainer, which refuses other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from meshwright.frameworks.accelerate.deepspeed_config import HALVES, PRECISION, REPEATED
from meshwright.frameworks.deepspeed.parse import DEFAULT_ARGUMENTS, OTHER_HALF, contradict
from meshwright.frameworks.framework import FrameworkRule, ParsedConfig, Problem, RuleContext
from meshwright.frameworks.trainer import is_on
from meshwright.frameworks.trainer_fields import LANGUAGE_MODELING, OPEN_ARGUMENTS, is_trl
from meshwright.rules.rule import Severity


def _argument_mismatch(ctx: RuleContext) -> Iterator[Problem]:
    program = ctx.parsed.program
    defaults = DEFAULT_ARGUMENTS if _states_all(ctx.parsed) else {}
    severity: Severity | None = None if _is_of_trainer(ctx.parsed) else "warning"
    for key, name in REPEATED.items() if program.repeats else ():
        setting, argument = ctx.parsed.settings.get(key), program.given.get(name)
        value = defaults.get(name) if argument is None else argument.value
        if setting is None or setting.unresolved or not setting.value or (argument is not None and argument.unresolved):
            continue
        if value is None or not contradict(setting.value, value):
            continue
        agreeing = (ctx.written(key, _agreeing(setting.file, value)),)
        fix = program.formatted(name, setting.value) if argument is None else agreeing
        yield Problem(f"{key}={setting.value}, but {_shown(ctx, name, value)}", fix, key, severity)
    if PRECISION in program.repeats:
        yield from _precision_mismatch(ctx, defaults, severity)


def _precision_mismatch(ctx: RuleContext, defaults: Mapping[str, Any], severity: Severity | None) -> Iterator[Problem]:
    """Yield that mixed_precision turns on a format that the Trainer has off; one that the Trainer has on counts."""
    setting, given = ctx.parsed.settings.get(PRECISION), ctx.parsed.program.given
    name = "" if setting is None or setting.unresolved else HALVES.get(str(setting.value).lower(), "")
    if setting is None or not name or is_on(given, *OTHER_HALF, f"{name}_full_eval"):
        return
    if name in given or name in defaults:
        fix = ctx.parsed.program.formatted(name, True)
        yield Problem(f"{PRECISION}={setting.value}, but {_shown(ctx, name, False)}", fix, PRECISION, severity)


def _shown(ctx: RuleContext, name: str, value: Any) -> str:
    """Return an argument with its place, as the end of a message."""
    argument = ctx.parsed.program.given.get(name)
    place = "the Trainer's default" if argument is None else argument.location
    return f"{name}={value} ({place}): the Trainer refuses values of Accelerate's config that differ from its own"


def _agreeing(file: str, value: Any) -> Any:
    """Return the value with which a key agrees: auto in a config; an option of the launcher must be a number."""
    return "auto" if file.endswith((".yaml", ".yml")) else value


def _states_all(parsed: ParsedConfig) -> bool:
    """Return whether arguments that are not stated have the Trainer's defaults: all of them are read from code."""
    return (bool(parsed.program.fixed_in) or not parsed.program.argv) and OPEN_ARGUMENTS not in parsed.program.given


def _is_of_trainer(parsed: ParsedConfig) -> bool:
    """Return whether the program surely has the Trainer: its code was read, or it is one of transformers or TRL.

    Another one may have the Trainer's arguments and a loop of its own.
    """
    script = next((str(one.value) for one in parsed.program.argv), "")
    of_known = PurePath(script).name == f"{LANGUAGE_MODELING}.py" or is_trl({}, script)
    return of_known or any(one.file.endswith(".py") for one in parsed.program.given.values())


RULES = (
    FrameworkRule("accelerate.argument-mismatch", "error", (*REPEATED, PRECISION), _argument_mismatch,
        symptom="ValueError: Please correct the following DeepSpeed config values that mismatch …",
        cause="Accelerate makes a DeepSpeed config of its own keys, and the Trainer fills in only those that are auto"),
)  # fmt: skip

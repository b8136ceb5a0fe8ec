"""Whether a program of transformers' Trainer resumes from its last checkpoint when its command starts it again."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshwright.frameworks.framework import Content
from meshwright.frameworks.program_values import ProgramValues
from meshwright.frameworks.trainer import parse_arguments
from meshwright.frameworks.trainer_files import started_program
from meshwright.frameworks.types import SourcedValue
from meshwright.frameworks.untaken_branches import untaken_calls

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

TRAIN, RESUME = "train", "resume_from_checkpoint"
RESUMED = 'any(Path({trainer}.args.output_dir).glob("checkpoint-*"))'
"""What resume_from_checkpoint is in a program that resumes, and that also starts: true fails without a checkpoint."""
OF_TRAINER = ("HfArgumentParser", "TrlParser")  # parsers with the option --resume_from_checkpoint
SHORT = re.compile(r"-[A-Za-z]")  # an option whose long name is not known here
PASSED_ON = re.compile(r"\$(?:[@*]|\{?\w*(?:ARGS|OPTS|OPTIONS|ARGUMENTS)\b)", re.IGNORECASE)
CONFIGS = (".yaml", ".yml", ".json", ".toml")
FROM_FILES = ("configargparse", "jsonargparse", "set_defaults(**", "parse_known_args")


class NotResumed(NamedTuple):
    """Why a program starts at step 0 whatever it has saved, and the change of its code that resumes."""

    why: str
    fix: tuple[str, ...]
    file: str
    line: int


def not_resumed(content: Content, launch: LaunchCommand | None) -> NotResumed | None:
    """Return why a program that a command starts, if it is here, resumes from no checkpoint; None if it may resume.

    Without a command the content is the program itself.
    """
    own = content if launch is None else started_program(content, launch.program)
    words = () if launch is None else launch.args
    found = None if own is None else _train_call(own.text, words)
    if own is None or found is None:
        return None
    call, value, options = found
    train = ast.unparse(call.func)
    resumed = RESUMED.format(trainer=train.rpartition(".")[0])
    text = "" if value is None or isinstance(value, ast.Constant) else ast.unparse(value)
    why = f"{train}() has no {RESUME}"
    if text:
        only = f" resumes only with {' or '.join(options)}, which is not passed" if options else " does not resume"
        why = f"{train}({RESUME}={text}){only}"
    imports = () if "Path" in own.text else (f"{own.path}: from pathlib import Path",)
    fix = f"{own.path}: {train}({RESUME}={f'{text} or ' if text else ''}{resumed})"
    return NotResumed(why, (fix, *imports), own.path, call.lineno)


def _train_call(text: str, words: Sequence[SourcedValue]) -> tuple[ast.Call, ast.expr | None, tuple[str, ...]] | None:
    """Return the call that trains from step 0, its argument and the options that decide it.

    None if a call of the program may resume.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    given = _given(text, words)
    program = ProgramValues(tree, given, started=given is not None)
    untaken = untaken_calls(tree, program) if given is not None else {}
    found: list[tuple[ast.Call, ast.expr | None, tuple[str, ...]]] = []
    for call in program.calls.get(TRAIN, ()):
        if not isinstance(call.func, ast.Attribute) or "trainer" not in ast.unparse(call.func).lower():
            continue
        if call in untaken:
            continue
        keywords = {word.arg: word.value for word in call.keywords}
        value = call.args[0] if call.args else keywords.get(RESUME)
        options = () if None in keywords else _options_of_start(value, program, given, text)
        if options is None or None in keywords:
            return None
        found.append((call, value, options))
    return found[0] if found else None


def _given(text: str, words: Sequence[SourcedValue]) -> dict[str, SourcedValue] | None:
    """Return the options of a command; None if it, or a file that it names, may give others."""
    for before, one in zip((None, *words), words, strict=False):
        value = str(one.value)
        follows_option = before is not None and str(before.value).startswith("--")
        if SHORT.match(value) or PASSED_ON.search(value) or (one.unresolved and not follows_option):
            return None
    given = parse_arguments(words)
    in_file = (words and str(words[0].value).endswith(CONFIGS)) or any(
        "config" in name and not name.startswith("deepspeed") for name in given
    )
    return None if in_file or any(name in text for name in FROM_FILES) else given


def _options_of_start(
    value: ast.expr | None, program: ProgramValues, given: Mapping[str, SourcedValue] | None, text: str
) -> tuple[str, ...] | None:
    """Return the options whose defaults make a training start at step 0; None if it may resume."""
    if value is None or (isinstance(value, ast.Constant) and value.value in (None, False)):
        return ()
    if given is None:
        return None
    known = program.find(value)
    if known is not None:
        return None if known.value else known.options
    is_default = RESUME not in given and any(name in text for name in OF_TRAINER) and _is_parsed(value, program)
    return (f"--{RESUME}",) if is_default else None


def _is_parsed(value: ast.expr, program: ProgramValues) -> bool:
    """Return whether an expression is the argument of TrainingArguments that a parser returns, which stays as it is."""
    if not isinstance(value, ast.Attribute) or not isinstance(value.value, ast.Name) or value.attr != RESUME:
        return False
    made = program.assigned.get(value.value.id, [])
    parsed = bool(made) and all("parse" in ast.unparse(one).lower() for one in made)
    return parsed and ast.unparse(value) not in program.changed

"""Fixes of a framework's findings as overrides of our recipe, for a file that was exported from one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.accelerate_options import TYPES
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.merged_fix import LAUNCH, program_arguments
from meshwright.frameworks.script_arguments import Arguments, argument_lists, with_arguments, with_variable
from meshwright.frameworks.task_ranks import RANKS, TASK_RANKS
from meshwright.frameworks.to_recipe import complete, import_recipe
from meshwright.frameworks.tried_fixes import (
    CONFIGS,
    REPLACED,
    as_typed,
    content_with_fix,
    with_named_file_fixed,
    without_flag,
)
from meshwright.frameworks.types import SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.rules import Finding

if TYPE_CHECKING:  # a script's interpreter, which only files need
    from meshwright.frameworks.shell import LaunchCommand

VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")  # of the environment, set before a command


def in_export(name: str) -> str:
    """Return where a fix goes that no field of ours makes: the file that an export writes."""
    return f"in the exported {name}"


def in_our_keys(framework: Framework, content: Content, finding: Finding, model: ModelSpec, on: Cluster) -> Finding:
    """Return a finding with its fix as overrides; a fix that no field of ours makes is named as one of the file."""
    if not finding.fix:
        return finding
    fix = _overrides(framework, content, finding, model, on)
    text = " ".join(finding.fix)
    no_fix = "" if fix else f"no field of a recipe sets it; {in_export(content.path)}: {text}"
    return msgspec.structs.replace(finding, fix=fix, no_fix=no_fix)


def _overrides(
    framework: Framework, content: Content, finding: Finding, model: ModelSpec, on: Cluster
) -> tuple[str, ...]:
    """Return the fields in which the file with the fix differs from the file without it."""
    changed = changed_content(content, finding)
    if changed is None:
        return ()
    try:
        before, after = (_recipe(framework, one, model, on) for one in (content, changed))
    except InputError:
        return ()
    typed = _changes(before, after)
    try:
        applied = _recipe(framework, content, model, on, typed)
    except InputError:
        return typed
    named = {text.partition("=")[0] for text in typed}  # what the file's own values make of the rest is changed too
    return (*typed, *(one for one in _changes(applied, after) if one.partition("=")[0] not in named))


def _changes(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Return the fields in which two recipes differ, with the values of the second."""
    keys = [key for key in recipe_fields() if field_value(before, key) != field_value(after, key)]
    return tuple(format_override(key, field_value(after, key)) for key in keys)


def _recipe(framework: Framework, content: Content, model: ModelSpec, on: Cluster, typed: Sequence[str] = ()) -> Recipe:
    return complete(import_recipe(framework, content, model, list(typed)), on)


def changed_content(content: Content, finding: Finding) -> Content | None:
    """Return the file with the fix; None if the fix is not written as settings of it."""
    if content.settings:
        return content_with_fix(content, finding, finding.fix)
    if content.format == "python" and not any(argument_lists(content)):
        return _with_assignments(content, finding)
    changed = content
    if finding.rule.startswith(REPLACED):
        changed = _without_flags(changed, [finding.field.lstrip("-")])
    for text in finding.fix:
        if in_program := program_arguments(text):
            changed = msgspec.structs.replace(changed, assigned={**changed.assigned, **in_program})
            continue
        in_file = not text.startswith("--") and finding.file.endswith(CONFIGS)
        if in_file and (with_file := with_named_file_fixed(changed, finding, text)) is not None:
            changed = with_file
            continue
        if text.startswith(("torchrun --", "deepspeed --", LAUNCH, "#SBATCH --", "unset ")):
            gone = finding.field if finding.rule.startswith(REPLACED) else ""
            launches = tuple(_with_launch_option(_without(one, gone), text, content.path) for one in changed.launches)
            changed = msgspec.structs.replace(changed, launches=launches)
            continue
        if text == TASK_RANKS:
            for name, value in RANKS.items():
                at_start = SourcedValue(f"${value}", 0, content.path, f"SLURM sets {value} in each task")
                changed = with_variable(changed, name, at_start)
            continue
        removed = text.startswith(("without ", "remove "))
        words = _words(text)[1:] if removed else _words(text)
        is_export = len(words) == 2 and words[0] == "export" and "=" in words[1]
        if is_export or (len(words) == 1 and VARIABLE.match(words[0]) and not removed):
            name, _, value = words[-1].partition("=")
            changed = with_variable(changed, name, SourcedValue(value, 0, content.path))
            continue
        is_setting = bool(words) and (words[0].startswith("--") or "=" in words[0])
        is_named = removed and len(words) == 1 and any(as_typed(one, words[0]) for one in argument_lists(content))
        if not (is_setting or is_named) or "export" in words:
            return None
        added = () if removed else tuple(SourcedValue(word, 0, content.path) for word in words)
        # Flags that are one fix: every one replaces its earlier value.
        flags = [words[0], *(word for word in words[1:] if word.startswith("--"))]
        changed = _without_flags(changed, [word.lstrip("-").partition("=")[0] for word in flags])
        changed = with_arguments(changed, partial(_extended, added=added))
    return changed


def _with_assignments(content: Content, finding: Finding) -> Content | None:
    """Return a Python file with the fix's KEY=VALUE assigned after its own, or in the JSON config that it names.

    None if the fix has other words.
    """
    assigned = dict(content.assigned)
    if finding.rule.startswith(REPLACED):
        assigned[finding.field] = None
    for text in finding.fix:
        if text.startswith('"'):  # of a JSON config that the program names
            with_file = with_named_file_fixed(content, finding, text)
            if with_file is None:
                return None
            content = with_file
            continue
        removed = text.startswith(("without ", "remove "))
        for word in _words(text)[removed:]:
            key, equals, value = word.partition("=")
            if not re.fullmatch(r"[A-Za-z_][\w.]*", key) or bool(equals) == removed:
                return None
            assigned[key] = None if removed else value
    return msgspec.structs.replace(content, assigned=assigned)


def _without_flags(content: Content, keys: Sequence[str]) -> Content:
    for key in keys:
        content = with_arguments(content, partial(without_flag, key=key))
    return content


def _extended(args: Arguments, added: Arguments) -> Arguments:
    return (*args, *added)


def _words(text: str) -> list[str]:
    """Return the words of a fix as a shell reads them."""
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe in a sentence
        return text.split()


def _without(launch: LaunchCommand, option: str) -> LaunchCommand:
    """Return a launch without an option of its launcher, which another takes the place of."""
    kept = {name: one for name, one in launch.launcher_args.items() if name != option}
    return msgspec.structs.replace(launch, launcher_args=kept)


def _with_launch_option(launch: LaunchCommand, text: str, path: str) -> LaunchCommand:
    """Return a launch with options of torchrun or of its job, or without a variable."""
    from meshwright.frameworks.shell import with_options  # a script's interpreter, which only files need

    if text.startswith(LAUNCH):
        return _with_accelerate_options(launch, text.removeprefix(LAUNCH), path)
    where, _, option = text.partition(" ")
    if where == "unset":
        return msgspec.structs.replace(launch, env={name: one for name, one in launch.env.items() if name != option})
    pairs = [one.replace("=", " ", 1).partition(" ") for one in option.removeprefix("--").split(" --")]
    setting = {name.replace("_", "-"): SourcedValue(value, 0, path) for name, _, value in pairs}
    if where in ("torchrun", "deepspeed"):
        return with_options(launch, {**launch.launcher_args, **setting}, launch.job)
    return with_options(launch, launch.launcher_args, {**launch.job, **setting})


def _with_accelerate_options(launch: LaunchCommand, text: str, path: str) -> LaunchCommand:
    """Return a launch with options of Accelerate; another way to distribute takes the place of the one before."""
    from meshwright.frameworks.shell import with_options  # a script's interpreter, which only files need

    pairs = [one.replace("=", " ", 1).partition(" ") for one in text.removeprefix("--").split(" --")]
    given = {name.replace("_", "-"): SourcedValue(value.strip() or True, 0, path) for name, _, value in pairs}
    types = {name.replace("_", "-") for name in TYPES}
    kept = launch.launcher_args.items()
    before = {name: one for name, one in kept if not (name in types and types & given.keys())}
    return with_options(launch, {**before, **given}, launch.job)


def superseded(framework: Framework, findings: Sequence[Finding]) -> set[str]:
    """Return our rules that these findings of the framework's own rules report more precisely."""
    reported = {one.rule for one in findings}
    return {rule for each in framework.rules if each.id in reported for rule in each.supersedes}

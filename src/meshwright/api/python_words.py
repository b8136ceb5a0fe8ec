"""Errors and notes in the words of a Python call: parameters in place of command-line options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from meshwright.api.argument_names import PYTHON
from meshwright.api.inputs import Field
from meshwright.errors import MeshwrightError

COMMAND = re.compile(r"\s*(?:meshwright|hf|pip|python|torchrun|mkdir|export|sbatch|uv|git|cp|rm)\s")
OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*)(?:[ =]([A-Z]{2,}\w*\b|\S*\d\S*?(?=[,;)]|\s|$)))?")
OVERRIDE = re.compile(r"[a-z_]+\.[\w.]+=.*")


def reword(error: MeshwrightError, fields: Iterable[Field]) -> None:
    """Rewrite field, reason and fixes of an error for a caller in Python; commands of a shell stay."""
    options = _options(fields)
    names = {one.name for one in options.values()}
    field = options[error.field].name if error.field in options else error.field
    bare = [field] if field in names else []
    fixes = [_fix(str(one), options, bare) for one in error.fix]
    error.fix = fixes if isinstance(error.fix, list) else tuple(fixes)
    error.field, error.reason = field, with_parameters(error.reason, options)


def rewritten(text: str, fields: Iterable[Field]) -> str:
    """Return a note for a caller in Python."""
    return with_parameters(text, _options(fields))


def with_parameters(text: str, options: Mapping[str, Field]) -> str:
    """Return a text with parameters in place of its options; options of other commands stay."""

    def parameter(found: re.Match[str]) -> str:
        if found[1] not in options:
            return found[0]
        field, name = options[found[1]], options[found[1]].name
        if field.types == (bool,):
            return f"{name}={_is_on(found[1], field)}" + (f" {found[2]}" if found[2] else "")
        return f"{name}={found[2]}" if found[2] else name

    return OPTION.sub(parameter, text)


def _is_on(option: str, field: Field) -> bool:
    """Return the value that an option without one gives its field: the second of --chat/--raw turns it off."""
    return option == field.flag.split("/")[0] and not option.startswith("--no-")


def _options(fields: Iterable[Field]) -> dict[str, Field]:
    return {flag: one for one in fields if not one.input.positional for flag in one.flag.split("/")}


def _fix(fix: str, options: Mapping[str, Field], bare: Iterable[str]) -> str:
    """Return a fix as the arguments to pass; `bare` is the parameter that a single value is for."""
    if COMMAND.match(fix):
        return fix
    for name in bare:
        if re.fullmatch(r"[\w./+][\w./+-]*", fix):
            return PYTHON.parameter(name, fix)
    return _arguments(fix, options) or with_parameters(fix, options)


def _arguments(fix: str, options: Mapping[str, Field]) -> str:
    """Return a fix that is only options and overrides as keyword arguments; empty for any other, such as prose."""
    try:
        words = shlex.split(fix)
    except ValueError:  # an apostrophe
        return ""
    given: list[str] = []
    overrides: list[str] = []
    while words:
        option, equals, value = words[0].partition("=")
        if OVERRIDE.fullmatch(words[0]):
            overrides.append(words.pop(0))
            continue
        field = options.get(option)
        if field is None:
            return ""
        words.pop(0)
        if field.types == (bool,):
            given.append(f"{field.name}={_is_on(option, field)}")
            continue
        if not equals and not words:
            return ""
        given.append(PYTHON.parameter(field.name, value if equals else words.pop(0)))
    if not given:  # overrides alone are the same texts in Python
        return ""
    return ", ".join([*given, *([f"overrides={overrides!r}"] if overrides else [])])

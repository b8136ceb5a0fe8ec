"""Compare the arguments of a program with the checks of its table."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from meshwright.frameworks.start_checks.types import Given, StartCheck, Table, UnresolvedKeyError
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.rules.rule import Finding, Severity

Style = Literal["yaml", "command", "python"]
OLDER_NAMES = {"eval_strategy": "evaluation_strategy"}
PROCESSES = "processes"  # in a message: the number of processes


class _Shown(string.Formatter):
    """Format keys in messages as the file or command writes them."""

    def __init__(self, given: Given, style: Style) -> None:
        self.given, self.style = given, style

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Any) -> Any:
        """Return the text of a key, which may have dots."""
        return self.get_value(field_name, args, kwargs), field_name

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Any) -> str:
        """Return a key with its value, or with the default in parentheses."""
        name = str(key)
        if name == PROCESSES:
            count = self.given.processes
            return f"{count or 'the'} process{'es' * (count != 1)}"
        name = next((one for one in (name, OLDER_NAMES.get(name, name)) if one in self.given.settings), name)
        setting = self.given.settings.get(name)
        if setting is None or setting.value is None:
            default = self.given.get(name)
            return f"{written_name(name, self.style)} (not set{f': {default}' if default is not None else ''})"
        is_switch = self.style == "command" and setting.value is True
        return written_name(name, self.style) if is_switch else written(name, setting.value, self.style)


def broken_checks(
    tables: Sequence[Table],
    settings: Settings,
    style: Style,
    model: ModelSpec | None = None,
    processes: int | None = None,
) -> Iterator[Finding]:
    """Yield the checks that refuse these settings; one whose values are known only at run time is skipped."""
    for table in tables:
        given = Given(settings, table.defaults, model, processes)
        for check in table.checks:
            try:
                if check.broken(given):
                    yield _finding(table, check, given, style)
            except UnresolvedKeyError:
                continue


def _finding(table: Table, check: StartCheck, given: Given, style: Style) -> Finding:
    changes = check.fix(given) if callable(check.fix) else check.fix
    place = next((key for key in (check.key, *changes) if key in given.settings), "")
    at = given.settings[place] if place else next(iter(given.settings.values()), SourcedValue("", 1, ""))
    message = check.message if isinstance(check.message, str) else check.message(given)
    text = _Shown(given, style).vformat(message, (), {})
    severity: Severity = "warning" if check.since else check.severity  # a file does not say which version reads it
    verb = check.effect or ("refuses to start" if check.severity == "error" else "warns")
    verb += f" since version {check.since}" if check.since else ""
    fix = tuple(_in_its_place(key, value, given, style) for key, value in changes.items())
    return Finding(check.rule, severity, check.key, f"{text}: {table.title} {verb}", fix, at.file, at.line)


def _in_its_place(key: str, value: Any, given: Given, style: Style) -> str:
    """Return a change as its own place writes it: a value in the code of a program is no flag of its command."""
    setting = given.settings.get(key)
    if style == "command" and setting is not None and setting.file.endswith(".py") and not setting.default_of:
        return f"{setting.file}: {written(key, value, 'python')}"
    return written(key, value, style)


def written_name(key: str, style: Style) -> str:
    """Return a key as a file, command or program writes it."""
    return f"--{key}" if style == "command" else key


def written(key: str, value: Any, style: Style) -> str:
    """Return a setting as a file, command or program writes it; None removes it."""
    name = written_name(key, style)
    if value is None:
        return f"without {name}"
    if style == "python":
        return f"{name}={value!r}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, list):
        text = " ".join(map(str, value)) if style == "command" else f"[{', '.join(map(str, value))}]"
    return f"{name} {text}" if style == "command" else f"{name}: {text}"

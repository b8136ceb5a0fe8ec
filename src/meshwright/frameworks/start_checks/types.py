"""A check that a program makes of its arguments at start, and the arguments as its condition reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshwright.frameworks.types import Settings
from meshwright.models import ModelSpec
from meshwright.rules.rule import Severity

Changes = Mapping[str, Any]
"""New values by key; None removes a key."""
OFF = ("", "false", "no", "none", "null", "0", "0.0", "f", "n")


class UnresolvedKeyError(Exception):
    """A condition depends on a value that is known only at run time."""


class Given(NamedTuple):
    """The arguments of a program: those that a file or command sets, and the program's defaults."""

    settings: Settings
    defaults: Mapping[str, Any]
    model: ModelSpec | None = None
    processes: int | None = None  # that train, if the launch states them

    def get(self, key: str) -> Any:
        """Return the value of a key, else its default; raise UnresolvedKeyError if it is known only at run time."""
        setting = self.settings.get(key)
        if setting is None or setting.value is None:
            default = self.defaults.get(key)
            return default(self) if callable(default) else default
        if setting.unresolved:
            raise UnresolvedKeyError(key)
        return setting.value

    def text(self, key: str) -> str:
        """Return a value in lower case; empty if it is not set."""
        value = self.get(key)
        return "" if value is None else str(value).strip().lower()

    def items(self, key: str) -> list[str]:
        """Return the items of a list, in lower case: written as a list, or as text with commas."""
        return [one.lower() for one in self.names(key)]

    def names(self, key: str) -> list[str]:
        """Return the items of a list as they are written."""
        value = self.get(key)
        parts = value if isinstance(value, list) else str(value or "").replace("[", "").replace("]", "").split(",")
        return [text for one in parts if (text := str(one).strip().strip("'\""))]

    def is_on(self, *keys: str) -> bool:
        """Return whether all of these keys are set to something other than false, 0 or nothing."""
        return all(self.text(key) not in OFF or self._has_keys(key) for key in keys)

    def any_on(self, *keys: str) -> bool:
        """Return whether one of these keys is."""
        return any(self.is_on(key) for key in keys)

    def number(self, key: str) -> float | None:
        """Return a number; None if it is not set or not one."""
        try:
            return float(self.text(key))
        except ValueError:
            return None

    def is_stated(self, key: str) -> bool:
        """Return whether the file or command sets a key."""
        return key in self.settings or self._has_keys(key)

    def _has_keys(self, key: str) -> bool:
        return any(name.startswith((f"{key}.", f"{key}[")) for name in self.settings)


class StartCheck(NamedTuple):
    """A combination of arguments that a program refuses at start."""

    key: str  # that is reported, if it is set; else the first key of `fix`
    broken: Callable[[Given], bool]
    message: str | Callable[[Given], str]  # {key} is replaced by the key with its value
    fix: Changes | Callable[[Given], Changes]
    place: str  # upstream: file and function
    severity: Severity = "error"
    rule: str = "value.invalid"
    effect: str = ""  # what happens, if the program starts: it fails later
    since: str = ""  # version that added the check to settings that were accepted before: then a warning


class Table(NamedTuple):
    """The checks of one program."""

    title: str
    defaults: Mapping[str, Any]  # a function of Given where a default follows from other keys
    checks: tuple[StartCheck, ...]


def together(*keys: str) -> Callable[[Given], bool]:
    """Return the condition that all of these keys are on."""
    return lambda given: given.is_on(*keys)


def without(key: str, needed: str) -> Callable[[Given], bool]:
    """Return the condition that a key is on and the one that it needs is not."""
    return lambda given: given.is_on(key) and not given.is_on(needed)

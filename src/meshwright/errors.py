"""Errors for users: each has the field, the value, the reason and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.similar import closest as closest


class MeshwrightError(Exception):
    """An error that is reported in one message, with its fix."""

    exit_code = 2
    shown = 300  # characters of the value in the message

    def __init__(self, reason: str, field: str = "", value: object = None, fix: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.reason, self.field, self.value, self.fix = reason, field, value, fix

    @property
    def _value(self) -> str:
        text = str(self.value)
        return text if len(text) <= self.shown else f"{text[: self.shown]}… ({len(text)} characters)"

    @property
    def message(self) -> str:
        """Return field, value and reason in one line, without the fix."""
        where = f"{self.field}={self._value}: " if self.field and self.value is not None else ""
        if self.field and self.value is None:
            where = f"{self.field}: "
        return where + self.reason

    def __str__(self) -> str:
        """Return the message and the fix: an error that a Python program does not catch shows both."""
        fixes = [str(fix) for fix in self.fix if not (" " in str(fix) and str(fix) in self.message)]
        return self.message + (f"\nfix: {' | '.join(fixes)}" if fixes else "")

    def to_dict(self) -> dict[str, object]:
        """Return the error as it is printed and sent as JSON."""
        return {
            "kind": type(self).__name__,
            "field": self.field,
            "value": None if self.value is None else self._value,
            "message": self.reason,
            "fix": list(self.fix),
        }


class InputError(MeshwrightError):
    """An input is invalid (exit code 2)."""


class OutputError(MeshwrightError):
    """An output could not be written (exit code 3)."""

    exit_code = 3


MANY = 60  # names, of which a few say nothing


def some(names: Sequence[str], shown: int = 3, between: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + more


def first_line(error: Exception, longest: int = 300) -> str:
    """Return the first line of another library's error; its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


def unknown(field: str, value: object, known: Iterable[str], listed_by: str = "", noun: str = "") -> InputError:
    """Return the error for an unknown name, with did-you-mean.

    `listed_by` is the command that lists all names; `noun` is what it names, the field if empty.
    """
    names, noun = list(known), noun or field
    near = closest(str(value), names)
    if near:
        reason = f"unknown {noun} {value!s}; did you mean {' or '.join(near)}?"
    else:
        more = f" …; {listed_by} lists all" if listed_by else " …"
        shown = f"known: {', '.join(sorted(names)[:12])}{more if len(names) > 12 else ''}"
        listed = bool(listed_by) and len(names) > MANY  # the first dozen of hundreds of recipes helps nobody
        reason = f"unknown {noun} {value!s}; {f'{listed_by} lists all' if listed else shown}"
    return InputError(reason, field=field, value=value, fix=near)

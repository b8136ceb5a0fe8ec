"""Errors for users: each has the field, the value, the reason and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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

    def __str__(self) -> str:
        where = f"{self.field}={self._value}: " if self.field and self.value is not None else ""
        if self.field and self.value is None:
            where = f"{self.field}: "
        return where + self.reason

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


SHORT = 5  # characters


class OutputError(MeshwrightError):
    """An output could not be written (exit code 3)."""

    exit_code = 3


def closest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return the known names closest to a name, best first; empty if none is close."""
    from rapidfuzz import fuzz, process

    found = process.extract(
        name.lower(),
        list(dict.fromkeys(known)),
        scorer=fuzz.WRatio,
        processor=str.lower,
        limit=5 * limit,
        score_cutoff=60,
    )
    # WRatio also matches parts of long names; sort its matches by the similarity of the full names.
    scored = [(match, score, fuzz.ratio(name.lower(), match.lower())) for match, score, _ in found]
    if len(name) <= SHORT:  # a short name is part of many names: require a close match
        scored = [one for one in scored if one[1] >= 85 or one[2] >= 60]
    return [match for match, _, _ in sorted(scored, key=lambda one: -one[2])][:limit]


def some(names: Sequence[str], shown: int = 3, between: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + more


def first_line(error: Exception, longest: int = 300) -> str:
    """Return the first line of another library's error; its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


def unknown(field: str, value: object, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, with did-you-mean."""
    names = list(known)
    near = closest(str(value), names)
    if near:
        reason = f"unknown {field} {value!s}; did you mean {' or '.join(near)}?"
    else:
        shown = ", ".join(sorted(names)[:12]) + (" …" if len(names) > 12 else "")
        reason = f"unknown {field} {value!s}; known: {shown}"
    return InputError(reason, field=field, value=value, fix=near)

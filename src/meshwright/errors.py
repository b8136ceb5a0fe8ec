"""The errors a user can meet: each names the field, the value, the reason and the exact fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class MeshwrightError(Exception):
    """A mistake or a "no" that is told in one message, with the way out."""

    exit_code = 2
    shown = 300  # characters of the value that are repeated

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
        """The error as the JSON object of the outer contract."""
        return {
            "kind": type(self).__name__,
            "field": self.field,
            "value": None if self.value is None else self._value,
            "message": self.reason,
            "fix": list(self.fix),
        }


class InputError(MeshwrightError):
    """What was asked cannot be understood or cannot exist (exit code 2)."""


SHORT = 5  # letters


class OutputError(MeshwrightError):
    """An answer was there and could not be written (exit code 3)."""

    exit_code = 3


def closest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names nearest to what was typed, best first; empty when nothing is near."""
    from rapidfuzz import fuzz, process

    found = process.extract(
        name.lower(),
        list(dict.fromkeys(known)),
        scorer=fuzz.WRatio,
        processor=str.lower,
        limit=5 * limit,
        score_cutoff=60,
    )
    # WRatio finds parts of long names; among what it finds, the one nearest as a whole comes first.
    scored = [(match, score, fuzz.ratio(name.lower(), match.lower())) for match, score, _ in found]
    if len(name) <= SHORT:  # a few letters are easily part of something: they must be there to the letter
        scored = [one for one in scored if one[1] >= 85 or one[2] >= 60]
    return [match for match, _, _ in sorted(scored, key=lambda one: -one[2])][:limit]


def some(names: Sequence[str], shown: int = 3, between: str = ", ") -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + more


def first_line(error: Exception, longest: int = 300) -> str:
    """What another library's error says, without the pages it may add; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


def unknown(field: str, value: object, known: Iterable[str]) -> InputError:
    """The error for a name nobody knows, with did-you-mean."""
    names = list(known)
    near = closest(str(value), names)
    if near:
        reason = f"unknown {field} {value!s}; did you mean {' or '.join(near)}?"
    else:
        shown = ", ".join(sorted(names)[:12]) + (" …" if len(names) > 12 else "")
        reason = f"unknown {field} {value!s}; known: {shown}"
    return InputError(reason, field=field, value=value, fix=near)

"""Results that print readably: as text in a terminal, as a table in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

Row = tuple[str, str]
T = TypeVar("T")

TITLE = 9  # columns of a title, its space included
WIDEST = 160  # characters of one value of a summary that is made from fields
SHOWN = 8  # entries of a field that is a list
SCALARS = (str, int, float, bool)
LEFT = ' style="text-align:left"'
LEAST_SHOWN = 0.01  # money and GPU-hours below it are shown as less than this
TIMES = (("days", 1), ("hours", 24), ("minutes", 24 * 60), ("seconds", 24 * 60 * 60))  # in a day
UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


class Readable:
    """A result with a summary of titled lines; its fields are attributes as before."""

    def summary(self) -> Sequence[Row]:
        """Return title and text of every line; an empty title continues the line above. By default: the fields."""
        return field_rows(self)

    def __str__(self) -> str:
        rows = self.summary()
        width = max([TITLE, *(len(title) + 1 for title, _ in rows)])
        return "\n".join(f"{title:<{width}}{text}".rstrip() for title, text in rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the summary as an HTML table; all texts are escaped."""
        return _html((), self.summary(), titles=True)


class Entry(Readable):
    """A result that is usually one of several: on one line in a list, as a table in a notebook."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {_cut(', '.join(text for _, text in self.summary()))}>"


class Listing(list[T]):
    """A list of results that prints as a table: one row each, with these columns."""

    def __init__(self, entries: Iterable[T], columns: Mapping[str, Callable[[T], object]]) -> None:
        super().__init__(entries)
        self.columns = columns

    @overload
    def __getitem__(self, place: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> Listing[T]: ...

    def __getitem__(self, place: SupportsIndex | slice) -> T | Listing[T]:
        if isinstance(place, slice):
            return Listing(super().__getitem__(place), self.columns)
        return super().__getitem__(place)

    def _rows(self) -> list[tuple[str, ...]]:
        return [tuple(_scalar(of(one)) for of in self.columns.values()) for one in self]

    def __repr__(self) -> str:
        lines = [tuple(self.columns), *self._rows()]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join(line.rstrip() for line in shown)

    def _repr_html_(self) -> str:
        """Return the table as HTML; all texts are escaped."""
        return _html(tuple(self.columns), self._rows())


def _html(headers: Sequence[str], rows: Iterable[Sequence[str]], titles: bool = False) -> str:
    """Return an HTML table; `titles` makes the first cell of every row a heading."""
    from html import escape  # only notebooks need it

    head = f"<tr>{''.join(f'<th{LEFT}>{escape(one)}</th>' for one in headers)}</tr>" if headers else ""
    body = "".join(
        "<tr>"
        + "".join(
            f"<{tag}{LEFT}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(row)
            for tag in ("th" if titles and not place else "td",)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table{LEFT}>{head}{body}</table>"


def titled(title: str, lines: Sequence[str]) -> list[Row]:
    """Return lines with a title before the first."""
    return [("" if place else title, line) for place, line in enumerate(lines)]


def field_rows(result: object, leave_out: Sequence[str] = ("schema",)) -> list[Row]:
    """Return the fields of a struct or named tuple that are set, one or several lines each."""
    values = {name: getattr(result, name) for name in _names(result) if name not in leave_out}
    lines = {name: _lines(value) for name, value in values.items()}
    return [row for name, found in lines.items() for row in titled(name.replace("_", " ").capitalize(), found)]


def _names(value: object) -> Sequence[str]:
    """Return the fields of a struct or named tuple; of anything else none."""
    names: Sequence[str] = getattr(value, "__struct_fields__", ()) or getattr(value, "_fields", ())
    return names


def _lines(value: Any) -> list[str]:
    """Return a value as lines; none if it says nothing."""
    if isinstance(value, str):
        return [_cut(line) for line in value.splitlines()]
    if _names(value):
        return [_brief(value)]
    if isinstance(value, Mapping):
        if all(_is_scalar(one) for one in value.values()):
            return [_cut(", ".join(f"{key} {_scalar(one)}" for key, one in value.items()))] if value else []
        return _first([f"{key}: {line}" for key, one in value.items() for line in _lines(one)[:1]])
    if isinstance(value, list | tuple | set | frozenset):
        if all(isinstance(one, int | float) for one in value):
            return [_cut(", ".join(_scalar(one) for one in value))] if value else []
        return _first([line for one in value for line in _lines(one)[:1]])
    return [_scalar(value)] if _is_scalar(value) else []


def _first(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN + 1 else [*lines[:SHOWN], f"… and {len(lines) - SHOWN} more"]


def _brief(value: Any) -> str:
    """Return a nested result on one line: its own first line, or its fields that are texts and numbers."""
    if isinstance(value, Readable):
        return _cut(next((text for _, text in value.summary()), ""))
    values = {name: getattr(value, name) for name in _names(value)}
    shown = [
        _scalar(one) if isinstance(one, str) else f"{name} {_scalar(one)}"
        for name, one in values.items()
        if _is_scalar(one) and one != ""
    ]
    return _cut(", ".join(shown))


def _is_scalar(value: object) -> bool:
    return isinstance(value, SCALARS)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def short_number(value: float, digits: str = ",.4g", least: float = 1e6) -> str:
    """Return a count with the letter of its size, such as 1.5B; below `least` in full."""
    plain = digits.replace(",", "")
    fitting = (one for one in UNITS if one[1] >= least and float(f"{value / one[1]:{plain}}") >= 1)  # 999.9M is 1B
    letter, size = next(fitting, ("", 0.0))
    return f"{value / size:{digits}}{letter}" if size else f"{value:,.0f}"


def parameter_count(parameters: float, digits: int = 2) -> str:
    """Return a number of parameters in its unit: 8.03 B, 0.14 B, 12.30 M, 37.41 k."""
    for unit, size, least in (("B", 1e9, 1e8), ("M", 1e6, 1e5), ("k", 1e3, 1e3)):
        if parameters >= least:
            return f"{parameters / size:,.{digits}f} {unit}"
    return f"{parameters:,.0f}"


def two_digits(value: float) -> str:
    """Return a number with two digits that count, or in full from 100: 0.0024, 1.6, 160, never 1.6e+02."""
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.2g}"


def plural(number: float, noun: str) -> str:
    """Return a count with its noun: 1 step, 2,000 steps."""
    return f"{number:,.0f} {noun}" + "s" * (round(number) != 1)


def ordinal(number: int) -> str:
    """Return the place of a number: 1st, 2nd, 3rd, 30th."""
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{last}"


def amount(value: float, limit: float | None = None) -> str:
    """Return money or GPU-hours with the digits that matter: thousands, cents, or that it is less than 0.01."""
    if limit is not None and value < 1.02 * limit:
        return f"{value:,.2f}"
    if 0 < value < LEAST_SHOWN:
        return f"less than {LEAST_SHOWN:g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def gpu_hours(value: float) -> str:
    """Return GPU-hours with the digits that matter, also of a run of minutes: 0.014, not 0.01."""
    return two_digits(value) if 0 < value < 0.1 else amount(value)


def duration(days: float, deadline: float | None = None) -> str:
    """Return a time in the largest unit of which it has at least two: days, hours, minutes, else seconds.

    One next to a deadline, also in days, has the digits that tell on which side of it it is.
    """
    unit, each = next(((unit, each) for unit, each in TIMES if days * each >= 2), TIMES[-1])
    is_close = deadline is not None and abs(days - deadline) < 0.02 * deadline
    return f"{f'{days * each:,.2f}' if is_close else amount(days * each)} {unit}"

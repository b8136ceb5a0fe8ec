"""Results that print readably: as text in a terminal, as a table in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Row = tuple[str, str]


class Readable:
    """A result with a summary of titled lines; its fields are attributes as before."""

    def summary(self) -> Sequence[Row]:
        """Return title and text of every line; an empty title continues the line above."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(f"{title:<9}{text}".rstrip() for title, text in self.summary())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the summary as an HTML table; all texts are escaped."""
        rows = (f"<tr><th>{escape(title)}</th><td>{escape(text)}</td></tr>" for title, text in self.summary())
        style = ' style="text-align:left"'
        return f"<table{style}>{''.join(rows)}</table>".replace("<th>", f"<th{style}>").replace("<td>", f"<td{style}>")


def titled(title: str, lines: Sequence[str]) -> list[Row]:
    """Return lines with a title before the first."""
    return [("" if place else title, line) for place, line in enumerate(lines)]

"""Figures as SVG without matplotlib: the few kinds of plots that commands draw, by the same method names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
WIDTH, HEIGHT = 530.0, 400.0  # of one axes with its labels
LEFT, RIGHT, TOP, BOTTOM = 96.0, 16.0, 34.0, 64.0
TICKS = 6


class Shape(NamedTuple):
    """A rectangle, line, area or row of markers in data coordinates."""

    kind: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str


class Axes:
    """One plot."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        self.labels: dict[str, str] = {}  # color by label
        self.names: dict[str, list[str]] = {"x": [], "y": []}  # categories
        self.ticks: dict[str, dict[float, str]] = {"x": {}, "y": {}}
        self.logarithmic = {"x": False, "y": False}
        self.limits: dict[str, tuple[float | None, float | None]] = {}
        self.texts: dict[str, str] = {}
        self.inverted = self.has_legend = False
        self.used = 0

    def bar(
        self, x: Iterable[Any], height: Iterable[float], bottom: Iterable[float] | None = None, **more: Any
    ) -> None:
        """Draw upright bars."""
        heights = list(height)
        below = list(bottom) if bottom is not None else [0.0] * len(heights)
        color = self._color(more)
        for name, start, high in zip(x, below, heights, strict=True):
            middle = self._place("x", name)
            self._rectangle(middle - 0.4, middle + 0.4, start, start + high, color)

    def barh(self, y: Any, width: Any, left: float = 0.0, height: float = 0.8, **more: Any) -> None:
        """Draw bars to the right."""
        names, widths = (y, width) if isinstance(y, list) else ([y], [width])
        color = self._color(more)
        for name, wide in zip(names, widths, strict=True):
            middle = self._place("y", name)
            self._rectangle(left, left + wide, middle - height / 2, middle + height / 2, color)

    def stackplot(self, x: Iterable[float], *heights: Sequence[float], **more: Any) -> None:
        """Draw areas on top of each other."""
        places = list(x)
        below = [0.0] * len(places)
        for rows in heights:
            above = [low + high for low, high in zip(below, rows, strict=True)]
            xs, ys = [*places, *reversed(places)], [*above, *reversed(below)]
            self.shapes.append(Shape("area", xs, ys, self._color({})))
            below = above

    def axhline(self, y: float, **more: Any) -> None:
        """Draw a dashed line across the plot."""
        self.shapes.append(Shape("across", (), (y,), "#000000"))

    def loglog(self, x: Sequence[float], y: Sequence[float], style: str = "-", **more: Any) -> None:
        """Draw a line or points, both axes logarithmic."""
        self.logarithmic = {"x": True, "y": True}
        self._line(x, y, style, more)

    def semilogx(self, x: Sequence[float], y: Sequence[float], style: str = "-", **more: Any) -> None:
        """Draw a line, the x axis logarithmic."""
        self.logarithmic["x"] = True
        self._line(x, y, style, more)

    def set(self, **settings: Any) -> None:
        """Set title, labels and limits."""
        for name in ("title", "xlabel", "ylabel"):
            self.texts[name] = str(settings.get(name, self.texts.get(name, "")))
        for name in ("x", "y"):
            if f"{name}lim" in settings:
                self.limits[name] = settings[f"{name}lim"]

    def set_xticks(self, places: Iterable[float], names: Iterable[str], **more: Any) -> None:
        """Name places of the x axis."""
        self.ticks["x"] = dict(zip(places, names, strict=True))

    def set_yticks(self, places: Iterable[float], names: Iterable[str], **more: Any) -> None:
        """Name places of the y axis."""
        self.ticks["y"] = dict(zip(places, names, strict=True))

    def invert_yaxis(self) -> None:
        """Put the smallest value on top."""
        self.inverted = True

    def legend(self, **more: Any) -> None:
        """Show the labels."""
        self.has_legend = True

    def get_legend_handles_labels(self) -> tuple[list[str], list[str]]:
        """Return colors and labels."""
        return [*self.labels.values()], [*self.labels]

    def _line(self, x: Sequence[float], y: Sequence[float], style: str, more: dict[str, Any]) -> None:
        pairs = [(a, b) for a, b in zip(x, y, strict=True) if not self._is_hidden(a, b)]
        xs, ys, color = [a for a, _ in pairs], [b for _, b in pairs], self._color(more)
        if style != ".":
            self.shapes.append(Shape("line", xs, ys, color))
        if style == "." or more.get("marker"):
            self.shapes.append(Shape("dots", xs, ys, color))

    def _is_hidden(self, x: float, y: float) -> bool:
        return (self.logarithmic["x"] and x <= 0) or (self.logarithmic["y"] and y <= 0)

    def _rectangle(self, left: float, right: float, low: float, high: float, color: str) -> None:
        self.shapes.append(Shape("area", (left, right, right, left), (low, low, high, high), color))

    def _color(self, more: dict[str, Any]) -> str:
        named = more.get("color")
        if named is None:
            found = COLORS[self.used % len(COLORS)]
            self.used += 1
        else:
            is_cycle = str(named).startswith("C") and str(named)[1:].isdigit()
            found = COLORS[int(str(named)[1:]) % len(COLORS)] if is_cycle else str(named)
        if more.get("label"):
            self.labels.setdefault(str(more["label"]), found)
        return found

    def _place(self, axis: str, name: Any) -> float:
        """Return the place of a category or a number."""
        if not isinstance(name, str):
            return float(name)
        if name not in self.names[axis]:
            self.names[axis].append(name)
            self.ticks[axis][float(len(self.names[axis]) - 1)] = name
        return float(self.names[axis].index(name))

    def svg(self, left: float) -> str:
        """Return the plot as SVG, moved to the right."""
        x, y = self._scale("x", LEFT, WIDTH - RIGHT), self._scale("y", HEIGHT - BOTTOM, TOP)
        if self.inverted:
            y = Scale(y.low, y.high, y.end, y.start, y.logarithmic)
        parts = [_text(WIDTH / 2, 20, self.texts.get("title", ""), size=14)]
        parts += [_drawn(shape, x, y) for shape in self.shapes]
        frame = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect {frame} fill="none" stroke="#444"/>')
        for place, name in (self.ticks["x"] or x.ticks()).items():
            parts.append(_text(x.at(place), HEIGHT - BOTTOM + 16, name))
        for place, name in (self.ticks["y"] or y.ticks()).items():
            parts.append(_text(LEFT - 6, y.at(place) + 4, name, anchor="end"))
        parts.append(_text(WIDTH / 2, HEIGHT - 12, self.texts.get("xlabel", "")))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(_text(16, middle, self.texts.get("ylabel", ""), turned=True))
        if self.has_legend and self.labels:
            width, height = 30 + 6.2 * max(map(len, self.labels)), 15 * len(self.labels) + 6
            box = f'x="{LEFT + 4}" y="{TOP + 4}" width="{width:.0f}" height="{height}"'
            parts.append(f'<rect {box} fill="#fff" fill-opacity="0.85" stroke="#ccc"/>')
            for row, (label, color) in enumerate(self.labels.items()):
                parts.append(f'<rect x="{LEFT + 8}" y="{TOP + 8 + 15 * row}" width="10" height="10" fill="{color}"/>')
                parts.append(_text(LEFT + 22, TOP + 17 + 15 * row, label, anchor="start"))
        return f'<g transform="translate({left},0)">{"".join(parts)}</g>'

    def _scale(self, axis: str, start: float, end: float) -> Scale:
        values = [v for shape in self.shapes for v in (shape.xs if axis == "x" else shape.ys)] or [0.0, 1.0]
        low, high = min(values), max(values)
        logarithmic = self.logarithmic[axis] and low > 0
        asked = self.limits.get(axis, (None, None))
        low = low if asked[0] is None else asked[0]
        high = high if asked[1] is None else asked[1]
        if logarithmic:
            return Scale(low / 1.1, high * 1.1, start, end, logarithmic)
        room = 0.0 if self.names[axis] and axis not in self.limits else 0.05 * (high - low)
        return Scale(low, (high + room) if high > low else low + 1.0, start, end, logarithmic)


class Scale(NamedTuple):
    """From data to the drawing along one axis."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def at(self, value: float) -> float:
        """Return where a value is drawn."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> dict[float, str]:
        """Return values to name, with their names."""
        if self.logarithmic:
            base = 10.0 if self.high / self.low > 1e4 else 2.0
            first, last = math.ceil(math.log(self.low, base)), math.floor(math.log(self.high, base))
            step = max(1, -(-(last - first) // TICKS))
            return {base**power: f"{base**power:,.6g}" for power in range(first, last + 1, step)}
        rough = (self.high - self.low) / TICKS
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self.low / step)
        count = int((self.high - first * step) / step + 1e-9) + 1
        return {(first + place) * step: f"{(first + place) * step:,.6g}" for place in range(count)}


def _drawn(shape: Shape, x: Scale, y: Scale) -> str:
    if shape.kind == "across":
        place = y.at(shape.ys[0])
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"'
        return f'<line {ends} stroke="{shape.color}" stroke-dasharray="6 3"/>'
    points = [(x.at(a), y.at(b)) for a, b in zip(shape.xs, shape.ys, strict=True)]
    if shape.kind == "dots":
        return "".join(f'<circle cx="{a}" cy="{b}" r="2.5" fill="{shape.color}"/>' for a, b in points)
    path = " ".join(f"{a},{b}" for a, b in points)
    if shape.kind == "line":
        return f'<polyline points="{path}" fill="none" stroke="{shape.color}" stroke-width="1.5"/>'
    return f'<polygon points="{path}" fill="{shape.color}" stroke="#fff" stroke-width="0.3"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x} {y})"' if turned else ""
    shown = text if len(text) <= 60 else f"{text[:59]}…"
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{turn}>{escape(shown)}</text>'


class SvgFigure:
    """Axes side by side."""

    def __init__(self, columns: int) -> None:
        self.axes = [Axes() for _ in range(columns)]

    def savefig(self, path: str, **more: Any) -> None:
        """Write the file."""
        width = WIDTH * len(self.axes)
        plots = "".join(one.svg(place * WIDTH) for place, one in enumerate(self.axes))
        size = f'viewBox="0 0 {width:g} {HEIGHT:g}" width="{width:g}" height="{HEIGHT:g}" font-family="sans-serif"'
        ground = '<rect width="100%" height="100%" fill="#fff"/>'
        text = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{ground}{plots}</svg>\n'
        Path(path).write_text(text, encoding="utf-8")

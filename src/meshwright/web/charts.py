"""Charts as Vega-Lite specifications: data and encodings; colors come from the style sheet, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NEAR = 2.5  # times the fastest step: the initial view
Spec = dict[str, Any]


def layouts(plans: Mapping[str, Any]) -> Spec:
    """Return the chart of layouts that fit: memory across, seconds up, faster above. explore.js adds the rows."""
    tip = [
        {"field": "words", "title": "layout"},
        {"field": "total_gib", "title": "GiB", "format": ".1f"},
        {"field": "step_s", "title": "s per step", "format": ".4g"},
    ]
    point = {"type": "point", "filled": True, "opacity": 0.75, "tooltip": True, "cursor": "pointer", "clip": True}
    seconds = [one["step_s"] for one in plans.get("fitting", [])] or [1.0]
    near = [min(seconds) * 0.98, min(max(seconds), NEAR * min(seconds)) * 1.02]  # zoom out for the rest
    return {
        "height": 420,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding", "resize": True},
        "data": {"name": "layouts"},
        "params": [
            {"name": "chosen", "select": {"type": "point", "fields": ["id"], "toggle": False}},
            {"name": "window", "select": "interval", "bind": "scales"},
        ],
        "mark": point,
        "encoding": {
            "x": {"field": "total_gib", "type": "quantitative", "title": "GiB per GPU", "scale": {"zero": False}},
            "y": {
                "field": "step_s",
                "type": "quantitative",
                "title": "seconds per step (faster is higher)",
                "scale": {"type": "log", "reverse": True, "nice": False, "domain": near},
                "axis": {"format": "~g", "tickCount": 8},
            },
            "color": {"field": "color", "type": "nominal", "title": None},
            "shape": {
                "field": "slot",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": ["", "A", "B"], "range": ["circle", "square", "diamond"]},
            },
            "size": {"field": "size", "type": "quantitative", "legend": None, "scale": None},
            "tooltip": tip,
        },
    }


SCALED = {
    "tokens_per_s": ("tokens per second", "log", "~s"),
    "mfu": ("MFU", "linear", ".0%"),
    "days": ("days", "log", "~g"),
    "cost": ("cost", "log", "~s"),
}


def scaling(series: Sequence[Mapping[str, Any]]) -> dict[str, Spec]:
    """Return one chart per figure of the response, against the number of GPUs."""
    rows = [
        {"gpu": one["gpu"], **{name: size[name] for name in ("gpus", "layout", *SCALED)}}
        for one in series
        for size in one["sizes"]
        if size["fits"]
    ]
    wanted = [name for name in SCALED if any(row[name] is not None for row in rows)]
    return {name: _against_gpus(name, [row for row in rows if row[name] is not None]) for name in wanted}


def _against_gpus(name: str, rows: list[dict[str, Any]]) -> Spec:
    title, scale, form = SCALED[name]
    kept = [{key: row[key] for key in ("gpu", "gpus", "layout", name)} for row in rows]
    return {
        "height": 220,
        "width": "container",
        "data": {"values": kept},
        "mark": {"type": "line", "point": {"size": 40, "filled": True}, "tooltip": True},
        "encoding": {
            "x": {
                "field": "gpus",
                "type": "quantitative",
                "title": "GPUs",
                "scale": {"type": "log", "base": 2, "nice": False},
                "axis": {"format": ",", "labelOverlap": True},
            },
            "y": {
                "field": name,
                "type": "quantitative",
                "title": title,
                "scale": {"type": scale, **({"zero": True} if scale == "linear" else {})},
                "axis": {"format": form},
            },
            "color": {"field": "gpu", "type": "nominal", "title": None},
            "tooltip": [
                {"field": "gpu", "title": "GPU"},
                {"field": "gpus", "title": "GPUs", "format": ","},
                {"field": name, "title": title, "format": ".1%" if form == ".0%" else ",.4~g"},
                {"field": "layout"},
            ],
        },
    }


def accuracy(points: Sequence[Mapping[str, Any]], unit: str) -> Spec:
    """Return predicted against measured on equal axes, with the diagonal."""
    values = [dict(point) for point in points]
    ends = [value for point in points for value in (point["measured"], point["predicted"])] or [1.0, 1.0]
    line = [{"measured": end, "predicted": end} for end in (min(ends), max(ends))]
    scale = {"type": "log", "nice": False, "domain": [min(ends), max(ends)]}
    axis = {"type": "quantitative", "scale": scale, "axis": {"format": "~g", "tickCount": 5}}
    return {
        "height": 340,
        "width": "container",
        "layer": [
            {
                "data": {"values": line},
                "mark": {"type": "line", "strokeDash": [4, 4], "opacity": 0.8, "style": "guide"},
                "encoding": {"x": {"field": "measured", **axis}, "y": {"field": "predicted", **axis}},
            },
            {
                "data": {"name": "points", "values": values},
                "mark": {"type": "point", "filled": True, "size": 18, "opacity": 0.6, "tooltip": True},
                "encoding": {
                    "x": {"field": "measured", "title": f"measured, {unit}", **axis},
                    "y": {"field": "predicted", "title": f"predicted, {unit}", **axis},
                    "color": {"field": "source", "type": "nominal", "legend": None},
                    "tooltip": [
                        {"field": "source"},
                        {"field": "gpu", "title": "GPU"},
                        {"field": "measured", "format": ".4g"},
                        {"field": "predicted", "format": ".4g"},
                    ],
                },
            },
        ],
    }

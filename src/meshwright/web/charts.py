"""Charts as Vega-Lite specifications: data and encodings; colors come from the style sheet, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import Any

NEAR = 2.5  # times the fastest step: the initial view
Spec = dict[str, Any]


def layouts(
    plans: Mapping[str, Any], marks: Sequence[Mapping[str, Any]] = (), measured: Sequence[Mapping[str, Any]] = ()
) -> Spec:
    """Return the chart of layouts that fit: memory across, seconds up, faster above. explore.js adds the rows.

    `marks` are layouts with a label, such as the recommended one; `measured` are published runs, at the left edge if
    their memory is not known; the dashed line is the memory of a GPU.
    """
    rows = plans.get("fitting", [])
    seconds = [one["step_s"] for one in rows] or [1.0]
    least = min(one["total_gib"] for one in rows) if rows else 0.0
    capacity = plans["plans"][0]["estimate"]["memory_gib"]["capacity"]
    fastest = min(*seconds, *(one["step_s"] for one in (*marks, *measured)), min(seconds))
    near = [fastest * 0.93, min(max(seconds), NEAR * min(seconds)) * 1.02]  # zoom out for the rest
    x = {"type": "quantitative", "title": "GiB per GPU", "scale": {"domain": [least * 0.94, capacity * 1.03]}}
    y = {
        "type": "quantitative",
        "title": "seconds per step (faster is higher)",
        "scale": {"type": "log", "reverse": True, "nice": False, "domain": near},
        "axis": {"format": "~g", "tickCount": 10},  # of fewer, a range inside one decade would have three
    }
    at = {"x": {"field": "total_gib", **x}, "y": {"field": "step_s", **y}}
    tip = [
        {"field": "words", "title": "layout"},
        {"field": "total_gib", "title": "GiB", "format": ".1f"},
        {"field": "step_s", "title": "s per step", "format": ".4g"},
    ]
    limit = {"values": [{"total_gib": capacity, "label": f"capacity {capacity:.1f} GiB"}]}
    limit_at = {"x": {"field": "total_gib", **x}}
    bottom = {"y": {"value": "height"}, "text": {"field": "label"}}  # the fastest layouts and their labels are above
    guide = {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "style": "guide"}
    named = {"type": "text", "align": "right", "baseline": "bottom", "dx": -5, "dy": -5, "style": "caption"}
    point = {"type": "point", "filled": True, "tooltip": True, "cursor": "pointer", "clip": True}
    star = {"type": "point", "shape": "diamond", "size": 260, "strokeWidth": 2.5, "tooltip": True, "clip": True}
    edge = 0.985 * least * 0.94 + 0.015 * capacity * 1.03  # a whole cross right of the axis
    runs = {"values": [{**one, "at_gib": one["total_gib"] or edge} for one in measured]}
    run = {"type": "point", "shape": "cross", "size": 90, "filled": True, "tooltip": True, "clip": True}
    speed = {"field": "tokens_per_s_per_gpu", "title": "tokens/s per GPU", "format": ",.0f"}
    run_tip = [{"field": "words", "title": "measured"}, *tip[1:], speed, {"field": "source", "title": "source"}]
    run_at = {"x": {**at["x"], "field": "at_gib"}, "y": at["y"], "tooltip": run_tip}
    star_name = {"type": "text", "dy": -15, "fontWeight": 600, "style": "caption", "clip": True}
    return {
        "height": 420,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding", "resize": True},
        "layer": [
            {"data": limit, "mark": guide, "encoding": limit_at},
            {"data": limit, "mark": named, "encoding": {**limit_at, **bottom}},
            {
                "data": {"name": "frontier"},
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5, "clip": True, "opacity": 0.7},
                "encoding": {**at, "order": {"field": "total_gib", "type": "quantitative"}},
            },
            *([{"data": runs, "mark": {**run, "style": "measured"}, "encoding": run_at}] if measured else []),
            {"data": {"values": [*marks]}, "mark": star, "encoding": {**at, "tooltip": tip}},
            {"data": {"values": [*marks]}, "mark": star_name, "encoding": {**at, "text": {"field": "label"}}},
            {
                "data": {"name": "layouts"},
                "params": [
                    {"name": "chosen", "select": {"type": "point", "fields": ["id"], "toggle": False}},
                    {"name": "window", "select": "interval", "bind": "scales"},
                ],
                "mark": point,
                "encoding": {
                    **at,
                    "color": {"field": "color", "type": "nominal", "title": None},
                    "opacity": {"field": "opacity", "type": "quantitative", "legend": None, "scale": None},
                    "shape": {
                        "field": "slot",
                        "type": "nominal",
                        "legend": None,
                        "scale": {"domain": ["", "A", "B"], "range": ["circle", "square", "triangle"]},
                    },
                    "size": {"field": "size", "type": "quantitative", "legend": None, "scale": None},
                    "tooltip": tip,
                },
            },
        ],
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
        {"gpu": one["gpu"], **{name: size[name] for name in ("gpus", "layout", "step_pct", *SCALED)}}
        for one in series
        for size in one["sizes"]
        if size["fits"]
    ]
    wanted = [name for name in SCALED if any(row[name] is not None for row in rows)]
    return {name: _against_gpus(name, [row for row in rows if row[name] is not None]) for name in wanted}


def _against_gpus(name: str, rows: list[dict[str, Any]]) -> Spec:
    """Return the chart of one figure: its error band as an area, and the line of its estimates."""
    title, scale, form = SCALED[name]
    kept = [
        {
            **{key: row[key] for key in ("gpu", "gpus", "layout", name)},
            "low": row[name] / (1 + row["step_pct"] / 100),
            "high": row[name] * (1 + row["step_pct"] / 100),
        }
        for row in rows
    ]
    x = {
        "field": "gpus",
        "type": "quantitative",
        "title": "GPUs",
        "scale": {"type": "log", "base": 2, "nice": False},
        "axis": {"format": ",", "labelOverlap": True},
    }
    y = {
        "type": "quantitative",
        "title": title,
        "scale": {"type": scale, **({"zero": True} if scale == "linear" else {"nice": False})},
        "axis": {"format": form, **({"values": log_ticks(kept)} if scale == "log" else {})},
    }
    color = {"field": "gpu", "type": "nominal", "title": None}
    shown = ".1%" if form == ".0%" else ",.4~g"
    return {
        "height": 220,
        "width": "container",
        "data": {"name": "sizes", "values": kept},
        "encoding": {"x": x, "color": color},
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.16},
                "encoding": {"y": {"field": "low", **y}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "line", "point": {"size": 40, "filled": True}, "tooltip": True},
                "encoding": {
                    "y": {"field": name, **y},
                    "tooltip": [
                        {"field": "gpu", "title": "GPU"},
                        {"field": "gpus", "title": "GPUs", "format": ","},
                        {"field": name, "title": title, "format": shown},
                        {"field": "low", "title": "from", "format": shown},
                        {"field": "high", "title": "to", "format": shown},
                        {"field": "layout"},
                    ],
                },
            },
        ],
    }


def log_ticks(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return powers of ten between the ends of bands; with few of them, also twice and five times each."""
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    powers = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
    inside = [one for one in powers if low <= one <= high]
    return inside if len(inside) > 2 else [n * one for one in powers for n in (1, 2, 5) if low <= n * one <= high]


def sides(found: Sequence[Mapping[str, Any]]) -> Spec | None:
    """Return the speed of every engine that runs a training, with the interval of each; None if none runs it."""
    rows = [
        {
            "name": one["name"],
            "rate": one["estimate"]["tokens_per_s_per_gpu"],
            "low": one["estimate"]["tokens_per_s_per_gpu"] / (1 + one["estimate"]["band"]["step_pct"] / 100),
            "high": one["estimate"]["tokens_per_s_per_gpu"] * (1 + one["estimate"]["band"]["step_pct"] / 100),
        }
        for one in found
        if one["ok"] and one["estimate"]
    ]
    if not rows:
        return None
    y = {"field": "name", "type": "nominal", "title": None, "sort": None}
    x = {"type": "quantitative", "title": "tokens per second and GPU", "axis": {"format": ",d"}}
    tip = [{"field": "name"}, *({"field": name, "format": ",.0f"} for name in ("rate", "low", "high"))]
    return {
        "height": 30 * len(rows),
        "width": "container",
        "data": {"values": rows},
        "encoding": {"y": y},
        "layer": [
            {
                "mark": {"type": "bar", "opacity": 0.55, "height": 16, "tooltip": True},
                "encoding": {"x": {"field": "rate", **x}, "tooltip": tip},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2, "style": "guide"},
                "encoding": {"x": {"field": "low", **x}, "x2": {"field": "high"}},
            },
        ],
    }


MARKED = {
    "loss": ("loss", "validation loss"),
    "speed": ("step time", "tokens/s per GPU"),
    "memory": ("memory",),
    "run": ("step time", "loss"),
}  # the curves on which the findings of a group are marked
ALSO_MARKED = {"gradient norm": ("loss.spikes", "loss.growing-gradients", "loss.zero-gradients", "loss.not-a-number")}
JOINED = {"validation loss": "loss"}  # drawn in the chart of another curve


def curves(found: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one chart per curve of a run, with the steps of the findings about it shaded."""
    titles = [one["name"] for one in found if JOINED.get(one["name"]) not in {other["name"] for other in found}]
    charts = []
    for number, title in enumerate(titles):
        drawn = [one for one in found if title in (one["name"], JOINED.get(one["name"]))]
        marked = [one for one in findings if one["steps"] and _is_marked(one["rule"], title)]
        unit = drawn[0]["unit"]
        charts.append(
            {
                "id": f"curve-{number}",
                "title": f"{title}, {unit}" if unit else title,
                "spec": _curve(title, drawn, marked),
            }
        )
    return charts


def _is_marked(rule: str, curve: str) -> bool:
    return curve in MARKED.get(rule.partition(".")[0], ()) or rule in ALSO_MARKED.get(curve, ())


STEPS: Spec = {"type": "quantitative", "title": "step", "axis": {"format": ",d", "grid": False, "labelOverlap": True}}


def _curve(title: str, drawn: Sequence[Mapping[str, Any]], marked: Sequence[Mapping[str, Any]]) -> Spec:
    rows = [
        {"step": step, "value": value, "curve": one["name"]}
        for one in drawn
        for step, value in zip(one["steps"], one["values"], strict=True)
    ]
    last = max(row["step"] for row in rows)
    spans = [
        {"from": min(first, last), "to": max(min(end, last), min(first, last) + last / 200),
         "finding": one["rule"], "severity": one["severity"], "message": one["message"]}
        for one in marked
        for first, end in (one["steps"],)
    ]  # fmt: skip
    line: Spec = {
        "data": {"name": "curve", "values": rows},
        "mark": {"type": "line", "strokeWidth": 1.5, "tooltip": True, "clip": True},
        "encoding": {
            "x": {"field": "step", **STEPS},
            "y": {"field": "value", "type": "quantitative", "title": None, "scale": _after_warmup(rows)},
            "color": {"field": "curve", "type": "nominal", "legend": None if len(drawn) == 1 else {"title": None}},
            "tooltip": [{"field": "step", "format": ","}, {"field": "value", "title": title, "format": ".5~g"}],
        },
    }
    shade: Spec = {
        "data": {"name": "findings", "values": spans},
        "mark": {"type": "rect", "opacity": 0.22, "tooltip": True},
        "encoding": {
            "x": {"field": "from", **STEPS},
            "x2": {"field": "to"},
            "color": {
                "field": "severity",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": ["error", "warning", "advice"], "range": ["#c6362d", "#c98a1b", "#6a57c4"]},
            },
            "tooltip": [{"field": "finding"}, {"field": "message"}],
        },
    }
    late = [span for span in spans if span["from"] > 0.6 * last]
    early = [span for span in spans if span not in late]
    labels = [_label(some, at, align) for some, at, align in ((early, "from", "left"), (late, "to", "right")) if some]
    return {
        "height": 190,
        "width": "container",
        "layer": [shade, line, *labels] if spans else [line],
        "resolve": {"scale": {"color": "independent"}},
    }


def _label(spans: Sequence[Mapping[str, Any]], at: str, align: str) -> Spec:
    """Return the names of findings at their steps, below each other."""
    rows = [{**span, "y": 4 + 13 * number} for number, span in enumerate(spans)]
    mark = {"type": "text", "align": align, "baseline": "top", "dx": 3 if align == "left" else -3, "style": "caption"}
    return {
        "data": {"values": rows},
        "mark": mark,
        "encoding": {
            "x": {"field": at, **STEPS},
            "y": {"field": "y", "type": "quantitative", "scale": None},
            "text": {"field": "finding", "type": "nominal"},
        },
    }


def _after_warmup(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """Return the scale of a curve's values; a first step that compiles, far from all others, does not widen it."""
    values = [row["value"] for row in rows[1:] if row["value"] is not None]
    first = rows[0]["value"]
    if not values or first is None or min(values) <= 0 or max(values) / min(values) > 4:
        return {"zero": False}
    beyond = first > 3 * max(values) or first < min(values) / 3
    return {"zero": False, "domain": [0.98 * min(values), 1.02 * max(values)]} if beyond else {"zero": False}


def accuracy(points: Sequence[Mapping[str, Any]], unit: str) -> Spec:
    """Return predicted against measured for scatter.js: points as [source, GPU, measured, predicted], in few bytes."""
    sources = {name: number for number, name in enumerate(dict.fromkeys(point["source"] for point in points))}
    gpus = {name: number for number, name in enumerate(dict.fromkeys(point["gpu"] for point in points))}
    ends = [value for point in points for value in (point["measured"], point["predicted"])] or [1.0, 10.0]
    rows = [
        [sources[one["source"]], gpus[one["gpu"]], *(float(f"{one[key]:.4g}") for key in ("measured", "predicted"))]
        for one in points
    ]
    return {"unit": unit, "domain": [min(ends), max(ends)], "sources": [*sources], "gpus": [*gpus], "points": rows}

"""The pipeline view of a rehearsal's file: its step by part, the passes of every rank, and its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.api.rehearsal_file import LaneSpan, read_timeline
from meshwright.web import presenters

MERGE_PX = 0.7  # collectives of one row that are closer than this are drawn as one
WIDTH_PX = 1200
LEAST_PX = 0.6


def timeline(text: str) -> dict[str, Any]:
    """Return what the view shows of a file's text."""
    found = read_timeline(text)
    return {
        "found": found,
        "parts": [
            {"name": presenters.STEP_PARTS.get(name, name), "s": seconds, "share": seconds / found.step_s}
            for name, seconds in found.parts.items()
        ],
        "pipeline": presenters.pipeline(found.line) if found.line else None,
        "lanes": _lanes(found.spans),
    }


def _lanes(spans: Sequence[LaneSpan]) -> dict[str, Any] | None:
    """Return the collectives as rows, one per kind of rank and axis."""
    if not spans:
        return None
    span_s = max(one.end_s for one in spans) or 1.0
    scale = WIDTH_PX / span_s
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(spans, key=lambda span: span.start_s):
        drawn = rows.setdefault(one.lane, [])
        x, width = one.start_s * scale, max((one.end_s - one.start_s) * scale, LEAST_PX)
        if drawn and x - (drawn[-1]["x"] + drawn[-1]["width"]) < MERGE_PX:
            last = drawn[-1]
            last["width"], last["count"] = max(last["width"], x + width - last["x"]), last["count"] + 1
            last["end_s"] = max(last["end_s"], one.end_s)
        else:
            place = {"x": x, "width": width, "count": 1}
            drawn.append({**place, "name": one.name, "start_s": one.start_s, "end_s": one.end_s})
    height = presenters.ROW_PX + presenters.GAP_PX
    return {
        "width": WIDTH_PX,
        "row": presenters.ROW_PX,
        "height": height * len(rows),
        "span_s": span_s,
        "rows": [
            {"name": name, "y": height * place, "spans": _rounded(drawn)}
            for place, (name, drawn) in enumerate(sorted(rows.items()))
        ],
    }


def _rounded(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "x": round(one["x"], 1), "width": round(one["width"], 1)} for one in spans]

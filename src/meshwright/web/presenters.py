"""Responses as what a page shows: bars, rows and text. Every number is the response's."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import floor, hypot, log10
from typing import Any
from urllib.parse import urlencode

from meshwright.api.inputs import Request, command_words
from meshwright.display import short_number

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
STEP_PARTS = {
    "compute": "compute",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp_bubble": "pipeline bubble",
    "dp": "data parallel",
    "optimizer": "optimizer",
    "other": "other",
}
DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate")
FRAMEWORKS = {
    "meshwright": "Meshwright",
    "megatron-lm": "Megatron-LM",
    "megatron-bridge": "Megatron-Bridge",
    "automodel": "AutoModel",
    "torchtitan": "torchtitan",
    "kempnerforge": "KempnerForge",
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
}
BUDGET = ("tokens", "days", "price", "currency")  # fields that add time and cost to a plan
WIDE = 1000  # of a bar's own units
LINK_BYTES = 28_000  # of a link; the server accepts a little more
LINES, AROUND = 2_000, 3  # shown of a long text: those around its findings
SEVERITIES = ("error", "warning", "advice")
ASKED = ("model", "gpus", "goal", "engine")
COMPARED: dict[str, tuple[str, ...]] = {"question": ASKED, "contract": (), "layout": ()}  # (): all of its fields
Answer = Mapping[str, Any]


def bar(parts: Mapping[str, float], names: Iterable[str], most: float, limit: float | None = None) -> dict[str, Any]:
    """Return a bar of parts in its own units; parts beyond its end are cut off."""
    scale, at, pieces = WIDE / most if most > 0 else 0.0, 0.0, []
    for name in names:
        start, at = at, at + parts[name]
        if parts[name] > 0:
            shown = round(min(at * scale, WIDE) - min(start * scale, WIDE), 2)
            pieces.append({"name": name, "x": round(min(start * scale, WIDE), 2), "width": shown, "value": parts[name]})
    return {"pieces": pieces, "limit": None if limit is None else round(min(limit * scale, WIDE), 2)}


def memory(estimate: Answer, stages: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, Any]:
    """Return memory by part of the fullest GPU and of every pipeline stage, on one scale."""
    gib = estimate["memory_gib"]
    most = max(gib["capacity"], gib["total"], *(stage["total"] for stage in (stages or {}).values())) * 1.02
    return {
        "gib": gib,
        "fits": estimate["fits"],
        "share": gib["total"] / gib["capacity"],
        "bar": bar(gib, PARTS, most, gib["capacity"]),
        "stages": [
            {"stage": name, "gib": stage, "bar": bar(stage, PARTS, most, gib["capacity"])}
            for name, stage in (stages or {}).items()
        ],
        "parts": [(name, gib[name]) for name in PARTS],
    }


WIDE_PCT = 30  # of a band: from here on the interval is the headline, not the value in its middle


def tiles(estimate: Answer, of: str = "estimate") -> list[dict[str, Any]]:
    """Return the headline figures with the interval of each; speed only if the training fits."""
    band, gib = estimate["band"], estimate["memory_gib"]
    memory_band = band["memory_low_gib"], band["memory_high_gib"], band["memory_pct"]
    rows = [_tile(f"{of}.memory_gib.total", "memory per GPU", "", gib["total"], *memory_band, "GiB")]
    host = f", and {estimate['host_gib']:.0f} GiB of host memory" if "host_gib" in estimate else ""
    rows[0]["note"] = f"of {gib['capacity']:.1f} GiB{host}"
    if not estimate["fits"]:
        return rows
    slow, fast = estimate["step_s"] / band["step_high_s"], estimate["step_s"] / band["step_low_s"]
    speeds = {
        "tokens_per_s_per_gpu": ("tokens/s per GPU", "tokens/s/gpu", "", 1),
        "mfu": ("MFU", "mfu", "%", 100),
        "tflops_per_gpu": ("TFLOP/s per GPU", "tflops", "", 1),
    }
    pct = band["step_pct"]
    rows.append(
        _tile(f"{of}.step_s", "step", "", estimate["step_s"], band["step_low_s"], band["step_high_s"], pct, "s")
    )
    for name, (label, term, unit, scale) in speeds.items():
        value = estimate[name]
        rows.append(_tile(f"{of}.{name}", label, term, value, value * slow, value * fast, pct, unit, scale))
    return rows


def _tile(
    of: str, label: str, term: str, value: float, low: float, high: float, pct: float, unit: str, scale: float = 1
) -> dict[str, Any]:
    shown, least, most = (_to_band(one * scale, low * scale, high * scale) for one in (value, low, high))
    return {
        "of": of, "label": label, "term": term, "value": value, "unit": unit, "pct": pct, "wide": pct >= WIDE_PCT,
        "shown": shown, "low": least, "high": most, "note": "",
    }  # fmt: skip


def _to_band(value: float, low: float, high: float) -> str:
    """Return a number with no more digits than its band supports."""
    place = floor(log10(max(high - low, 1e-12) / 10))
    return f"{round(value, -place):,.{max(-place, 0)}f}"


def step(estimate: Answer) -> dict[str, Any]:
    """Return a step by part."""
    seconds = estimate["step_parts_s"]
    if seconds is None:  # of a layout that cannot be built
        return {"bar": None, "parts": []}
    return {
        "bar": bar(seconds, STEP_PARTS, estimate["step_s"]),
        "parts": [
            {"name": name, "label": label, "s": seconds[name], "share": seconds[name] / estimate["step_s"]}
            for name, label in STEP_PARTS.items()
        ],
    }


def differing(a: Answer, b: Answer) -> list[dict[str, Any]]:
    """Return what differs between two plans, field by field: the request, the contract and the layout."""
    return [
        {"name": name, "a": _compared(a[part][name]), "b": _compared(b[part][name])}
        for part, names in COMPARED.items()
        for name in (names or a[part])
        if name in b[part] and a[part][name] != b[part][name]
    ]


def _compared(value: Any) -> str:
    """Return a field's value in one line; of adapters, all of their fields."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_formatted(one)}" for name, one in value.items())
    return "–" if value in (None, "", []) else _formatted(value)


def faster_side(a: Answer, b: Answer) -> str:
    """Return which of two plans is faster per GPU, and whether by more than the error bands."""
    rates = [one["estimate"]["tokens_per_s_per_gpu"] for one in (a, b)]
    fits = [one["estimate"]["fits"] for one in (a, b)]
    if not all(fits):
        return "Neither plan fits." if not any(fits) else f"Only plan {'A' if fits[0] else 'B'} fits."
    name, other = ("A", "B") if rates[0] >= rates[1] else ("B", "A")
    ratio = max(rates) / min(rates)
    band = hypot(*(one["estimate"]["band"]["step_pct"] / 100 for one in (a, b)))
    sure = "more than" if ratio > 1 + band else "within"
    same = a["question"]["model"] == b["question"]["model"]
    unit = "tokens/s per GPU" if same else "tokens/s per GPU of another model"
    return f"Plan {name} has {ratio:.2f} × the {unit} of plan {other}, {sure} the error of the estimates."


def opened(plan: Answer, plans: Answer, form: Mapping[str, str]) -> str:
    """Return the query that recommends exactly this plan of a ranking."""
    fields = plans["fitting"][0]["layout"]
    overrides = [f"layout.{name}={_formatted(value)}" for name, value in plan["layout"].items() if name in fields]
    kept = {name: form[name] for name in BUDGET}
    return with_override({**question_of(plan), **kept, "overrides": form["overrides"]}, overrides)


def question_of(plan: Answer) -> dict[str, str]:
    """Return the fields that ask a plan's question."""
    names = {"model": "model", "gpus": "gpus", "goal": "goal", "seq": "seq_length", "engine": "engine"}
    return {name: str(plan["question"][field]) for name, field in names.items()}


def _formatted(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ",".join(str(one) for one in value) + "]" if isinstance(value, list | tuple) else str(value)


def formatted_layout(layout: Answer) -> dict[str, str]:
    """Return a layout's fields as overrides spell their values."""
    return {name: _formatted(value) for name, value in layout.items()}


def with_override(form: Mapping[str, str], overrides: Iterable[str]) -> str:
    """Return the query with more overrides; a later one for the same field wins."""
    latest = {
        override.partition("=")[0]: override for override in (*split_overrides(form.get("overrides", "")), *overrides)
    }
    return query({**form, "overrides": shlex.join(latest.values())})


def linkable(form: Mapping[str, str]) -> bool:
    """Return whether a request, with a few more overrides, is short enough for a URL."""
    return len(query(form)) < LINK_BYTES


def query(form: Mapping[str, str]) -> str:
    """Return the fields as the query of a URL."""
    return urlencode({name: value for name, value in form.items() if value})


def split_overrides(text: str) -> list[str]:
    """Split overrides as a shell does; raise ValueError for an open quote."""
    return shlex.split(text.replace("\n", " "))


def command(verb: str, request: type[Request], form: Mapping[str, Any]) -> str:
    """Return the command line for the same request."""
    arguments = {**form, "overrides": split_overrides(form.get("overrides", ""))}
    return shlex.join(["meshwright", verb, *command_words(request, arguments), "--json"])


LOOKAHEAD, CONTEXT = 40, 2  # lines: to find where two texts agree again, and shown around a change


def diff_lines(before: str, after: str) -> list[tuple[str, str]]:
    """Return the lines of a diff: the kind of each (add, remove, keep, or skip for those left out) and its text."""
    old, new = before.splitlines(), after.splitlines()
    rows: list[tuple[str, str]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            rows.append(("keep", old[i]))
            i, j = i + 1, j + 1
            continue
        removed, added = _until_equal(old[i : i + LOOKAHEAD], new[j : j + LOOKAHEAD])
        rows += [("remove", line) for line in old[i : i + removed]]
        rows += [("add", line) for line in new[j : j + added]]
        i, j = i + removed, j + added
    return _near_changes(rows)


def _until_equal(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """Return how many lines of each to pass until both have the same line; all of them if they never have."""
    places = {line: place for place, line in reversed([*enumerate(new)]) if line.strip()}
    found = [(place + places[line], place, places[line]) for place, line in enumerate(old) if line in places]
    return min(found)[1:] if found else (len(old), len(new))


def _near_changes(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    changed = [place for place, row in enumerate(rows) if row[0] != "keep"]
    near = {near for place in changed for near in range(place - CONTEXT, place + CONTEXT + 1)}
    shown: list[tuple[str, str]] = []
    for place, row in enumerate(rows):
        if place in near:
            shown.append(row)
        elif not shown or shown[-1][0] != "skip":
            shown.append(("skip", "…"))
    return shown


def findings_by_line(findings: Sequence[Answer], text: str) -> dict[str, Any]:
    """Return the lines of a text with their findings, and the findings without a line."""
    lines = text.splitlines() or [""]
    at: dict[int, list[Answer]] = {}
    for finding in findings:
        at.setdefault(finding.get("line") or 0, []).append(finding)
    elsewhere = [one for number, found in at.items() if not 1 <= number <= len(lines) for one in found]
    shown = [{"number": n, "text": lines[n - 1], "findings": at.get(n, [])} for n in _shown_lines(len(lines), at)]
    return {"lines": shown, "elsewhere": elsewhere, "counts": counted(findings), "of_lines": len(lines)}


def _shown_lines(count: int, found: Iterable[int]) -> Sequence[int]:
    """Return the numbers of all lines; for a long text the first and those around findings."""
    if count <= LINES:
        return range(1, count + 1)
    near = {n for at in (1, *found) for n in range(max(at - AROUND, 1), min(at + AROUND, count) + 1)}
    return sorted(near)[:LINES]


def counted(findings: Sequence[Answer]) -> dict[str, int]:
    """Return the number of findings by severity."""
    found = Counter(one["severity"] for one in findings)
    return {name: found[name] for name in SEVERITIES}


PASS_PX, ROW_PX, GAP_PX, MAX_PX = 20.0, 22, 4, 2400
KINDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}


def pipeline(line: Answer) -> dict[str, Any]:
    """Return a pipeline's step as drawings: all of it, or start and end if it is long."""
    forward = [one["end_s"] - one["start_s"] for one in line["passes"] if one["kind"] == "F"]
    scale = PASS_PX / max(sum(forward) / len(forward), 1e-12)
    span, window = line["span_s"], MAX_PX / scale
    parts = [(0.0, span)] if span <= 1.5 * window else [(0.0, window), (span - 0.75 * window, span)]
    names = ("the whole step",) if len(parts) == 1 else ("start of the step", "end of the step")
    busy = [0.0] * line["ranks"]
    for one in line["passes"]:
        busy[one["rank"]] += one["end_s"] - one["start_s"]
    return {
        "line": line,
        "views": [_view(line, name, *ends, scale) for name, ends in zip(names, parts, strict=True)],
        "kinds": {kind: KINDS[kind] for kind in KINDS if any(one["kind"] == kind for one in line["passes"])},
        "ranks": [{"rank": rank, "busy_s": s, "idle": 1 - s / span} for rank, s in enumerate(busy)],
    }


def _view(line: Answer, name: str, start: float, end: float, scale: float) -> dict[str, Any]:
    ranks = line["ranks"]
    shown = [
        {
            **one,
            "x": round((one["start_s"] - start) * scale, 1),
            "y": one["rank"] * (ROW_PX + GAP_PX),
            "width": round(max((one["end_s"] - one["start_s"]) * scale - 1, 0.5), 1),
            "shade": one["chunk"] // ranks % 2,
        }
        for one in line["passes"]
        if one["start_s"] >= start - 1e-9 and one["end_s"] <= end + 1e-9
    ]
    width = round((end - start) * scale, 1)
    return {"name": name, "passes": shown, "width": width, "height": ranks * (ROW_PX + GAP_PX), "row": ROW_PX}


def table_of(rows: Sequence[Answer]) -> dict[str, Any]:
    """Return layouts as a table; values that all rows share are listed once."""
    if not rows:
        return {"common": {}, "columns": [], "rows": []}
    flat = [formatted_layout(one["layout"]) for one in rows]
    same = {name: value for name, value in flat[0].items() if all(one[name] == value for one in flat)}
    columns = [name for name in flat[0] if name not in same]
    return {
        "common": same,
        "columns": [*columns, "total_gib", "step_s"],
        "rows": [
            [*(f[name] for name in columns), r["total_gib"], r["step_s"]] for f, r in zip(flat, rows, strict=True)
        ],
    }


LAYOUT_FILTERS = ("strategy", "tp", "pp", "cp", "ep", "micro_batch_size", "recompute", "pp_schedule", "offload")


def layout_filters(table: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the fields by which layouts of a table are filtered, each with its values in order."""
    found = {}
    for place, name in enumerate(table["columns"]):
        if name in LAYOUT_FILTERS:
            values = {str(row[place]) for row in table["rows"]}
            found[name] = sorted(
                values, key=lambda text: (not text.isdecimal(), int(text) if text.isdecimal() else 0, text)
            )
    return {name: found[name] for name in LAYOUT_FILTERS if name in found}


def frontier_size(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of layouts than which no other is both smaller and faster."""
    count, best = 0, float("inf")
    for one in sorted(rows, key=lambda row: (row["total_gib"], row["step_s"])):
        if one["step_s"] < best:
            count, best = count + 1, one["step_s"]
    return count


shortened = partial(short_number, digits=".3g", least=1e3)


def seconds(value: float) -> str:
    """Return seconds with three significant digits or so."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"

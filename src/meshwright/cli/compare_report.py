"""Engines, targets and runs side by side as text."""

from __future__ import annotations

from typing import Any

from meshwright.api.summary import layout_summary
from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import Answer, assumed_lines, finding_lines, titled


def compare(answer: Answer, found: Any) -> None:
    """Print engines or targets side by side, the answer with its reasons, and what differs."""
    out = console()
    if answer["of"] == "runs":
        _compared_runs(answer)
        return
    titled(out, "Assumed", assumed_lines(answer["assumed"]))
    rows = [_side_row(one) for one in answer["sides"]]
    what = "engine" if answer["of"] == "engines" else "target"
    table(rows, "", what, "layout", "GiB", "s/step", "tokens/s/GPU", "MFU")
    verdict = answer["answer"].split(maxsplit=1)[0] if answer["sides"][0]["ok"] else "None"
    titled(out, verdict if verdict in ("Use", "Equal") else "None", [f"[bold]{escape(answer['answer'])}[/]"])
    titled(out, "Why", [line for side in answer["sides"] for line in _side_lines(side)])
    if "differences" in answer:
        rows = [(d["field"], d["kind"], *map(str, d["values"])) for d in answer["differences"]]
        if rows:
            table(rows, "field", "kind", *answer["targets"])
        else:
            out.print("no field differs")


RUN_FIGURES = {
    "recipe": "",
    "where": "",
    "steps": ",",
    "first_loss": ".4f",
    "last_loss": ".4f",
    "best_validation_loss": ".4f",
    "best_validation_step": ",",
    "last_validation_loss": ".4f",
    "step_s": ".3g",
    "tokens_per_s_per_gpu": ",.0f",
    "mfu": ".1%",
    "memory_gib": ".3g",
    "seconds": ",.1f",
}
"""Figures of runs that are printed side by side, and their formats."""


RUN_LABELS = {
    "where": "on",
    "step_s": "seconds per step",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "mfu": "MFU",
    "memory_gib": "peak memory, GiB",
    "seconds": "all steps, seconds",
}


def _compared_runs(answer: Answer) -> None:
    """Print the figures of runs side by side, then the settings that differ."""
    runs = answer["runs"]
    rows = []
    for name, form in RUN_FIGURES.items():
        if any(run[name] is not None for run in runs):
            cells = ["" if run[name] is None else format(run[name], form) for run in runs]
            label = RUN_LABELS.get(name, name.replace("_", " "))
            on_cpu = all(run["where"].startswith("CPU") for run in runs)
            rows.append((label.replace("GPU", "rank") if on_cpu else label, *cells))
    for one in answer.get("differences", ()):
        rows.append((one["field"], *map(str, one["values"])))
    table(rows, "", *[run["name"] for run in runs])
    out = console()
    if answer.get("differences") == []:
        out.print("no setting differs")
    if "differences" not in answer:
        out.print("[dim]settings are not compared: a log does not have them[/]")
    titled(out, "Result", [f"[bold]{escape(answer['answer'])}[/]"])


def _is_over(estimate: Answer) -> bool:
    """Return whether memory is why a layout does not fit; a layout that breaks a rule does not fit either."""
    return not estimate["fits"] and estimate["memory_gib"]["total"] > estimate["memory_gib"]["capacity"]


SHOWN_CHANGES = (
    ("layout.reshard_after_forward", False, "weights stay gathered"),
    ("kernels.compile", True, "compiled"),
)
"""Changes that decide memory or speed and are no part of a layout's line: field, new value and what is printed."""


def _side_row(side: Answer) -> tuple[str, ...]:
    estimate = side["estimate"]
    if estimate is None or side["layout"] is None:
        return (str(side["rank"]), side["name"], "cannot run", "", "", "", "")
    memory, band = estimate["memory_gib"], estimate["band"]
    gib = f"{memory['total']:.0f}/{memory['capacity']:.0f}" + (" over" if _is_over(estimate) else "")
    gib += " may not fit" if estimate["fits"] and estimate["fit"] == "may not fit" else ""
    if not estimate["fits"]:  # a layout that cannot be built has no step time
        why = "" if _is_over(estimate) else "cannot run"
        return (str(side["rank"]), side["name"], layout_summary(side["layout"], side["engine"]), gib, why, "", "")
    within = f"{estimate['step_s']:.2f} ({band['step_low_s']:.2f} to {band['step_high_s']:.2f})"
    changed = [
        text for field, to, text in SHOWN_CHANGES for one in side["changes"] if (one["field"], one["to"]) == (field, to)
    ]
    layout = " · ".join((layout_summary(side["layout"], side["engine"]), *changed))
    speed = (within, f"{estimate['tokens_per_s_per_gpu']:,.0f}", f"{estimate['mfu']:.0%}")
    return (str(side["rank"]), side["name"], layout, gib, *speed)


def _side_lines(side: Answer) -> list[str]:
    """Return why a side has its rank, what its engine does not execute and what its config loses."""
    lines = [f"[bold]{escape(side['name'])}[/]: {escape('; '.join(side['reasons']))}"]
    printed = {f"layout.{name}" for name in side["layout"] or ()}
    needed = [one for one in side["changes"] if one["kind"] == "layout" and one["field"] not in printed]
    if side["layout"] and needed:
        listed = ", ".join(f"{one['field']} {one['from']} → {one['to']}" for one in needed)
        lines.append(f"  [dim]changed: {escape(listed)}[/]")
    for one in side["cannot"]:
        instead = f", runs {one['instead']}" if one["effect"] == "ignored" else ""
        what = f"{one['field']}={escape(str(one['value']))}"
        lines.append(f"  [dim]{one['effect']}: {what}{instead}: {escape(one['why'])}[/]")
    if side["lost"]:
        lost = ", ".join(f"{one['field']}={one['value']}" for one in side["lost"])
        lines.append(f"  [dim]not in its config: {escape(lost)}[/]")
    errors = finding_lines([f for f in side["findings"] if f["severity"] == "error"])
    return [*lines, *(f"  {line}" for line in errors)]

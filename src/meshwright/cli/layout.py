"""How estimates, layouts and findings are written on a terminal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any

from meshwright.cli.console import Out, escape
from meshwright.display import parameter_count

Answer = dict[str, Any]
"""A response as JSON."""
SAME = 0.005  # of two estimates that are one layout
KEYWORD = re.compile(r"[A-Za-z_]\w*=(?!=)")  # an argument of a Python call
WIDTH = 44  # characters of the memory bar
PARTS = {
    "weights": "blue",
    "gradients": "cyan",
    "optimizer": "magenta",
    "activations": "yellow",
    "logits": "red",
    "buffers": "green",
    "overhead": "white",
}
MARKS = {"error": ("✗", "red"), "warning": ("!", "yellow"), "advice": ("·", "cyan")}
NO_LAYOUT = "[red]no figures: this layout cannot be built (see the findings)[/]"
NO_LAYOUT_IGNORED = "[red]no figures: this layout cannot be built (see the ignored errors)[/]"
LETTERS = {part: part[0].upper() for part in PARTS} | {"overhead": "x"}


def memory_bar(memory: dict[str, float]) -> str:
    """Return a bar of the capacity, each part in its color and letter; it overruns the end if memory does not fit."""
    scale = WIDTH / memory["capacity"]
    bar, used = "", 0.0
    for part, color in PARTS.items():
        start, used = round(used * scale), used + memory[part]
        bar += f"[{color}]{LETTERS[part] * (min(round(used * scale), WIDTH * 2) - start)}[/]"
    free = WIDTH - min(round(used * scale), WIDTH)
    over = " [red]over capacity[/]" if used > memory["capacity"] else ""
    return f"[dim]│[/]{bar}[dim]{'·' * free}│[/]{over}"


def memory_lines(estimate: dict[str, Any]) -> list[str]:
    """Return memory against capacity: a sentence, a bar and the parts."""
    memory = estimate["memory_gib"]
    parts = "  ".join(f"[{c}]{LETTERS[p]}[/] {p} {memory[p]:.1f}" for p, c in PARTS.items() if memory[p] >= 0.05)
    color = "red" if not estimate["fits"] else "yellow" if estimate["fit"] == "may not fit" else "green"
    band = estimate["band"]
    within = f"{band['memory_low_gib']:.1f} to {band['memory_high_gib']:.1f}"
    host = f"; {estimate['host_gib']:.1f} GiB of host memory per GPU" if "host_gib" in estimate else ""
    verdict = f"[{color}]{estimate['fit']}[/]{host}"
    return [
        f"{memory['total']:.1f} of {memory['capacity']:.1f} GiB per GPU ({within}): {verdict}",
        memory_bar(memory),
        parts,
    ]


def parameters_text(total: float, active: float) -> str:
    """Return a model's parameters, and those that a token uses if they are fewer."""
    used = f", {parameter_count(active)} active" if active < 0.99 * total else ""
    return f"{parameter_count(total)} parameters{used}"


def seconds(value: float) -> str:
    """Return seconds with at least two significant digits."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def share(value: float) -> str:
    """Return a share in percent, with a decimal below ten."""
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def assumed_lines(assumed: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was taken for what the request leaves open."""
    return [f"[yellow]{escape(one['message'])}[/]" for one in assumed]


def speed_line(estimate: dict[str, Any]) -> str:
    """Return step time, throughput and MFU."""
    band = estimate["band"]
    within = f"{seconds(band['step_low_s'])} to {seconds(band['step_high_s'])}"
    return (
        f"{seconds(estimate['step_s'])} s per step ({within}), "
        f"{estimate['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {estimate['tflops_per_gpu']:.0f} TFLOP/s/GPU, "
        f"MFU {share(estimate['mfu'])}"
    )


def titled(out: Out, title: str, lines: Sequence[str]) -> None:
    """Print lines, with a title before the first."""
    for i, line in enumerate(lines):
        out.print(f"[bold]{title if i == 0 else '':<9}[/]{line}")


def finding_lines(findings: Sequence[dict[str, Any]], repair: dict[str, Any] | None = None) -> list[str]:
    """Return one line per finding; the fixes that one repair joins are left out."""
    lines = []
    removed, left = (set(repair["removes"]), set(repair["leaves"])) if repair else (set(), set())
    for f in findings:
        mark, color = MARKS[f["severity"]]
        typed = _typed_fix(f)
        is_joined = f["rule"] in removed and (f["rule"] not in left or {*f["fix"]} <= {*(repair or {})["overrides"]})
        fix = f"  [dim]fix:[/] [cyan]{escape(typed)}[/]" if f["fix"] and not is_joined else ""
        fix += f"  [dim]{undoing(f)}[/]" if fix and f.get("undoes") else ""
        fix = f"  [dim]{escape(f['no_fix'])}[/]" if f.get("no_fix") else fix
        place = f"{escape(f['file'])}:{f['line']} " if f.get("line") else ""
        lines.append(f"[{color}]{mark} {f['severity']}[/] {place}{escape(f['message'])} [dim]({f['rule']})[/]{fix}")
    return lines


def _typed_fix(finding: Mapping[str, Any]) -> str:
    """Return a fix as it is typed: code of a Python file, keywords of a call with commas, else words of a shell."""
    fix: Sequence[str] = finding["fix"]
    if str(finding.get("file") or "").endswith(".py"):
        return (", " if all(KEYWORD.match(text) for text in fix) else " ").join(fix)
    return " ".join(text if " " in text or text.startswith("-") else shlex.quote(text) for text in fix)


def undoing(change: Answer) -> str:
    """Return which of the user's own settings a fix or repair replaces; empty if none."""
    return f"changes your {', '.join(change['undoes'])}: nothing else resolves it" if change.get("undoes") else ""


def _are_overrides(texts: Sequence[str]) -> bool:
    """Return whether a repair is typed as overrides, and not written into another framework's file."""
    return all("=" in text and " = " not in text and not text.startswith("-") for text in texts)


def repair_lines(answer: dict[str, Any]) -> list[str]:
    """Return the overrides that contradict, and the one change that removes all errors."""
    lines = []
    if found := answer.get("contradiction"):
        names = " and ".join(found["overrides"])
        lines.append(f"[red]{escape(names)} cannot be combined[/]: {escape(found['reason'])}; remove one of them")
    if repair := answer.get("repair"):
        count = len(repair["removes"])
        some = f"{count} findings" if repair["leaves"] else f"all {count} findings"
        what = f"removes {'the finding' if count == 1 else some}"
        kind = "; a contract change: a new experiment" if repair["contract"] else ""
        own = f"; {undoing(repair)}" if repair.get("undoes") else ""
        left = f"; leaves {', '.join(repair['leaves'])}" if repair["leaves"] else ""
        known = repair["step_s"] is not None
        cost = f"; {seconds(repair['step_s'])} s per step, {repair['total_gib']:.0f} GiB" if known else ""
        overrides = repair["overrides"]
        settings = [shlex.join(overrides)] if _are_overrides(overrides) else overrides  # of a file: one per line
        settings = [", ".join(overrides)] if all(map(KEYWORD.match, overrides)) else settings  # of a Python call
        lines += [f"[cyan]{escape(text)}[/]" for text in settings]
        lines[-1] += f"  [dim]{what}{kind}{own}{left}{cost}[/]"
    return lines


def option_lines(answer: Answer) -> list[str]:
    """Return the options of an answer that does not fit as asked, in the order of what they cost."""
    return [
        line for option in answer.get("options", []) if not _is_plan(option, answer) for line in _option_lines(option)
    ]


def _is_plan(option: Answer, answer: Answer) -> bool:
    """Return whether an option is the plan above it, whose levers it has already."""
    plan = answer.get("estimate") or {}
    if option["kind"] != "layout" or not plan.get("fits"):
        return False
    now = plan["memory_gib"]["total"], plan["step_s"]
    return all(isclose(*one, rel_tol=SAME) for one in zip((option["total_gib"], option["step_s"]), now, strict=True))


def _option_lines(option: Answer) -> list[str]:
    """Return what an option is and costs, and the command that plans it."""
    color = "yellow" if option["kind"] == "contract" else "cyan"
    host = f", {option['host_gib']:.0f} GiB of host memory per GPU" if option["host_gib"] >= 1 else ""
    figures = f"{option['total_gib']:.1f} GiB{host} ({option['fit']}), {option['step_s']:.3g} s per step"
    return [
        f"[{color}]{option['title']}[/] [dim]({option['kind']})[/]: {figures} ({option['slowdown']:.2g} × the "
        f"fastest layout with unlimited memory); {escape(option['cost'])}",
        f"[dim]  {escape(option['command'])}[/]",
    ]

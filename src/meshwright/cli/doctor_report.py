"""The diagnosis of a run as text for a terminal."""

from __future__ import annotations

from typing import Any

from meshwright.cli.console import console, escape, table

FEW = 3  # diagnoses without their data that are listed with what each needs
COLORS = {"error": "red", "warning": "yellow", "advice": "cyan"}


def doctor(answer: dict[str, Any], found: Any) -> None:
    """Print a diagnosis."""
    out = console()
    out.print(f"[bold green]{escape(answer['path'])}[/]  {escape(_what_ran(answer))}")
    out.print("")
    if answer["figures"]:
        table(_figure_rows(answer["figures"]), "", "  measured", "  estimate")
        if answer["mfu_convention"] and any(one["name"].startswith("MFU") for one in answer["figures"]):
            out.print(f"[dim]MFU: {escape(answer['mfu_convention'])}[/]")
        out.print("")
    listed: dict[str, str] = {}  # remedy -> the finding that lists it
    for finding in answer["findings"]:
        _finding(finding, listed)
    if not answer["findings"]:
        out.print(f"[green]no findings[/] from {len(answer['looked_for'])} checks")
    if not answer["steps"] and answer["not_examined"]:
        out.print(f"[dim]not checked: {len(answer['not_examined'])} diagnoses that need step lines[/]")
    elif len(answer["not_examined"]) > FEW:
        names = ", ".join(answer["not_examined"])
        out.print(
            f"[dim]not checked: {len(answer['not_examined'])} diagnoses ({names}); --json says what each needs[/]"
        )
    else:
        for name, lacks in answer["not_examined"].items():
            out.print(f"[dim]not checked: {name} (needs {escape(lacks)})[/]")
    for note in answer["notes"]:
        out.print(f"[dim]note: {escape(note)}[/]")


def _what_ran(answer: dict[str, Any]) -> str:
    format = {"torch": "torch log"}.get(answer["kind"], answer["kind"])
    ranks = answer["cpu_ranks"]
    where = f"on CPU, {ranks} rank{'s' * (ranks > 1)}" if ranks else answer["gpus"] and f"on {answer['gpus']}"
    named = [answer["recipe"] or answer["model"], where]
    total = f" of {answer['total_steps']:,}" if answer["total_steps"] else ""
    steps = f"step {answer['last_step']:,}{total}"
    return ", ".join([format, *([" ".join(filter(None, named))] if any(named) else []), steps])


def _figure_rows(figures: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [(one["name"], _value(one["measured"], one), _value(one["estimate"], one)) for one in figures]


def _value(value: float | None, figure: dict[str, Any]) -> str:
    if value is None:
        return f"{'':>10}"
    if "share" in figure["name"] or "spread" in figure["name"] or figure["name"].startswith("MFU"):
        return f"{value:>10.1%}"
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{text:>10}" + (f" {figure['unit']}" if figure["unit"] else "")


def _finding(finding: dict[str, Any], listed: dict[str, str]) -> None:
    """Print a finding; remedies that an earlier finding lists are not repeated."""
    out = console()
    color = COLORS[finding["severity"]]
    where = f" [dim]steps {finding['steps'][0]:,}–{finding['steps'][1]:,}[/]" if finding["steps"] else ""
    out.print(f"[{color}]{finding['severity']}[/] [bold]{finding['rule']}[/]{where}")
    out.print(f"  {escape(finding['message'])}")
    for one in finding["evidence"]:
        against = (
            f" ({_number(one['against'])} {one['against_what']}".rstrip() + ")" if one["against"] is not None else ""
        )
        unit = f" {one['unit']}" if one["unit"] else ""
        out.print(f"  [dim]{escape(one['name'])}: {_number(one['value'])}{unit}{escape(against)}[/]")
    for line in finding["lines"]:
        out.print(f"  [dim]{escape(line)}[/]")
    new = [one for one in finding["remedies"] if " ".join(one["try"]) not in listed]
    for number, remedy in enumerate(new, start=1):
        out.print(f"  {number}. [bold]{escape(' '.join(remedy['there'] or remedy['try']))}[/]{escape(_effect(remedy))}")
        if remedy["there"]:
            out.print(f"     [dim]in a plan: {escape(' '.join(remedy['try']))}[/]")
    others = {listed[text] for one in finding["remedies"] if (text := " ".join(one["try"])) in listed}
    if others:
        out.print(f"  [dim]{'also the' if new else 'the'} remedies of {', '.join(sorted(others))} above[/]")
    listed |= {" ".join(one["try"]): finding["rule"] for one in new}
    out.print("")


def _effect(remedy: dict[str, Any]) -> str:
    """Return the estimated effect of a remedy."""
    effects = []
    if remedy["peak_gib"] is not None:
        effects.append(f"{remedy['peak_gib']:.1f} GiB" + ("" if remedy["fits"] else ", does not fit"))
    if remedy["step_ratio"] is not None:
        effects.append(f"step time × {remedy['step_ratio']:.2f}")
    if remedy["what"] == "contract":
        effects.append("a new experiment")
    why = f"  {remedy['why']}" if remedy["why"] else ""
    return why + (f" ({', '.join(effects)})" if effects else "")


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"

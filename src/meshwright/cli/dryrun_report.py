"""A dry run as text for a terminal: whether it fits, what holds the memory, what is computed and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import LETTERS, NO_LAYOUT, PARTS, assumed_lines, memory_bar, titled
from meshwright.cli.timeline import drawn

HOLDERS, PLACEMENTS = 10, 8  # rows shown; --json has all
FLOPS = ("forward", "recompute", "backward", "total")
SMALL_DIFFERENCE = 0.05  # of the estimate: within what both are known to
TRUST = (
    "trust the dry run, which executes our engine's code and tracks every allocation (48 of 50 cases within 1.2 % "
    "of an H200); the estimate is arithmetic that also has to hold for layouts nobody ran"
)
CONVENTION = "products alone, causal attention counted as half; MFU counts them without recompute"


def section(answer: dict[str, Any] | None) -> None:
    """Print the dry run of a recommendation; None if the layout cannot be built."""
    if answer is None:
        titled(console(), "Dry run", [NO_LAYOUT])
        return
    lines = [
        _verdict(answer),
        memory_bar(answer["memory_gib"]),
        _peak_line(answer),
        *_trust(answer),
        _cost_line(answer),
    ]
    titled(console(), "Dry run", lines)


def dryrun(answer: dict[str, Any], found: Any) -> None:
    """Print a dry run, the worst rank in full."""
    out = console()
    out.print(f"[bold green]{escape(answer['recipe'])}[/]  {escape(answer['model'])} on {answer['cluster']}")
    titled(
        out, "Engine", [f"[yellow]{escape(line)}[/]" for line in found.other_engine.lines()] if _other(answer) else []
    )
    titled(out, "Assumed", assumed_lines(answer.get("assumed", ())))
    titled(out, "Dry run", [_verdict(answer), memory_bar(answer["memory_gib"]), _peak_line(answer), *_trust(answer)])
    out.print("")
    table(_part_rows(answer), "GiB", " dry run", "estimate", "difference")
    out.print("")
    _phases(answer["phases"])
    _timeline(answer)
    out.print("")
    _unbroken(_holder_rows(answer["holders"][:HOLDERS]), "   GiB", "blocks", "part", "operation", "source")
    _left_out(len(answer["holders"]), HOLDERS, "lines of code that hold memory at the peak")
    out.print("")
    titled(out, "FLOPs", [_flops_line(answer["flops"]), f"[dim]{CONVENTION}[/]"])
    out.print("")
    table(_collective_rows(answer["collectives"]), "axis", "collective", "ranks", "a step", "     GiB", "in")
    out.print("")
    _unbroken(
        _placement_rows(answer["placement"][:PLACEMENTS]),
        "parameter",
        "shape",
        "local shape",
        "format",
        "placement",
        "   GiB",
    )
    _left_out(len(answer["placement"]), PLACEMENTS, "kinds of parameters")
    out.print("")
    titled(out, "Ranks", [_rank_line(rank, answer) for rank in answer["ranks"]])
    traced = dict.fromkeys(rank["traced"] for rank in answer["ranks"])
    titled(out, "Traced", [escape(text) for text in traced])
    titled(out, "Took", [_cost_line(answer)])


def _other(answer: dict[str, Any]) -> str:
    """Return the engine in whose place ours was executed; empty if ours was asked for."""
    return str(answer.get("other_engine", {}).get("engine", ""))


def _verdict(answer: dict[str, Any]) -> str:
    memory, estimate = answer["memory_gib"], answer["estimate_gib"]["total"]
    verdict = "[green]fits[/]" if answer["fits"] else "[red]does not fit[/]"
    verdict += f" (our engine, not {_other(answer)})" if _other(answer) else ""
    difference = f"estimated {estimate:.1f}, {answer['difference_gib']['total']:+.1f}"
    return f"{memory['total']:.1f} of {memory['capacity']:.1f} GiB on the fullest GPU ({difference}): {verdict}"


def _trust(answer: dict[str, Any]) -> list[str]:
    """Return which figure to trust if dry run and estimate of the layout differ much."""
    difference, estimate = answer["difference_gib"]["total"], answer["estimate_gib"]["total"]
    if abs(difference) < SMALL_DIFFERENCE * estimate or _other(answer):
        return []
    return [f"[dim]{difference / estimate:+.0%} of the estimate of the same layout: {TRUST}[/]"]


def _peak_line(answer: dict[str, Any]) -> str:
    peak = answer["peak"]
    at = f", {escape(peak['at'])}" if peak["at"] else ""
    allocated = f"torch allocates {peak['allocated_gib']:.1f} and reserves {peak['reserved_gib']:.1f} GiB"
    return f"the peak is in {peak['phase']}{at}, on rank {peak['rank']}: {allocated}"


def _cost_line(answer: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
    ranks = len(answer["ranks"])
    kinds = "1 kind of rank" if ranks == 1 else f"{ranks} kinds of ranks"
    seconds = f"{answer['cpu_s']:.0f} s of CPU time, {answer['wall_s']:.0f} s in all"
    return f"{kinds} of {answer['world']:,} executed without a GPU in {seconds} [dim]({escape(versions)})[/]"


def _part_rows(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    dry, estimate, difference = (answer[f"{name}_gib"] for name in ("memory", "estimate", "difference"))
    return [
        (part, f"{dry[part]:8.2f}", f"{estimate[part]:8.2f}", f"{difference[part]:+10.2f}")
        for part in (*PARTS, "total")
    ]


def _phases(phases: dict[str, dict[str, float]]) -> None:
    """Print the peak of every phase by part; parts that are always zero have no row."""
    width = [max(len(name), 7) for name in phases]
    rows = [
        (part, *(f"{gib.get(part, 0.0):{w}.2f}" for gib, w in zip(phases.values(), width, strict=True)))
        for part in PARTS
        if any(gib.get(part) for gib in phases.values())
    ]
    totals = [f"{sum(gib.values()):{w}.2f}" for gib, w in zip(phases.values(), width, strict=True)]
    headers = [f"{name:>{w}}" for name, w in zip(phases, width, strict=True)]
    table([*rows, ("total", *totals)], "GiB, peak of", *headers)


def _timeline(answer: dict[str, Any]) -> None:
    out, memory = console(), answer["memory_gib"]
    limit = memory["capacity"] - memory["overhead"]
    lines = drawn(answer["timeline"], limit)
    if not lines:
        return
    used = {part for moment in answer["timeline"] for part, gib in moment["gib"].items() if gib}
    out.print("")
    for line in lines:
        out.print(line)
    out.print("  ".join(f"[{c}]{LETTERS[part]}[/] {part}" for part, c in PARTS.items() if part in used))
    out.print(f"[dim]GiB of torch; {limit:.1f} is the capacity of {memory['capacity']:.1f} less the overhead[/]")


def _holder_rows(holders: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [(f"{h['gib']:6.2f}", str(h["blocks"]), h["part"], h["operation"], h["source"]) for h in holders]


def _flops_line(flops: dict[str, float]) -> str:
    parts = "  ".join(f"{name} {flops[name] / 1e12:,.1f}" for name in FLOPS if flops.get(name))
    return f"{parts} TFLOP per step on this rank"


def _collective_rows(collectives: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row per axis and kind, with its phases combined."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in collectives:
        kinds.setdefault((one["axis"], one["kind"]), []).append(one)
    return [
        (
            axis,
            kind,
            str(max(one["ranks"] for one in same)),
            f"{sum(one['count'] for one in same):,}",
            f"{sum(one['gib'] for one in same):8.2f}",
            ", ".join(dict.fromkeys(one["phase"] for one in same)),
        )
        for (axis, kind), same in kinds.items()
    ]


def _placement_rows(placement: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            f"{p['name']} × {p['count']}" if p["count"] > 1 else p["name"],
            "×".join(map(str, p["shape"])),
            "×".join(map(str, p["held"])),
            p["format"] + ("" if p["trained"] else ", frozen"),
            p["placement"],
            f"{p['gib']:6.3f}",
        )
        for p in placement
    ]


def _unbroken(rows: Sequence[Sequence[str]], *headers: str) -> None:
    """Print rows that a narrow terminal wraps and never shortens: the end of a source names its line."""
    out = console()
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for place, row in enumerate([headers, *rows]):
        line = escape("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        out.print(line if place else f"[bold]{line}[/]")


def _left_out(count: int, shown: int, what: str) -> None:
    if count > shown:
        console().print(f"[dim]{shown} of {count} {what}; --json has all[/]")


def _rank_line(rank: dict[str, Any], answer: dict[str, Any]) -> str:
    others = [str(one) for one in rank["represents"] if one != rank["pp_rank"]]
    like = (
        f" (pp {rank['pp_rank']}" + (f", also {_ranges(rank['represents'], rank['pp_rank'])}" if others else "") + ")"
    )
    layers = f"layers {_ranges(rank['layers'])}" if rank["layers"] else "no layers"
    mark = "[green]✓[/]" if rank["allocated_gib"] <= _allocatable(answer) else "[red]✗[/]"
    memory = f"{rank['allocated_gib']:.1f} GiB allocated, {rank['reserved_gib']:.1f} reserved"
    work = f"peak in {rank['peak']['phase']}, {rank['flops']['total'] / 1e12:,.0f} TFLOP"
    return f"{mark} rank {rank['rank']}{like}: {layers}, {memory}, {work}"


def _allocatable(answer: dict[str, Any]) -> float:
    """Return how much torch may allocate: the capacity less the overhead of the worst rank."""
    memory = answer["memory_gib"]
    return float(memory["capacity"] - memory["total"] + answer["peak"]["allocated_gib"])


def _ranges(numbers: Sequence[int], without: int | None = None) -> str:
    """Return numbers with runs written as first–last."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers) - {without}):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)

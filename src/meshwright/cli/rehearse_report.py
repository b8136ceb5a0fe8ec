"""A rehearsal as text for a terminal: the step by part, memory, what limits it, and what else was tried."""

from __future__ import annotations

from typing import Any

from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import assumed_lines, titled

NAMES = {
    "compute": "kernels",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "dp": "data-parallel communication",
    "control": "losses and gradient norm",
    "pp_bubble": "pipeline bubble",
    "optimizer": "update",
    "other": "other",
}
SHOWN_PART = 0.0005  # of the step


def rehearse(answer: dict[str, Any], found: Any) -> None:
    """Print a rehearsal."""
    out = console()
    out.print(f"[bold green]{escape(answer['recipe'])}[/]  {escape(answer['model'])} on {answer['cluster']}")
    other = found.other_engine.lines() if found.other_engine is not None else ()
    titled(out, "Engine", [f"[yellow]{escape(line)}[/]" for line in other])
    titled(out, "Assumed", assumed_lines(answer.get("assumed", ())))
    titled(out, "Step", _step_lines(answer))
    out.print("")
    table(_part_rows(answer), "part of the step", "seconds", "share")
    out.print("")
    titled(out, "Memory", _memory_lines(answer))
    titled(out, "Limits", [escape(text) for text in answer["limits"]])
    titled(out, "Ranks", [_rank_line(one) for one in answer["ranks"]])
    titled(out, "Others", [_alternative_line(one) for one in answer["alternatives"]])
    titled(out, "Notes", [f"[dim]{escape(text)}[/]" for text in answer["notes"]])
    titled(out, "Took", [_source_line(answer)])


def _step_lines(answer: dict[str, Any]) -> list[str]:
    band = answer["band"]
    mfu = f", MFU {100 * answer['mfu']:.1f} %" if answer["mfu"] is not None else ""
    lines = [
        f"[bold]{answer['step_s']:.3f} s[/] ({band['step_low_s']:.3f} to {band['step_high_s']:.3f}, "
        f"±{band['step_pct']:g} %): {answer['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU{mfu}"
    ]
    if answer["mfu"] is not None:
        lines.append(f"[dim]estimated {answer['estimate_s']:.3f} s[/]")
    return lines


def _part_rows(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    step = answer["step_s"]
    return [
        (NAMES[name], f"{seconds:9.4f}", f"{100 * seconds / step:5.1f} %")
        for name, seconds in answer["step_parts_s"].items()
        if seconds >= SHOWN_PART * step
    ]


def _memory_lines(answer: dict[str, Any]) -> list[str]:
    if answer["allocated_gib"] is None:
        return ["not measured on a CPU"]
    verdict = "[green]fits[/]" if answer["fits"] else "[red]does not fit[/]"
    return [
        f"{answer['allocated_gib']:.1f} GiB allocated, {answer['reserved_gib']:.1f} reserved at the peak of the "
        f"fullest rank, of {answer['capacity_gib']:.1f} GiB: {verdict}"
    ]


def _rank_line(rank: dict[str, Any]) -> str:
    others = len(rank["represents"]) - 1
    also = f", and {others} more like it" if others else ""
    layers = f"{rank['layers_run']} of {rank['layers']} layers" if rank["layers"] else "no layers"
    memory = f", {rank['allocated_gib']:.1f} GiB" if rank["allocated_gib"] is not None else ""
    return (
        f"rank {rank['rank']} (pp {rank['pp_rank']}{also}): busy {rank['busy_s']:.3f} s and {rank['rest_s']:.3f} s "
        f"outside the passes{memory}; ran {layers} and {rank['micro_batches_run']} of {rank['micro_batches']} micro "
        f"batches, {rank['steps']} steps within ±{rank['spread_pct']:g} %"
    )


def _alternative_line(one: dict[str, Any]) -> str:
    change = one["speedup"] - 1
    verdict = f"[green]{change:+.1%} speed[/]" if change > 0 else f"{change:+.1%} speed"
    memory = f", {one['allocated_gib']:.1f} GiB" if one["allocated_gib"] is not None else ""
    return f"{verdict}: {one['step_s']:.3f} s{memory} with {escape(' '.join(one['changes']))}"


def _source_line(answer: dict[str, Any]) -> str:
    scaled = f", scaled to {answer['scaled_to']} (times {answer['scale']:.3f})" if answer["scaled_to"] else ""
    kinds = len(answer["ranks"])
    return (
        f"{answer['wall_s']:.0f} s for {kinds} kind{'s' * (kinds > 1)} of ranks of {answer['world']:,}: kernels timed "
        f"on {escape(answer['device'])}{scaled}; collectives simulated with {escape(answer['network'])}"
    )

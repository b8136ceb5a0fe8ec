"""The command that says what is wrong with a run: doctor; and its answer for a person at a terminal."""

from __future__ import annotations

from typing import Any

import click

from meshwright import api
from meshwright.cli import complete
from meshwright.cli.console import console, escape, table
from meshwright.cli.options import as_json, emit, end, examples, goal_option, gpus_option, options, overrides

COLOURS = {"error": "red", "warning": "yellow", "advice": "cyan"}


@click.command(
    epilog=examples(
        "meshwright doctor runs/llama3_8b_pretrain_config-20260101-120000",
        "meshwright doctor slurm-4711.out --gpus 64xH100",
        "meshwright doctor train.log --recipe llama3_8b_sft_config --gpus 8xH100 layout.tp=2",
        "meshwright doctor runs/on-8-nodes --baseline runs/on-1-node --json",
    )
)
@options(
    click.argument("run", metavar="RUN"),
    overrides,
    click.option(
        "--recipe",
        metavar="RECIPE",
        help="The recipe (a name or a file) or model that ran, where the log does not say.",
        shell_complete=complete.recipes,
    ),
    gpus_option,
    goal_option,
    click.option("--baseline", metavar="RUN", help="A run of the same training on fewer GPUs, to hold the network to."),
    as_json,
)
def doctor(run: str, as_json: bool, **asked: Any) -> None:
    """Says what is wrong with a RUN, from its folder or its log, and what to try, cheapest first.

    Reads run folders of our own and logs of Megatron-LM, Megatron-Bridge, torchtitan and NeMo AutoModel; whose log it
    is shows in it. Looks for: low MFU, out of memory, slow data, a slow network, pipeline bubbles, uneven steps and
    ranks, memory that grows, a loss that is not a number, diverges, spikes or stands still, checkpoints that hold up
    the run, restarts. Every finding has its figures, and every change its effect by the estimate.

    Overrides say what ran where the log does not. Exit codes: 0 nothing found, 1 something found, 2 bad input.
    """
    found = api.diagnose(run, **asked)
    answer = api.checkup_to_dict(found)
    if as_json:
        emit(answer)
    else:
        show(answer)
    end(found.ok)


def show(answer: dict[str, Any]) -> None:
    """The whole checkup."""
    out = console()
    out.print(f"[bold green]{escape(answer['path'])}[/]  {escape(_what_ran(answer))}")
    out.print("")
    table(_figure_rows(answer["figures"]), "", "  measured", "  estimate")
    if answer["mfu_convention"]:
        out.print(f"[dim]MFU: {escape(answer['mfu_convention'])}[/]")
    out.print("")
    for finding in answer["findings"]:
        _finding(finding)
    if not answer["findings"]:
        out.print(f"[green]nothing found[/]: {len(answer['looked_for'])} things were looked for")
    for name, lacks in answer["not_examined"].items():
        out.print(f"[dim]not looked for: {name}, which takes {escape(lacks)}[/]")
    for note in answer["notes"]:
        out.print(f"[dim]note: {escape(note)}[/]")


def _what_ran(answer: dict[str, Any]) -> str:
    whose = {"torch": "a log of torch"}.get(answer["kind"], answer["kind"])
    named = [answer["recipe"] or answer["model"], answer["gpus"] and f"on {answer['gpus']}"]
    total = f" of {answer['total_steps']:,}" if answer["total_steps"] else ""
    steps = f"step {answer['last_step']:,}{total}"
    return ", ".join([whose, *([" ".join(filter(None, named))] if any(named) else []), steps])


def _figure_rows(figures: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [(one["name"], _value(one["measured"], one), _value(one["estimate"], one)) for one in figures]


def _value(value: float | None, figure: dict[str, Any]) -> str:
    if value is None:
        return f"{'':>10}"
    if "share" in figure["name"] or "spread" in figure["name"] or figure["name"] == "MFU":
        return f"{value:>10.1%}"
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{text:>10}" + (f" {figure['unit']}" if figure["unit"] else "")


def _finding(finding: dict[str, Any]) -> None:
    out = console()
    colour = COLOURS[finding["severity"]]
    where = f" [dim]steps {finding['steps'][0]:,}–{finding['steps'][1]:,}[/]" if finding["steps"] else ""
    out.print(f"[{colour}]{finding['severity']}[/] [bold]{finding['rule']}[/]{where}")
    out.print(f"  {escape(finding['message'])}")
    for one in finding["evidence"]:
        against = f" ({_number(one['against'])} {one['against_what']})" if one["against"] is not None else ""
        unit = f" {one['unit']}" if one["unit"] else ""
        out.print(f"  [dim]{escape(one['name'])}: {_number(one['value'])}{unit}{escape(against)}[/]")
    for line in finding["lines"]:
        out.print(f"  [dim]{escape(line)}[/]")
    for number, remedy in enumerate(finding["remedies"], start=1):
        out.print(f"  {number}. [bold]{escape(' '.join(remedy['try']))}[/]{escape(_effect(remedy))}")
        if remedy["there"]:
            out.print(f"     [dim]there: {escape(' '.join(remedy['there']))}[/]")
    out.print("")


def _effect(remedy: dict[str, Any]) -> str:
    """What a remedy would do, after its name."""
    told = []
    if remedy["peak_gib"] is not None:
        told.append(f"{remedy['peak_gib']:.1f} GiB" + ("" if remedy["fits"] else ", does not fit"))
    if remedy["step_ratio"] is not None:
        told.append(f"step time × {remedy['step_ratio']:.2f}")
    if remedy["what"] == "contract":
        told.append("a new experiment")
    why = f"  {remedy['why']}" if remedy["why"] else ""
    return why + (f" ({', '.join(told)})" if told else "")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"

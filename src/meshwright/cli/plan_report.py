"""Plans and estimates as text: recommend, estimate, plan and size."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.api.paths import looks_like_path
from meshwright.api.planning import search_command
from meshwright.api.summary import layout_summary, model_label
from meshwright.api.terms import legend
from meshwright.cli.budget_report import budget_lines, plan_budget, plan_budget_titles, print_sizes
from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import (
    NO_LAYOUT,
    Answer,
    assumed_lines,
    finding_lines,
    memory_lines,
    option_lines,
    parameters_text,
    repair_lines,
    seconds,
    speed_line,
    titled,
)

SECONDS_PER_DAY = 86400
FULL_STEP = 0.98  # share of a step's tokens from which its samples are full
SLOW_MFU = 0.2  # below it, another layout is probably much faster


def recommend(answer: Answer, found: Any) -> None:
    """Print a plan: recipe, layout, memory, speed, changes, findings and commands."""
    out, recipe = console(), answer["recipe"]
    origin = f"{recipe['match']}; made for {recipe['made_for']}"
    out.print(f"[bold green]{recipe['name']}[/]  {recipe['approach']} ({origin})")
    titled(out, "Note", [escape(note) for note in answer.get("notes", [])])
    titled(out, "Train", [_train_line(answer, found)])
    titled(out, "Assumed", assumed_lines(answer["question"]["assumed"]))
    if recipe["benchmark"]:
        titled(out, "", ["[yellow]benchmark: upper-bound throughput on mock data, not a production setting[/]"])
    titled(out, "Layout", [layout_summary(answer["layout"], answer["question"]["engine"], with_value=True)])
    titled(out, "Memory", memory_lines(answer["estimate"]) if found.exists else [NO_LAYOUT])
    if answer["estimate"]["fits"]:
        titled(out, "Speed", _speed_lines(answer))
    titled(out, "Budget", budget_lines(answer, found.question.cluster.world))
    if "smallest_that_fits" in answer:
        titled(out, "Needs", [_needs_line(answer, found.question.cluster)])
    titled(out, "Original", published_lines(answer))
    titled(out, "Changed", [_change_line(c) for c in answer["changes"]] or ["nothing"])
    titled(out, "Why", [_reason_line(r) for r in answer.get("reasons", [])])
    titled(out, "Findings", finding_lines(answer["findings"], answer.get("repair")) or ["none"])
    titled(out, "Repair", repair_lines(answer))
    titled(out, "Options", option_lines(answer))
    listed = {option["title"] for option in answer.get("options", [])}
    titled(out, "Consider", [_suggestion_line(o) for o in answer["suggestions"] if o["title"] not in listed])
    commands = [f"[dim]{name}[/]  {escape(text)}" for name, text in answer["commands"].items()]
    refused = [f"[dim]not {n}: {escape(why)}[/]" for n, why in answer["no_command"].items()]
    inputs = [*_weights_lines(answer, found), *_data_lines(answer, found)]
    titled(out, "Run", [*_repair_note(answer), *commands, *inputs, *refused])
    titled(out, "Terms", [f"[dim]{legend(answer)}[/]"] if found.exists and legend(answer) else [])
    if "reasons" not in answer:
        out.print("[dim]Add --explain to see why each number was chosen, --json for scripts.[/]")


def _repair_note(answer: Answer) -> list[str]:
    """Return whether the commands include the repair: they do unless it replaces what the user typed."""
    repair = answer.get("repair")
    if not repair or not answer["commands"]:
        return []
    if repair["planned"]:
        return ["[dim]with the repair, and the layout sized for it:[/]"]
    kept = f"would change your {', '.join(repair['undoes'])}" if repair["undoes"] else "leaves no plan that runs"
    return [f"[dim]without the repair, which {kept}[/]"]


def _weights_lines(answer: Answer, found: Any) -> list[str]:
    """Return which weights our engine fine-tunes, unless the plan names them."""
    recipe, model = found.recipe, found.case.model
    if recipe.goal == "pretrain" or "meshwright" not in answer["commands"]:
        return []
    if named := recipe.checkpoint.pretrained:
        is_id = "/" in named and not looks_like_path(named) and not os.path.exists(named)
        return [f"[dim]weights: {escape(named)} once downloaded (hf download {escape(named)})[/]"] if is_id else []
    start = "those of the model's folder"
    if not os.path.exists(os.path.expanduser(recipe.model)):
        start = f"{model.hf_id} once downloaded (hf download {model.hf_id})" if model.hf_id else ""
        if start and recipe.model == model.name:
            start += "; another hub id of this shape, typed as the model, means its weights"
    own = "checkpoint.pretrained=FOLDER for a Hugging Face folder"
    return [f"[dim]weights: {start}; {own} of yours[/]" if start else f"[dim]weights: add {own}[/]"]


def _data_lines(answer: Answer, found: Any) -> list[str]:
    """Return that the commands train on random tokens, which is of use for a speed test only."""
    data = found.recipe.data
    if not answer["commands"] or found.recipe.benchmark or data.blend or data.dataset != "mock":
        return []
    if any("DATA" in shlex.split(text) for text in answer["commands"].values()):  # the user has to replace it
        return []
    return ["[yellow]data: mock is random tokens, for a speed test; --dataset FILE or FOLDER trains on yours[/]"]


def published_lines(answer: Answer) -> list[str]:
    """Return the published layout with its cost, if the plan has another one, and how to return to it."""
    found = answer.get("published")
    if found is None or found["kept"]:
        return []
    summary = layout_summary(found["layout"], answer["question"]["engine"])
    if not found["overrides"]:  # it cannot be planned here
        return [f"{summary}: [dim]{escape(found['why'])}[/]"]
    fits = "" if found["fits"] else " (does not fit)"
    cost = f"{found['step_s']:.2f} s per step, {found['total_gib']:.0f} GiB{fits}"
    run = f"to run it: meshwright train {found['recipe']}; " if found["recipe"] else ""
    return [
        f"{summary}: {cost}  [dim]{escape(found['why'])}[/]",
        f"[dim]{run}to plan with it: {' '.join(found['overrides'])}[/]",
    ]


def _step_line(estimate: Answer) -> str:
    shares = {name: seconds / estimate["step_s"] for name, seconds in estimate["step_parts_s"].items()}
    return "  ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def estimate(answer: Answer, found: Any) -> None:
    """Print memory and time of one exact layout."""
    out = console()
    out.print(f"[bold green]{answer['recipe']['name']}[/]  exactly this layout, nothing searched")
    titled(out, "Note", [escape(note) for note in answer.get("notes", [])])
    titled(out, "Train", [_train_line(answer, found)])
    titled(out, "Assumed", assumed_lines(answer["question"]["assumed"]))
    titled(out, "Changed", [_change_line(c) for c in answer["changes"] if not _is_requested(c)])
    titled(out, "Layout", [layout_summary(answer["layout"], answer["question"]["engine"], with_value=True)])
    if found.exists:
        titled(out, "Memory", memory_lines(answer["estimate"]))
        titled(out, "Speed", _speed_lines(answer))
        titled(out, "Step", [_step_line(answer["estimate"])])
        titled(out, "Budget", budget_lines(answer, found.question.cluster.world))
    else:
        titled(out, "Memory", [NO_LAYOUT])
    titled(out, "Findings", finding_lines(answer["findings"], answer.get("repair")) or ["none"])
    titled(out, "Repair", repair_lines(answer))
    titled(out, "Options", option_lines(answer))
    if found.exists:
        titled(out, "Terms", [f"[dim]{legend({**answer, 'changes': []}, step_parts=True)}[/]"])
        if answer["estimate"]["mfu"] < SLOW_MFU and found.question.recipe_words:
            out.print(f"[dim]MFU below {SLOW_MFU:.0%}: {escape(search_command(found))} searches layouts[/]")


def plan(answer: Answer, found: Any) -> None:
    """Print ranked plans and what was dropped."""
    out = console()
    titled(out, "Note", [escape(note) for note in answer.get("notes", [])])
    rows, layouts = [], _distinct_layouts(answer["plans"])
    for place, p in enumerate(answer["plans"], 1):
        e, memory = p["estimate"], p["estimate"]["memory_gib"]
        gib = f"{memory['total']:.0f}/{memory['capacity']:.0f}" + ("" if e["fits"] else " over")
        figures = plan_budget(p)
        rows.append((str(place), layouts[place - 1], f"{e['step_s']:.2f}", f"{e['mfu']:.0%}", gib, *figures))
    if answer["plans"]:
        titled(out, "Train", [_train_line(answer["plans"][0], found.plans[0])])
        titled(out, "Assumed", assumed_lines(answer["plans"][0]["question"]["assumed"]))
        table(rows, "", "layout", "s/step", "MFU", "GiB", *plan_budget_titles(answer["plans"]))
        titled(out, "First", _first_lines(answer["plans"]))
        titled(out, "Budget", budget_lines(answer["plans"][0], found.plans[0].question.cluster.world))
        titled(out, "Against", [_change_line(c) for c in answer["plans"][0]["changes"]] or ["the recipe's own layout"])
        titled(out, "Options", option_lines(answer["plans"][0]))
        fits = answer["plans"][0]["estimate"]["fits"]  # what fits is what was asked, so only other counts are named
        shown = [o for o in answer["plans"][0]["suggestions"] if not fits or o["title"].startswith("fewer nodes")]
        titled(out, "Consider", [_suggestion_line(o) for o in shown])
    smaller = {f"{c['total_gib']:.0f}": c for c in reversed(answer["pareto"])}  # the fastest of those that look alike
    trades = [f"{c['step_s']:.2f} s, {gib} GiB" for gib, c in reversed(smaller.items())]
    titled(out, "Trade", ["  ·  ".join(trades[:8])] if trades else [])
    dropped = [f"{d['count']:,} × {escape(d['reason'])}  [dim]{escape(d['example'])}[/]" for d in answer["dropped"]]
    titled(out, "Dropped", dropped[:8] or ["nothing"])
    titled(out, "Findings", finding_lines(answer.get("findings", []), answer.get("repair")))
    titled(out, "Repair", repair_lines(answer))
    out.print(f"[dim]{answer['searched']:,} legal layouts scored[/]")


def _first_lines(plans: Sequence[Answer]) -> list[str]:
    """Return why the first plan is first although another is faster."""
    seconds = [p["estimate"]["step_s"] for p in plans]
    if min(seconds) >= seconds[0]:
        return []
    if plans[0].get("published", {}).get("kept"):
        return [f"the recipe's own layout, as recommend keeps it: {escape(plans[0]['published']['why'])}"]
    return ["as recommend: of layouts about equally fast, the closest to the recipe that is likely to fit"]


def _distinct_layouts(plans: Sequence[Answer]) -> list[str]:
    """Return the layout of each plan on one line; those that read the same with the fields in which they differ."""
    found = [layout_summary(p["layout"], p["question"]["engine"]) for p in plans]
    for text in {one for one in found if found.count(one) > 1}:
        places = [place for place, one in enumerate(found) if one == text]
        old = {c["field"]: c["from"] for place in places for c in plans[place]["changes"]}
        values = {place: old | {c["field"]: c["to"] for c in plans[place]["changes"]} for place in places}
        differing = [field for field in old if len({str(values[place][field]) for place in places}) > 1]
        for place in places:
            found[place] = " · ".join([text, *(f"{one}={_typed_value(values[place][one])}" for one in differing)])
    return found


def _typed_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def size(answer: Answer, found: Any) -> None:
    """Print GPU counts as a table."""
    print_sizes(answer)


def _speed_lines(answer: Answer) -> list[str]:
    """Return the speed of steps of full samples; the budget's steps are shorter if the samples of the data are."""
    contract, budget = answer["contract"], answer.get("budget")
    length, samples = contract["seq_length"], contract["global_batch_size"]
    speed, convention = speed_line(answer["estimate"]), f"[dim]MFU: {answer['estimate']['mfu_convention']}[/]"
    if not budget or budget["tokens_per_step"] >= FULL_STEP * length * samples:
        return [speed, convention]
    own = budget["days"] * SECONDS_PER_DAY * budget["goodput"]["share"] / budget["steps"]
    tokens = f"{budget['tokens_per_step'] / samples:,.0f}"
    note = f"of samples of {length:,} tokens; a step of the data's samples, {tokens} tokens on average, takes "
    return [speed, f"{note}{seconds(own)} s, which the budget has", convention]


def _needs_line(answer: Answer, on: Any) -> str:
    """Return the smallest clusters that fit, with offload and without; one of a file keeps the file's links."""
    smallest, plain = answer["smallest_cluster"], answer["smallest_without_offload"]
    if not smallest:
        return f"no count up to 16,384 fits this training{' unchanged: see Repair' if answer.get('repair') else ''}"
    runs = answer["estimate"]["fits"] and not any(one["severity"] == "error" for one in answer["findings"])
    asked = answer["question"]["gpus"]
    if smallest == plain and not runs:
        return _would_fit(smallest, asked, on, "")
    with_offload = [] if runs else [_would_fit(smallest, asked, on, " with offload")]
    none = "no count up to 16,384 fits without offload"
    return "; ".join([*with_offload, _would_fit(plain, asked, on, " without offload") if plain else none])


def _would_fit(cluster: str, asked: str, on: Any, how: str) -> str:
    counts = re.match(r"(\d+)x(\d+)x", cluster)
    if _gpus(cluster) < _gpus(asked):
        how += f", though these are fewer than {_gpus(asked)} GPUs: the batch divides into more layouts"
    if on.file and counts:
        nodes, each = map(int, counts.groups())
        setting = msgspec.structs.replace(on, nodes=nodes, gpus_per_node=each).nodes_setting
        return escape(f"{cluster} ({nodes * each} GPUs) would fit{how}: {setting}")
    return f"--gpus {cluster} would fit{how}"


def _gpus(cluster: str) -> int:
    """Return the GPUs of a cluster string: the product of its leading numbers."""
    return math.prod(int(one) for one in re.findall(r"(\d+)x", cluster))


def _reason_line(reason: Answer) -> str:
    return f"[bold]{reason['field']} {reason['value']}[/]  {escape(reason['why'])}"


def _suggestion_line(suggestion: Answer) -> str:
    change = f" [cyan]{escape(shlex.join(suggestion['overrides']))}[/]" if suggestion["overrides"] else ""
    return f"{suggestion['title']}:{change}  [dim]{escape(suggestion['why'])}[/]"


def _train_line(answer: Answer, found: Any) -> str:
    parameters = found.case.model.params
    model = model_label(found.recipe, answer["question"]["model"])
    size = parameters_text(parameters.total, parameters.active)
    q, c = answer["question"], answer["contract"]
    adapter = f": {c['peft']['method']}, rank {c['peft']['rank']}" if c["peft"] else ""
    adapter += ", frozen weights in 4 bits (NF4)" if adapter.startswith(": qlora") else ""
    adapter += ", frozen weights in 8 bits (LLM.int8)" if adapter.startswith(": lora8bit") else ""
    return (
        f"{model} ({size}) · {q['goal']}{adapter} · {c['seq_length']:,} tokens × {c['global_batch_size']:,} "
        f"per step · {c['precision']} · {c['optimizer']} lr {c['lr']:g} · on {q['gpus']}"
    )


def _is_requested(change: Answer) -> bool:
    """Return whether the user typed a change."""
    return bool(change["why"].startswith("requested"))


def _change_line(change: Answer) -> str:
    color = "yellow" if change["kind"] == "contract" else "cyan"
    old, new = escape(str(change["from"])), escape(str(change["to"]))
    return f"[{color}]{change['field']} {old} → {new}[/] [dim]({change['kind']})[/]  {escape(change['why'])}"

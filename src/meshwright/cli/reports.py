"""Responses as text for a terminal; colored only there. A report has the name of its verb
and gets the response as JSON and the Python result.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from typing import Any

import click

from meshwright.api.summary import layout_summary, model_label
from meshwright.api.terms import legend
from meshwright.cli.budget_report import budget_lines, plan_budget, plan_budget_titles, print_sizes
from meshwright.cli.console import console, escape, table
from meshwright.cli.doctor_report import doctor as doctor
from meshwright.cli.dryrun_report import dryrun as dryrun
from meshwright.cli.layout import (
    MARKS,
    NO_LAYOUT,
    assumed_lines,
    finding_lines,
    memory_lines,
    repair_lines,
    speed_line,
    titled,
)

Answer = dict[str, Any]


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
    titled(out, "Layout", [layout_summary(answer["layout"])])
    titled(out, "Memory", memory_lines(answer["estimate"]) if found.exists else [NO_LAYOUT])
    if answer["estimate"]["fits"]:
        titled(out, "Speed", [speed_line(answer["estimate"]), f"[dim]MFU: {answer['estimate']['mfu_convention']}[/]"])
    titled(out, "Budget", budget_lines(answer, found.question.cluster.world))
    if "smallest_that_fits" in answer:
        titled(out, "Needs", [_needs_line(answer, found.question.cluster_ref)])
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
    titled(out, "Run", [*commands, *_weights_lines(answer, found), *refused])
    titled(out, "Terms", [f"[dim]{legend(answer)}[/]"] if found.exists and legend(answer) else [])
    if "reasons" not in answer:
        out.print("[dim]Add --explain to see why each number was chosen, --json for scripts.[/]")


def _weights_lines(answer: Answer, found: Any) -> list[str]:
    """Return which weights our engine fine-tunes, unless the plan names them."""
    recipe, model = found.recipe, found.case.model
    if recipe.goal == "pretrain" or recipe.checkpoint.pretrained or "meshwright" not in answer["commands"]:
        return []
    start = "those of the model's folder"
    if not os.path.exists(os.path.expanduser(recipe.model)):
        start = f"{model.hf_id} once downloaded (hf download {model.hf_id})" if model.hf_id else ""
    own = "checkpoint.pretrained=FOLDER for a Hugging Face folder"
    return [f"[dim]weights: {start}; {own} of yours[/]" if start else f"[dim]weights: add {own}[/]"]


def published_lines(answer: Answer) -> list[str]:
    """Return the published layout with its cost, if the plan has another one, and how to return to it."""
    found = answer.get("published")
    if found is None or found["kept"]:
        return []
    fits = "" if found["fits"] else " (does not fit)"
    cost = f"{found['step_s']:.2f} s per step, {found['total_gib']:.0f} GiB{fits}"
    return [
        f"{layout_summary(found['layout'])}: {cost}  [dim]{escape(found['why'])}[/]",
        f"[dim]to run it: meshwright train {found['recipe']}; to plan with it: {' '.join(found['overrides'])}[/]",
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
    titled(out, "Changed", [_change_line(c) for c in answer["changes"] if c["field"] == "precision.compute"])
    titled(out, "Layout", [layout_summary(answer["layout"])])
    if found.exists:
        titled(out, "Memory", memory_lines(answer["estimate"]))
        titled(out, "Speed", [speed_line(answer["estimate"]), f"[dim]MFU: {answer['estimate']['mfu_convention']}[/]"])
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
            words = (*found.question.recipe_words, "--gpus", found.question.cluster_ref or answer["question"]["gpus"])
            out.print(f"[dim]MFU below {SLOW_MFU:.0%}: meshwright plan {escape(shlex.join(words))} searches layouts[/]")


def plan(answer: Answer, found: Any) -> None:
    """Print ranked plans and what was dropped."""
    out = console()
    titled(out, "Note", [escape(note) for note in answer.get("notes", [])])
    rows = []
    for place, p in enumerate(answer["plans"], 1):
        e, memory = p["estimate"], p["estimate"]["memory_gib"]
        gib = f"{memory['total']:.0f}/{memory['capacity']:.0f}" + ("" if e["fits"] else " over")
        figures = plan_budget(p)
        rows.append((str(place), layout_summary(p["layout"]), f"{e['step_s']:.2f}", f"{e['mfu']:.0%}", gib, *figures))
    if answer["plans"]:
        titled(out, "Assumed", assumed_lines(answer["plans"][0]["question"]["assumed"]))
    table(rows, "", "layout", "s/step", "MFU", "GiB", *plan_budget_titles(answer["plans"]))
    if answer["plans"]:
        titled(out, "Budget", budget_lines(answer["plans"][0], found.plans[0].question.cluster.world))
        titled(out, "Against", [_change_line(c) for c in answer["plans"][0]["changes"]] or ["the recipe's own layout"])
        titled(out, "Options", option_lines(answer["plans"][0]))
        if not answer["plans"][0]["estimate"]["fits"]:
            titled(out, "Consider", [_suggestion_line(o) for o in answer["plans"][0]["suggestions"]])
    trades = [f"{c['step_s']:.2f} s, {c['total_gib']:.0f} GiB" for c in answer["pareto"]]
    titled(out, "Trade", ["  ·  ".join(trades[:8])] if trades else [])
    dropped = [f"{d['count']:,} × {escape(d['reason'])}  [dim]{escape(d['example'])}[/]" for d in answer["dropped"]]
    titled(out, "Dropped", dropped[:8] or ["nothing"])
    titled(out, "Findings", finding_lines(answer.get("findings", []), answer.get("repair")))
    titled(out, "Repair", repair_lines(answer))
    out.print(f"[dim]{answer['searched']:,} legal layouts scored[/]")


def size(answer: Answer, found: Any) -> None:
    """Print GPU counts as a table."""
    print_sizes(answer)


FEW_ROWS = 5
SLOW_MFU = 0.2  # below it, another layout is probably much faster


def accuracy(answer: Answer, found: Any) -> None:
    """Print the error of the cost model."""
    out, step, memory, fit = console(), answer["step_time"], answer["memory"], answer["fit"]
    out.print(f"{answer['predicted']:,} of {answer['rows']:,} rows predicted")
    for name, part in (("step time", step), ("memory", memory)):
        if not part["rows"]:
            out.print(f"{name}: no row measured it")
            continue
        count = f"{part['rows']:,} row{'s' * (part['rows'] > 1)}"
        high = f", 90th percentile {part['p90_abs_pct']} %" if part["rows"] > 1 else ""
        out.print(f"{name}: {'median ' * (part['rows'] > 1)}|error| {part['median_abs_pct']} %{high} ({count})")
    counts = [
        f"{fit[f'{key}_called_{key}']} of {fit[f'{key}_rows']} {what}"
        for key, what in (("ok", "that ran are predicted to fit"), ("oom", "that ran out of memory are predicted to"))
        if fit[f"{key}_rows"]
    ]
    if counts:
        out.print("fits: " + "; ".join(counts))
    rows = [
        (source, str(found["rows"]), f"{found['median_abs_pct']}", f"{found['bias_pct']:+}")
        for source, found in step["by_source"].items()
    ]
    if rows:
        table(rows, "source", "rows", "step time, median |error| %", "bias %")
    if 0 < answer["predicted"] < FEW_ROWS:
        out.print(f"[dim]{answer['predicted']} rows are few: the median says little about other runs[/]")
    for note in answer["notes"]:
        out.print(f"[dim]note: {escape(note)}[/]")
    for reason, count in answer["unsupported"].items():
        out.print(f"[dim]{count} not predicted: {escape(reason)}[/]")


def _needs_line(answer: Answer, file: str) -> str:
    """Return the smallest clusters that fit, with offload and without; one of a file keeps the file's links."""
    smallest, plain = answer["smallest_cluster"], answer["smallest_without_offload"]
    if not smallest:
        return "no count up to 16,384 fits this training"
    runs = answer["estimate"]["fits"] and not any(one["severity"] == "error" for one in answer["findings"])
    asked = answer["question"]["gpus"]
    if smallest == plain and not runs:
        return _would_fit(smallest, asked, file, "")
    with_offload = [] if runs else [_would_fit(smallest, asked, file, " with offload")]
    none = "no count up to 16,384 fits without offload"
    return "; ".join([*with_offload, _would_fit(plain, asked, file, " without offload") if plain else none])


def _would_fit(cluster: str, asked: str, file: str, how: str) -> str:
    counts = re.match(r"(\d+)x(\d+)x", cluster)
    if _gpus(cluster) < _gpus(asked):
        how += f", though these are fewer than {_gpus(asked)} GPUs: the batch divides into more layouts"
    if file and counts:
        nodes, each = map(int, counts.groups())
        return escape(f"{cluster} ({nodes * each} GPUs) would fit{how}: nodes = {nodes} in {file}")
    return f"--gpus {cluster} would fit{how}"


def _gpus(cluster: str) -> int:
    """Return the GPUs of a cluster string: the product of its leading numbers."""
    return math.prod(int(one) for one in re.findall(r"(\d+)x", cluster))


def _reason_line(reason: Answer) -> str:
    return f"[bold]{reason['field']} {reason['value']}[/]  {escape(reason['why'])}"


def _suggestion_line(suggestion: Answer) -> str:
    change = f" [cyan]{escape(shlex.join(suggestion['overrides']))}[/]" if suggestion["overrides"] else ""
    return f"{suggestion['title']}:{change}  [dim]{escape(suggestion['why'])}[/]"


def option_lines(answer: Answer) -> list[str]:
    """Return the options of an answer that does not fit as asked, in the order of what they cost."""
    return [line for option in answer.get("options", []) for line in _option_lines(option)]


def _option_lines(option: Answer) -> list[str]:
    """Return what an option is and costs, and the command that plans it."""
    color = "yellow" if option["kind"] == "contract" else "cyan"
    host = f", {option['host_gib']:.0f} GiB of host memory per GPU" if option["host_gib"] >= 1 else ""
    figures = f"{option['total_gib']:.1f} GiB{host}, {option['step_s']:.3g} s per step"
    return [
        f"[{color}]{option['title']}[/] [dim]({option['kind']})[/]: {figures} ({option['slowdown']:.2g} × the step "
        f"time with unlimited memory); {escape(option['cost'])}",
        f"[dim]  {escape(option['command'])}[/]",
    ]


def _train_line(answer: Answer, found: Any) -> str:
    parameters = found.case.model.params
    model = model_label(found.recipe, answer["question"]["model"])
    total, active = parameters.total / 1e9, parameters.active / 1e9
    size = f"{total:.2f} B parameters" + (f", {active:.2f} B active" if active < 0.99 * total else "")
    q, c = answer["question"], answer["contract"]
    adapter = f": {c['peft']['method']}, rank {c['peft']['rank']}" if c["peft"] else ""
    adapter += ", frozen weights in 4 bits (NF4)" if adapter.startswith(": qlora") else ""
    return (
        f"{model} ({size}) · {q['goal']}{adapter} · {c['seq_length']:,} tokens × {c['global_batch_size']:,} "
        f"per step · {c['precision']} · {c['optimizer']} lr {c['lr']:g} · on {q['gpus']}"
    )


def _change_line(change: Answer) -> str:
    color = "yellow" if change["kind"] == "contract" else "cyan"
    old, new = escape(str(change["from"])), escape(str(change["to"]))
    return f"[{color}]{change['field']} {old} → {new}[/] [dim]({change['kind']})[/]  {escape(change['why'])}"


def check(answer: Answer, found: Any) -> None:
    """Print the findings for a recipe or file."""
    out = console()
    verdict = "[green]ok[/]" if answer["ok"] else "[red]cannot start or does not fit[/]"
    what = answer["file"] or answer["recipe"]
    where = f" on {answer['gpus']}" if answer["gpus"] else ""
    runner = f"the {answer['engine']} engine" if answer["framework"] == "meshwright" else answer["framework"]
    out.print(f"[bold]{escape(what)}[/]{where} with {runner}: {verdict}")
    titled(out, "Assumed", assumed_lines(answer["assumed"]))
    if answer["estimate"]:
        titled(out, "Memory", memory_lines(answer["estimate"]) if found.exists else [NO_LAYOUT])
    titled(out, "Findings", finding_lines(answer["findings"], answer.get("repair")) or ["none"])
    titled(out, "Repair", repair_lines(answer))
    titled(out, "Options", option_lines(answer))
    unresolved = [f"{o['file']}:{o['line']} {o['key']} = {o['text']}: {o['reason']}" for o in answer["unresolved"]]
    if unresolved:
        titled(out, "Unknown", [escape(line) for line in unresolved])
    if answer["notes"]:
        titled(out, "Notes", [escape(note) for note in answer["notes"]])


def export(answer: Answer, found: Any) -> None:
    """Print another framework's files and command, and the fields it has no key for."""
    out = console()
    for name, text in {} if answer["written"] else answer["files"].items():
        out.print(f"[bold]# {escape(name)}[/]")
        click.echo(text)
    titled(out, "Wrote", [escape(path) for path in answer["written"]])
    titled(out, "Assumed", assumed_lines(answer["assumed"]))
    titled(out, "Start", [escape(answer["command"])])
    if answer["env"]:
        titled(out, "With", [escape(f"{name}={value}") for name, value in answer["env"].items()])
    unmapped = [f"{u['field']}={u['value']}: {u['reason']}" for u in answer["unmapped"]]
    titled(out, "Unmapped", [escape(line) for line in unmapped] or ["nothing: every setting of the recipe is in it"])
    titled(out, "Dropped", [escape(_setting_line(one)) for one in answer["not_imported"]])
    if answer["notes"]:
        titled(out, "Notes", [escape(note) for note in answer["notes"]])
    if answer["findings"]:
        titled(out, "Findings", finding_lines(answer["findings"]))


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
    titled(out, "Use" if answer["sides"][0]["ok"] else "None", [f"[bold]{escape(answer['answer'])}[/]"])
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


def _side_row(side: Answer) -> tuple[str, ...]:
    estimate = side["estimate"]
    if estimate is None or side["layout"] is None:
        return (str(side["rank"]), side["name"], "cannot run", "", "", "", "")
    memory, band = estimate["memory_gib"], estimate["band"]
    gib = f"{memory['total']:.0f}/{memory['capacity']:.0f}" + ("" if estimate["fits"] else " over")
    within = f"{estimate['step_s']:.2f} ({band['step_low_s']:.2f} to {band['step_high_s']:.2f})"
    if not estimate["fits"]:
        return (str(side["rank"]), side["name"], layout_summary(side["layout"]), gib, "", "", "")
    speed = (within, f"{estimate['tokens_per_s_per_gpu']:,.0f}", f"{estimate['mfu']:.0%}")
    return (str(side["rank"]), side["name"], layout_summary(side["layout"]), gib, *speed)


def _side_lines(side: Answer) -> list[str]:
    """Return why a side has its rank, what its engine does not execute and what its config loses."""
    lines = [f"[bold]{escape(side['name'])}[/]: {escape('; '.join(side['reasons']))}"]
    needed = [one for one in side["changes"] if one["kind"] == "layout" and not one["field"].startswith("layout.")]
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


def import_file(answer: Answer, found: Any) -> None:
    """Print the recipe of a file, then on stderr what was assumed and what did not survive."""
    if answer["written"]:
        click.echo(f"wrote {answer['written']}")
    else:
        click.echo(answer["text"], nl=False)
    for title, lines in (
        ("assumed", [one["message"] for one in answer["assumed"]]),
        ("not imported", [_setting_line(one) for one in answer["not_imported"]]),
        ("note", answer["notes"]),
    ):
        for line in lines:
            click.echo(f"# {title}: {line}", err=True)
    for one in answer["findings"]:
        place = f"{one['file']}:{one['line']} " if one.get("line") else ""
        fix = f"; fix: {' '.join(one['fix'])}" if one["fix"] else ""
        click.echo(f"# {one['severity']}: {place}{one['message']} ({one['rule']}){fix}", err=True)


def _setting_line(setting: Answer) -> str:
    place = f"{setting['file']}:{setting['line']} " if setting["line"] else ""
    return f"{place}{setting['key']}={setting['value']}: {setting['reason']}"


def recipes(answer: Answer, found: Any) -> None:
    """Print the index as a table."""
    rows = [
        (e["name"], e["goal"], e["model"], f"{e['gpus']}x{e['gpu']}", f"{e['seq_length']:,}", e["family"])
        for e in answer["recipes"]
    ]
    table(rows, "recipe", "goal", "model", "GPUs", "tokens", "family")
    titled(console(), "Note", [escape(note) for note in answer.get("notes", [])])
    console().print(f"[dim]{len(rows)} recipes[/]")


def models(answer: Answer, found: Any) -> None:
    """Print models with their parameter counts."""
    if any("plan" in m for m in answer["models"]):
        _models_that_fit(answer)
        return
    rows = []
    for m in answer["models"]:
        p = m["parameters"]
        counts = (f"{p['total'] / 1e9:.3f}", f"{p['active'] / 1e9:.3f}")
        kind, goals = m["architecture"], " ".join(m["recipes"]) or "-"
        rows.append((m["name"], *counts, str(m["layers"]), str(m["hidden"]), kind, goals, m["hf_id"]))
    table(rows, "model", "total B", "active B", "layers", "hidden", "kind", "recipes", "Hugging Face id")
    shown = (
        f"{len(rows)} model{'s' * (len(rows) != 1)}; recipes: goals with one of its own, others start from the closest"
    )
    console().print(f"[dim]{shown}. Add --gpus 1xRTX4090 --goal lora to see what fits.[/]")


def _models_that_fit(answer: Answer) -> None:
    """Print the models that fit with memory and speed, and how many do not."""
    fitting = [m for m in answer["models"] if m["plan"]["fits"]]
    rows = [
        (
            m["name"],
            f"{m['parameters']['total'] / 1e9:.3f}",
            f"{m['plan']['total_gib']:.1f}",
            f"{m['plan']['tokens_per_s']:,.0f}",
            f"{m['plan']['seq_length']:,}",
            m["plan"]["recipe"],
        )
        for m in fitting
    ]
    table(rows, "model", "total B", "GiB per GPU", "tokens/s", "sequence", "recipe")
    out, rest = console(), len(answer["models"]) - len(fitting)
    out.print(f"[dim]{len(fitting)} models fit, {rest} do not or have no recipe; --json has all, with the reason[/]")
    if fitting:
        out.print(f"[dim]Next: {escape(fitting[0]['plan']['command'])}[/]")


def gpus(answer: Answer, found: Any) -> None:
    """Print GPUs as a table."""
    rows = []
    for g in answer["gpus"]:
        peak = g["peak_tflops_dense"]
        rows.append(
            (
                g["name"],
                f"{g['memory_gib']:.1f}",
                *(f"{peak[p]:,.0f}" if p in peak else "-" for p in ("bf16", "fp8", "fp4")),
                f"{g['hbm_gb_s']:,.0f}",
                f"{g['nvlink_gb_s_per_direction']:,.0f}",
                str(g["nvlink_domain"]),
                f"{g['network_gb_s']:,.0f}",
            )
        )
    table(rows, "GPU", "GiB", "bf16", "fp8", "fp4 TFLOP/s", "HBM GB/s", "link GB/s", "domain", "network GB/s")


def rules(answer: Answer, found: Any) -> None:
    """Print rules with symptom, cause and fix."""
    out = console()
    for r in answer["rules"]:
        mark, color = MARKS[r["severity"]]
        out.print(f"[{color}]{mark}[/] [bold]{r['id']}[/] [dim]{r['severity']}; {', '.join(r['engines'])}[/]")
        out.print(f"    symptom  {escape(r['symptom'])}\n    cause    {escape(r['cause'])}")
        if r["fix_fields"]:
            out.print(f"    fix      {', '.join(r['fix_fields'])}")


def explain(answer: Answer, found: Any) -> None:
    """Print a rule, fields and the rules about them, a finding, a term, or what an error message means."""
    out, field, kind = console(), answer["field"], answer["kind"]
    if kind in ("term", "finding", "section", "key", "error", "option", "capabilities"):
        out.print(f"[bold]{escape(answer['about'])}[/]  {escape(answer['meaning'] or '')}".rstrip())
    if kind == "finding":
        out.print("[dim]meshwright doctor RUN reports it[/]")
    if kind == "capabilities":
        table([(c["field"], c["executes"], c["why"]) for c in answer["capabilities"]], "field", "executes", "why")
        out.print("[dim]every other field is executed with every value[/]")
    if field is not None and kind != "rule":
        _print_field(out, answer)
    for one in answer["fields"]:
        out.print(f"    {one['key']:<28} {escape(one['meaning'])}  [dim]default {escape(str(one['default']))}[/]")
    if kind == "words" and answer["meaning"]:
        out.print(f"[dim]{escape(answer['meaning'])}[/]")
    for one in answer["matches"] if kind == "words" else ():
        out.print(f"[bold]{escape(one['name'])}[/] [dim]{one['kind']}[/]  {escape(one['meaning'])}")
        for text in one["fix"] if len(answer["matches"]) == 1 else ():
            out.print(f"    fix      {escape(text)}")
    titled(out, "Fix", [escape(text) for text in answer["fix"]])
    if kind == "message":
        for place, one in enumerate(answer["matches"], start=1):
            _print_match(out, place, one)
        return
    for r in answer["rules"]:
        mark, color = MARKS[r["severity"]]
        out.print(f"[{color}]{mark}[/] [bold]{r['id']}[/] [dim]{r['severity']}; {', '.join(r['engines'])}[/]")
        out.print(f"    symptom  {escape(r['symptom'])}\n    cause    {escape(r['cause'])}")
        if r["fix"]:
            out.print("    fix      " + " or ".join(" + ".join(fix) for fix in r["fix"]))
        for raised in r["messages"] if kind == "rule" else ():
            out.print(f"    message  {escape(raised['text'])}  [dim]{escape(raised['source'])}[/]")


def _print_field(out: Any, answer: Answer) -> None:
    field = answer["field"]
    out.print(f"[bold]{field['key']}[/]  {escape(field['meaning'])}  [dim]({field['kind']})[/]")
    shown = answer["meaning"] and answer["kind"] in ("field", "value")
    titled(out, "Meaning", [escape(answer["meaning"])] if shown else [])
    titled(out, "Default", [escape(str(field["default"]))])
    titled(out, "Choices", [", ".join(map(str, field["choices"]))] if field["choices"] else [])
    titled(out, "Also", [", ".join(field["also_understood"])] if field["also_understood"] else [])


def _print_match(out: Any, place: int, one: Answer) -> None:
    """Print what an error message may mean, with the framework's own wording and the fixes."""
    where = escape(one["source"]) if one["source"] else "symptom of the rule"
    out.print(f"{place}. [bold]{escape(one['name'])}[/] [dim]{one['kind']}; {one['score']:.0%} of the message[/]")
    out.print(f"    message  {escape(one['message'])}  [dim]{where}[/]\n    cause    {escape(one['meaning'])}")
    if one["fix"]:
        out.print("    fix      " + "\n             ".join(map(escape, one["fix"])))


def train(answer: Answer, found: Any) -> None:
    """Print the metrics of a run, next to the estimate if it ran on GPUs."""
    out, losses, memory = console(), answer["losses"], answer["memory_gib"]
    where = f"{answer['steps']} steps on {answer['ranks']} × {escape(answer['device'])}"
    out.print(f"[bold]{escape(answer['recipe'])}[/]  {where}  {layout_summary(answer['layout'])}")
    if answer["resumed_from"]:
        out.print(f"resumed {escape(answer['resumed_from'])}")
    if not losses:
        done = escape(answer["stopped_early"] or "the run was already complete")
        out.print(f"{done}; nothing was trained")
        _print_validation(answer)
        return
    out.print(
        f"loss    {losses[0]:.4f} → {losses[-1]:.4f}"
        + (f"  skipped steps {answer['skipped']}" * bool(answer["skipped"]))
    )
    _print_validation(answer)
    if answer["stopped_early"]:
        out.print(escape(answer["stopped_early"]))
    speed = f"{answer['tokens_per_s_per_gpu']:,.0f} tokens/s/rank, step {answer['step_s']:.3g} s"
    if answer["mfu"] is not None:
        speed += f", {answer['tflops_per_gpu']:.0f} TFLOP/s/GPU, MFU {answer['mfu']:.1%} ({answer['mfu_convention']})"
    out.print(f"speed   {speed}")
    out.print("memory  " + "  ".join(f"{part} {value:.3g}" for part, value in memory.items()) + " GiB")
    if answer["estimate"] is not None:
        out.print(f"against {_against_estimate(answer)}")
    for label, key in (("metrics", "folder"), ("saved", "checkpoint"), ("model", "exported")):
        if answer[key]:
            out.print(f"{label:<7} {escape(answer[key])}{_not_the_best(answer) if key == 'exported' else ''}")


def _not_the_best(answer: Answer) -> str:
    """Return the step of the exported model and how to get a better one, if an earlier validation was better."""
    last, best = answer["first_step"] + answer["steps"] - 1, answer["best_step"]
    if best is None or best >= last:
        return ""
    convert = f"meshwright convert {shlex.quote(answer['folder'])} OUT --checkpoint best"
    kept = escape(convert) if answer["best_checkpoint"] else f"step {best}, not kept (checkpoint.keep_best=false)"
    return f" (step {last}; best: {kept})"


def _print_validation(answer: Answer) -> None:
    """Print the last and the best validation."""
    if not answer["validation"]:
        return
    out, last = console(), answer["validation"][-1]
    out.print(f"val     {_validated(last)} over {last['tokens']:,} tokens of {_samples(last['samples'])}")
    best = next((one for one in reversed(answer["validation"]) if one["step"] == answer["best_step"]), None)
    if best is not None:
        kept = f", kept in {escape(answer['best_checkpoint'])}" if answer["best_checkpoint"] else ""
        out.print(f"best    {_validated(best)}{kept}")


def _samples(count: int) -> str:
    return f"{count:,} sample{'s' * (count != 1)}"


def _validated(one: Answer) -> str:
    shown = f", perplexity {one['perplexity']:.4g}" if one["perplexity"] is not None else ""
    return f"loss {one['loss']:.4f}{shown} at step {one['step']}"


def tokenize(answer: Answer, found: Any) -> None:
    """Print what was tokenized."""
    out = console()
    out.print(f"[bold]{escape(answer['folder'])}[/]  {answer['tokens']:,} tokens of {answer['documents']:,} documents")
    rate = answer["tokens"] / max(answer["seconds"], 1e-9)
    out.print(f"{answer['shards']} shards of {answer['dtype']}, {answer['seconds']:.1f} s, {rate:,.0f} tokens/s")
    if answer["skipped"] or answer["empty"]:
        out.print(f"skipped: {answer['skipped']} bad lines, {answer['empty']} documents without text")
    for line in answer["skipped_lines"]:
        out.print(f"  {escape(line)}")


def generate(answer: Answer, found: Any) -> None:
    """Print the generated text and nothing else, so that it can be piped."""
    console().print(answer["text"], markup=False)


def evaluate(answer: Answer, found: Any) -> None:
    """Print the perplexity."""
    measured = f"loss {answer['loss']:.4f}"
    if answer["perplexity"] is not None:
        measured = f"perplexity {answer['perplexity']:.4g} ({measured})"
    part = f" ({answer['part']})" if answer["part"] else ""
    console().print(
        f"{measured} over {answer['tokens']:,} tokens of {_samples(answer['samples'])} of "
        f"{escape(answer['dataset'])}{escape(part)}"
    )
    if answer["seq_length"]:
        console().print(f"samples of at most {answer['seq_length']:,} tokens (data.seq_length)")
    available = answer["available"] or 0
    if available > answer["samples"]:
        console().print(f"the dataset has {_samples(available)}; --samples {available} uses all")


def convert(answer: Answer, found: Any) -> None:
    """Print what was written."""
    gib = answer["bytes"] / 1024**3
    console().print(f"{escape(str(answer['folder']))}  {answer['files']} files, {gib:.3g} GiB, {answer['dtype']}")


def _against_estimate(answer: Answer) -> str:
    """Return measured over estimated: above 1 the run was slower, or took more memory."""
    estimate = answer["estimate"]
    total = estimate["memory_gib"]["total"] - estimate["memory_gib"]["overhead"]
    return (
        f"step {answer['step_s'] / estimate['step_s']:.2f} × the estimate ({estimate['step_s']:.3g} s), "
        f"peak memory {answer['memory_gib']['peak'] / total:.2f} × the estimate ({total:.3g} GiB)"
    )


bench = train

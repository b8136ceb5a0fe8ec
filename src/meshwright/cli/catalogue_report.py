"""Lists of recipes, models, GPUs and rules, and explanations, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import MARKS, Answer, titled


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
        _models_that_fit(answer, {one.model.name for one in found if one.fits_without_offload})
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


def _offload(plan: Answer, fits_without: bool) -> str:
    """Return what a plan moves to host memory: because nothing else fits, or because it is faster."""
    if plan["offload"] == "none":
        return ""
    why = "faster; fits without" if fits_without else "needed"
    return f"{plan['offload']}, host {plan['host_gib']:.0f} GiB ({why})"


def _models_that_fit(answer: Answer, without: set[str]) -> None:
    """Print the models that fit with memory and speed, and how many do not; `without`: also without offload."""
    fitting = [m for m in answer["models"] if m["plan"]["fits"]]
    rows = [
        (
            m["name"],
            f"{m['parameters']['total'] / 1e9:.3f}",
            f"{m['plan']['total_gib']:.1f}",
            f"{m['plan']['tokens_per_s']:,.0f}",
            f"{m['plan']['seq_length']:,}",
            m["plan"]["recipe"],
            _offload(m["plan"], m["name"] in without),
        )
        for m in fitting
    ]
    offloads = any(row[-1] for row in rows)
    titles = ("model", "total B", "GiB per GPU", "tokens/s", "sequence", "recipe", "offload")
    table([row if offloads else row[:-1] for row in rows], *(titles if offloads else titles[:-1]))
    out, rest = console(), len(answer["models"]) - len(fitting)
    fit = f"{len(fitting)} model{' fits' if len(fitting) == 1 else 's fit'}"
    none = f"{rest} do{'es' * (rest == 1)} not or ha{'s' if rest == 1 else 've'} no recipe"
    out.print(f"[dim]{fit}, {none}; --json has all, with the reason[/]")
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
    if not answer["rules"]:
        out.print("no rule matches; meshwright rules lists all, meshwright explain WORDS searches fields and terms too")
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
            out.print("    fix      " + _fix_of_rule(r["fix"]))
        for raised in r["messages"] if kind == "rule" else ():
            out.print(f"    message  {escape(raised['text'])}  [dim]{escape(raised['source'])}[/]")


MOST_FIXES = 5  # that are listed one by one


def _fix_of_rule(fixes: Sequence[Sequence[str]]) -> str:
    """Return the keys that resolve a rule: each set of them, or all of them if there are many sets."""
    if len(fixes) <= MOST_FIXES:
        return " or ".join(" + ".join(fix) for fix in fixes)
    keys = dict.fromkeys(key for fix in fixes for key in fix)
    return f"one or several of {', '.join(keys)}; check and recommend name the change that resolves it in your case"


def _print_field(out: Any, answer: Answer) -> None:
    field = answer["field"]
    out.print(f"[bold]{field['key']}[/]  {escape(field['meaning'])}  [dim]({field['kind']})[/]")
    shown = answer["meaning"] and answer["kind"] in ("field", "value")
    titled(out, "Meaning", [escape(answer["meaning"])] if shown else [])
    titled(out, "Default", [escape(str(field["default"])) or "none"])
    titled(out, "Choices", [", ".join(map(str, field["choices"]))] if field["choices"] else [])
    titled(out, "Also", [", ".join(field["also_understood"])] if field["also_understood"] else [])


def _print_match(out: Any, place: int, one: Answer) -> None:
    """Print what an error message may mean, with the framework's own wording and the fixes."""
    where = escape(one["source"]) if one["source"] else "symptom of the rule"
    out.print(f"{place}. [bold]{escape(one['name'])}[/] [dim]{one['kind']}; {one['score']:.0%} of the message[/]")
    out.print(f"    message  {escape(one['message'])}  [dim]{where}[/]\n    cause    {escape(one['meaning'])}")
    if one["fix"]:
        out.print("    fix      " + "\n             ".join(map(escape, one["fix"])))

"""Responses as a few lines for an agent; the JSON object has the rest. A text has the name of its verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.api.summary import layout_summary
from meshwright.display import amount, duration, gpu_hours, plural, short_number

Answer = dict[str, Any]
SHOWN = 8  # rows of a list
SHOWN_CHARACTERS = 100  # of the arguments of a next call


def text_for(verb: str) -> Callable[[Answer], str]:
    """Return the function that writes a verb's response."""
    found: Callable[[Answer], str] = globals()["import_file" if verb == "import" else verb]  # a keyword of Python
    return found


def recommend(answer: Answer) -> str:
    """Return one plan: recipe, layout, memory, speed, changes, findings and commands."""
    recipe, question = answer["recipe"], answer["question"]
    origin = f" ({recipe['match']}; made for {recipe['made_for']})" if "match" in recipe else " (exactly this layout)"
    where = f"{question['model']}, {question['goal']}, on {question['gpus']} with {question['engine']}"
    return _lines(
        f"{recipe['name']}{origin}: {where}, {question['seq_length']:,} tokens × "
        f"{answer['contract']['global_batch_size']:,} per step",
        *(f"assumed: {one['message']}" for one in question["assumed"]),
        f"layout: {layout_summary(answer['layout'], answer['question']['engine'])}",
        *figures(answer["estimate"]),
        *_budget(answer.get("budget")),
        _smallest(answer),
        *_repair(answer),
        *_published(answer.get("published")),
        *_some("changed", [f"{c['field']} {c['from']} → {c['to']}: {c['why']}" for c in answer["changes"]]),
        *_some("why", [f"{r['field']} {r['value']}: {r['why']}" for r in answer.get("reasons", [])], 20),
        *_findings(answer["findings"]),
        *_some("option", [_option(o) for o in answer.get("options", [])]),
        *_some(
            "suggestion",
            [" ".join([f"{o['title']}:", *o["overrides"], f"({o['why']})"]) for o in answer.get("suggestions", [])],
        ),
        *(f"run with {name}: {command}" for name, command in answer["commands"].items()),
    )


def _option(option: Answer) -> str:
    """Return an option that makes a training fit: what it is and costs, and its command."""
    return (
        f"{option['title']} ({option['kind']}): {option['total_gib']:.1f} GiB, {option['step_s']:.3g} s per step, "
        f"{option['cost']}; {option['command']}"
    )


def _repair(answer: Answer) -> list[str]:
    """Return the overrides that contradict, and the one change that removes all errors."""
    lines = []
    if found := answer.get("contradiction"):
        lines.append(f"cannot be combined: {' and '.join(found['overrides'])}: {found['reason']}")
    if repair := answer.get("repair"):
        kind = " (a contract change)" if repair["contract"] else ""
        lines.append(f"repair of all of {', '.join(repair['removes'])}{kind}: {' '.join(repair['overrides'])}")
    return lines


def _published(found: Answer | None) -> list[str]:
    """Return the recipe's own layout with its cost, if the plan has another one."""
    if found is None or found["kept"]:
        return []
    if not found["overrides"]:
        return [f"published layout: {found['why']}"]
    cost = f"{found['step_s']:.3g} s per step, {found['total_gib']:.1f} GiB per GPU"
    return [f"published layout: {cost}: {found['why']}; to plan with it: {' '.join(found['overrides'])}"]


def figures(estimate: Answer) -> list[str]:
    """Return memory against capacity, and speed with its MFU convention."""
    verdict = estimate["fit"] if estimate["fits"] else "does NOT fit or cannot be built"
    band = estimate["band"]
    if estimate["step_s"] is None:
        return [f"{verdict}: no figures, see the findings"]
    mfu = f"MFU {estimate['mfu']:.1%} ({estimate['mfu_convention']})"
    return [
        f"{verdict}: {_memory(estimate)}",
        f"speed: {estimate['step_s']:.3g} s per step ({band['step_low_s']:.3g} to {band['step_high_s']:.3g}), "
        f"{estimate['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {mfu}",
    ]


def _memory(estimate: Answer) -> str:
    memory = estimate["memory_gib"]
    used = {name: memory[name] for name in memory if name not in ("total", "capacity") and memory[name] >= 0.05}
    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in used.items())
    within = f"{estimate['band']['memory_low_gib']:.1f} to {estimate['band']['memory_high_gib']:.1f}"
    host = f"; host memory per GPU {estimate['host_gib']:.1f} GiB" if "host_gib" in estimate else ""
    return f"{memory['total']:.1f} of {memory['capacity']:.1f} GiB per GPU ({within}): {parts}{host}"


def _budget(budget: Answer | None) -> list[str]:
    """Return days, GPU-hours and cost of a token budget."""
    if budget is None:
        return []
    days, unit = budget["days_band"], f" {budget['currency']}" if budget["currency"] else ""
    lines = [
        f"budget: {short_number(budget['tokens'])} tokens in {plural(budget['steps'], 'step')}: "
        f"{duration(budget['days'])} ({duration(days['low'])} to {duration(days['high'])}), "
        f"{gpu_hours(budget['gpu_hours'])} GPU-hours"
    ]
    if budget["cost"] is not None:
        cost = budget["cost_band"]
        lines.append(f"cost: {amount(budget['cost'])}{unit} ({amount(cost['low'])} to {amount(cost['high'])})")
    return [*lines, *budget["notes"]]


def _smallest(answer: Answer) -> str:
    if "smallest_that_fits" not in answer:
        return ""
    count = answer["smallest_that_fits"]
    if not count:
        return "no count of these GPUs fits"
    plain = answer["smallest_without_offload"]
    without = "" if plain == answer["smallest_cluster"] else f"; without offload: {plain or 'none'}"
    return f"smallest that fits: {answer['smallest_cluster']} ({count} GPUs){without}"


def plan(answer: Answer) -> str:
    """Return ranked plans, what was dropped, and the command of the first."""
    rows = [
        f"{place}. {layout_summary(p['layout'], p['question']['engine'])}: {p['estimate']['step_s']:.3g} s per step, "
        f"MFU {p['estimate']['mfu']:.1%}, {p['estimate']['memory_gib']['total']:.1f} of "
        f"{p['estimate']['memory_gib']['capacity']:.1f} GiB per GPU"
        f"{'' if p['estimate']['fits'] else ', does NOT fit'}"
        for place, p in enumerate(answer["plans"], 1)
    ]
    first = answer["plans"][0] if answer["plans"] else None
    commands = [*first["commands"].items()] if first else []
    dropped = [f"{d['count']:,} × {d['reason']}" for d in sorted(answer["dropped"], key=lambda d: -d["count"])]
    return _lines(
        f"{answer['searched']:,} legal layouts scored; the fastest that fit first" if first else "no layout is legal",
        *_some("", rows, 10),
        *_some("dropped", dropped, 1),
        *(f"run the first with {name}: {command}" for name, command in commands[:1]),
        f"recommend has the commands for {', '.join(name for name, _ in commands[1:])}" if commands[1:] else "",
    )


def size(answer: Answer) -> str:
    """Return GPU counts with speed, days and cost."""
    chosen = [
        f"{title.replace('_', ' ')}: " + (f"{one['gpus']:,} GPUs, {one['layout']}" if one else "none fits")
        for title in ("smallest", "most_efficient")
        for one in [answer[title]]
    ]
    if answer["deadline_days"] is not None and answer["tokens"] is not None:
        one = answer["in_time"]
        chosen.append(f"in {answer['deadline_days']:g} days: " + (f"{one['gpus']:,} GPUs" if one else "no count"))
    assumed = [f"assumed: {one['message']}" for one in answer["assumed"]]
    chosen += _against_failures(answer["reliability"])
    return _lines(*chosen, *assumed, *answer["notes"], *_some("", [_size(one) for one in answer["sizes"]], 12))


def _against_failures(needs: Answer | None) -> list[str]:
    if needs is None:
        return []
    replicas = "; replica fault tolerance pays" if needs["replicas_pay"] else ""
    return [
        f"against failures on {needs['gpus']:,} GPUs: checkpoint.save_every={needs['save_every']}, "
        f"{needs['spare_nodes']} spare nodes, goodput {needs['share_with_spares']:.1%}{replicas}"
    ]


def _size(one: Answer) -> str:
    days = "" if one["days"] is None else f", {short_number(one['tokens'])} tokens in {duration(one['days'])}"
    cost = "" if one["cost"] is None else f", cost {one['cost']:,.0f}"
    fits = "" if one["fits"] else ", does NOT fit"
    levers = f" with {' '.join(one['levers'])}" if one["levers"] else ""
    return (
        f"{one['gpus']:,} GPUs: {one['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, MFU {one['mfu']:.1%}, "
        f"{one['total_gib']:.1f} GiB per GPU{levers}{fits}, goodput {one['goodput']['share']:.0%}{days}{cost}"
    )


def check(answer: Answer) -> str:
    """Return the findings for a recipe or file, errors first."""
    estimate = answer["estimate"]
    uncertain = bool(estimate) and "not" in estimate["fit"].split()
    fits = "no blocking findings, but memory that may not suffice" if uncertain else "no blocking findings"
    verdict = fits if answer["ok"] else "it cannot start or does not fit"
    where = f" on {answer['gpus']}" if answer["gpus"] else ""
    unresolved = [f"line {o['line']}: {o['key']} = {o['text']}: {o['reason']}" for o in answer["unresolved"]]
    return _lines(
        f"{answer['file'] or answer['recipe']} ({answer['framework']}{where}): {verdict}",
        _memory_verdict(answer["estimate"]) if answer["estimate"] else "",
        *_findings(answer["findings"]),
        *_repair(answer),
        *_some("unresolved", unresolved),
        *_some("note", answer["notes"]),
    )


def _memory_verdict(estimate: Answer) -> str:
    if estimate["step_s"] is None:
        return "memory: no figures, this layout cannot be built: see the findings"
    return f"memory: {_memory(estimate)}{'' if estimate['fits'] else ', does NOT fit'}"


def compare(answer: Answer) -> str:
    """Return engines or targets by rank with their reasons, and the fields that differ."""
    sides = []
    for one in answer["sides"]:
        speed = figures(one["estimate"]) if one["estimate"] else []
        sides += [f"{one['rank']}. {one['name']}: {'; '.join(one['reasons'])}", *speed]
        cannot = [f"{c['field']}={c['value']} ({c['effect']}): {c['why']}" for c in one["cannot"]]
        sides += _some("does not execute", cannot)
        sides += _some("its config loses", [f"{u['field']}={u['value']}: {u['reason']}" for u in one["lost"]])
    sides += [f"{one['name']}: {_run_figures(one)}" for one in answer.get("runs", [])]
    differences = [f"{d['field']}: {' | '.join(map(str, d['values']))}" for d in answer.get("differences", [])]
    assumed = [f"assumed: {one['message']}" for one in answer["assumed"]]
    return _lines(answer["answer"], *assumed, *sides, *_some("differs", differences, 20))


def _run_figures(run: Answer) -> str:
    shown = {key: value for key, value in run.items() if key not in ("name", "rank") and value is not None}
    return ", ".join(
        f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )


def import_file(answer: Answer) -> str:
    """Return the recipe of a file, what was assumed and what did not survive."""
    dropped = [f"line {one['line']}: {one['key']}={one['value']}" for one in answer["not_imported"]]
    return _lines(
        f"{answer['file']} ({answer['framework']}) as a recipe for {answer['model']} on {answer['gpus']}:",
        answer["text"].rstrip(),
        *(f"assumed: {one['message']}" for one in answer["assumed"]),
        *_some("not imported", dropped),
        *_findings(answer["findings"]),
        *_some("note", answer["notes"]),
    )


def export(answer: Answer) -> str:
    """Return another framework's files and command, and the fields it has no key for."""
    files = [f"--- {name} ---\n{text.rstrip()}" for name, text in answer["files"].items()]
    env = " ".join(f"{name}={value}" for name, value in answer["env"].items())
    unmapped = [f"{u['field']}={u['value']}: {u['reason']}" for u in answer["unmapped"]]
    return _lines(
        f"{answer['framework']} on {answer['gpus']}" + ("" if answer["ok"] else ": the rules reject this layout there"),
        *files,
        f"start: {answer['command']}",
        f"environment: {env}" if env else "",
        *_some("no key for", unmapped),
        *_findings(answer["findings"]),
        *_some("note", answer["notes"]),
    )


def doctor(answer: Answer) -> str:
    """Return the findings for a run, its figures and remedies."""
    ran = answer["recipe"] or answer["model"] or "an unknown run"
    where = f" on {answer['gpus']}" if answer["gpus"] else ""
    figures = [
        f"{f['name']} {_figure(f['measured'])} (estimate {_figure(f['estimate'])}) {f['unit']}".rstrip()
        for f in answer["figures"]
        if f["measured"] is not None and f["estimate"] is not None
    ]
    return _lines(
        f"{answer['kind']} log of {ran}{where}, step {answer['last_step']:,}",
        f"measured: {'; '.join(figures)}" if figures else "",
        f"MFU: {answer['mfu_convention']}"
        if answer["mfu_convention"] and any(one["name"].startswith("MFU") for one in answer["figures"])
        else "",
        *(line for finding in answer["findings"][:SHOWN] for line in _diagnosis(finding)),
        "" if answer["findings"] else f"no findings from {len(answer['looked_for'])} checks",
        *_some("note", answer["notes"]),
    )


def _figure(value: float) -> str:
    return f"{value:,.4g}"


def _diagnosis(finding: Answer) -> list[str]:
    remedies = [f"  try {' '.join(one['try'])}{_effect(one)}" for one in finding["remedies"]]
    return [f"{finding['severity']}: {finding['message']} ({finding['rule']})", *_some("", remedies, 4)]


def _effect(remedy: Answer) -> str:
    effects = [remedy["why"]] if remedy["why"] else []
    if remedy["peak_gib"] is not None:
        effects.append(f"{remedy['peak_gib']:.1f} GiB" + ("" if remedy["fits"] else ", does NOT fit"))
    if remedy["step_ratio"] is not None:
        effects.append(f"step time × {remedy['step_ratio']:.2f}")
    return f" ({'; '.join(effects)})" if effects else ""


def recipes(answer: Answer) -> str:
    """Return recipes, one per line."""
    rows = [
        f"{r['name']}: {r['model']}, {r['goal']}, {r['gpus']}x{r['gpu']}, {r['seq_length']:,} tokens"
        for r in answer["recipes"]
    ]
    return _lines(*(rows or ["no recipe matches; try other words, or benchmark: true"]), _left_out(answer))


def rules(answer: Answer) -> str:
    """Return rules, one per line."""
    rows = [f"{r['id']} ({r['severity']}): {r['symptom']}; {r['cause']}" for r in answer["rules"]]
    return _lines(*rows, _left_out(answer))


def models(answer: Answer) -> str:
    """Return models, one per line."""
    rows = [
        f"{one['name']} ({one['hf_id'] or 'no hub id'}): {one['parameters']['total'] / 1e9:.3g}B parameters, "
        f"{one['parameters']['active'] / 1e9:.3g}B active, {one['architecture']}{_plan_on_gpus(one.get('plan'))}"
        for one in answer["models"]
    ]
    return _lines(*_some("", rows, 15))


def _plan_on_gpus(plan: Answer | None) -> str:
    if plan is None:
        return ""
    if not plan["fits"]:
        return f"; does NOT fit: {plan['reason'] or 'no layout'}"
    return f"; fits with {plan['total_gib']:.1f} GiB per GPU, {plan['tokens_per_s']:,.0f} tokens/s"


def gpus(answer: Answer) -> str:
    """Return GPU types, one per line."""
    rows = [
        f"{one['name']}: {one['memory_gib']:.4g} GiB, bf16 {one['peak_tflops_dense'].get('bf16', 0):,.0f} TFLOP/s, "
        f"{one['hbm_gb_s']:,.0f} GB/s memory, {one['gpus_per_node']} per node"
        for one in answer["gpus"]
    ]
    return _lines(*_some("", rows, 15))


def inspect(answer: Answer) -> str:
    """Return a model: sizes, layers, parameters, FLOPs, cache, splits, trainers, and how it was read."""
    model, counts, flops, cache = (answer[key] for key in ("model", "parameters", "flops_per_token", "cache_bytes"))
    named = {part: count for part, count in counts.items() if count and part not in ("total", "active")}
    sizes = [f"{one['kind']}: {'; '.join([*one['mixer'], *one['ffn']])}" for one in answer["groups"]]
    ours = [f"{one['axis']} {one['largest']}" for one in answer["splits"] if one["engine"] == "meshwright"]
    no = [f"{one['name']}: {one['why']}" for one in answer["trainers"] if not one["trains"]]
    yes = [one["name"] for one in answer["trainers"] if one["trains"]]
    return _lines(
        f"{model['name']} ({model['model_type']}): {counts['total']:,} parameters, {counts['active']:,} active",
        f"{model['layers']} layers of width {model['hidden']:,}, vocabulary {model['vocab']:,}",
        *_some("layers", answer["picture"]),
        *_some("", sizes),
        f"parameters by part: {', '.join(f'{part} {count:,}' for part, count in named.items())}",
        f"FLOPs per token at {flops['seq_length']:,}: {flops['forward']:.4g} forward, {flops['training']:.4g} training",
        f"cache: {cache['per_token']:,} bytes per token, {cache['at_length']:,} at {flops['seq_length']:,} tokens",
        f"largest splits: {', '.join(ours)}",
        f"trained by: {', '.join(yes) or 'none'}",
        *_some("not by", no),
        *_some("assumed", answer["assumed"]),
    )


def explain(answer: Answer) -> str:
    """Return a rule, fields and the rules about them, a finding, a term, or what an error message means."""
    lines, field, kind = [], answer["field"], answer["kind"]
    if kind in ("term", "finding", "section", "key", "error", "option", "capabilities"):
        lines = [f"{answer['about']}: {answer['meaning'] or ''}"]
    if kind == "finding":
        lines.append("send the log to doctor for figures and remedies")
    if field is not None and kind != "rule":
        choices = f", one of {', '.join(map(str, field['choices']))}" if field["choices"] else ""
        lines += [
            f"{field['key']} ({field['kind']}): {field['meaning']}; default {field['default']!r}{choices}",
            f"other keys: {', '.join(field['also_understood'])}" if field["also_understood"] else "",
        ]
    lines += [f"{one['key']}: {one['meaning']}; default {one['default']!r}" for one in answer["fields"]]
    lines += [f"{one['field']}: {one['executes']}; {one['why']}" for one in answer.get("capabilities", ())]
    lines += [f"fix: {text}" for text in answer["fix"]]
    for place, one in enumerate(answer["matches"], start=1):
        lines.append(f"{place}. {one['name']} ({one['kind']}): {one['meaning']}")
        lines += [f"  message: {one['message']} ({one['source'] or 'symptom'})"] if one["message"] else []
        lines += [f"  fix: {text}" for text in one["fix"]]
    shown = [] if kind == "message" else answer["rules"]
    for r in shown[:SHOWN]:
        fix = " or ".join(" + ".join(one) for one in r["fix"])
        lines.append(f"{r['id']} ({r['severity']})\n  symptom: {r['symptom']}\n  cause: {r['cause']}")
        lines.append(f"  fix: change {fix}" if fix else "")
    rest = [r["id"] for r in shown[SHOWN:]]
    return _lines(*lines, f"also checked: {', '.join(rest)}" if rest else "")


def error(details: Answer) -> str:
    """Return what is wrong with a request, and the fixes."""
    where = f"{details['field']}={details['value']}: " if details["value"] is not None else f"{details['field']}: "
    return _lines(
        f"error: {where if details['field'] else ''}{details['message']}",
        f"fix: {' | '.join(details['fix'])}" if details["fix"] else "",
    )


def last_lines(text: str, notes: Sequence[str], calls: Sequence[Answer]) -> str:
    """Return the notes that a text does not have yet and the calls to make next, one per line."""
    lines = [f"note: {one}" for one in notes if one not in text]
    lines += [f"next: {one['tool']} {_short(json.dumps(one['arguments']))} ({one['why']})" for one in calls]
    return "".join(f"\n{line}" for line in lines)


def _short(text: str) -> str:
    """Return the start of a long text; the structured answer has all of it."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _findings(findings: Sequence[Answer]) -> list[str]:
    rows = [
        f"{f['severity']}{' in line ' + str(f['line']) if f.get('line') else ''}: {f['message']} ({f['rule']})"
        + (f"; fix: {' '.join(f['fix'])}" if f["fix"] else "")
        + (f" (changes your {', '.join(f['undoes'])})" if f.get("undoes") else "")
        + (f"; {f['no_fix']}" if f.get("no_fix") else "")
        for f in findings
    ]
    return _some("", rows, 12) if rows else ["findings: none"]


def _some(title: str, rows: Sequence[str], shown: int = SHOWN) -> list[str]:
    more = [f"and {len(rows) - shown} more"] if len(rows) > shown else []
    return [f"{title}: {row}" if title else row for row in [*rows[:shown], *more]]


def _left_out(answer: Answer) -> str:
    return f"and {answer['left_out']} more; raise limit to see them" if "left_out" in answer else ""


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


estimate = recommend

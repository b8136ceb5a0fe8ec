"""How days, GPU-hours and cost are written on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import Answer, assumed_lines, seconds, titled
from meshwright.display import amount, duration, gpu_hours, plural, short_number, two_digits

MISSING = object()  # no budget was requested
COUNTED = "data.dataset=FILE counts those of a file or folder, --tokens gives their number of tokens"
LENGTHS = "train.epochs=N with data.dataset=FILE, train.steps=N or --tokens"
LEAST_SHOWN = 0.001
AT_END = "only at the end"
SHORT_HOURS = 1  # a share of a shorter run, and its failures, say nothing about training
EVERY_ROW = 24  # sizes up to which all are listed; JSON always has all
MOST_LISTED = 4096  # GPUs; few people choose among more
TIMES_OWN = 4  # the GPUs that the user has: larger clusters are another question


def _ends(show: Callable[[float], str], value: float, ends: Answer) -> str:
    """Return the range of a value in parentheses; nothing if its ends read as the value itself."""
    low, high = show(ends["low"]), show(ends["high"])
    return "" if low == high == show(value) else f" ({low} to {high})"


def budget_lines(answer: Answer, gpus: int) -> list[str]:
    """Return time, GPU-hours and cost of a token budget, each with its range, or why there are no figures."""
    budget = answer.get("budget", MISSING)
    if budget is MISSING:
        return []
    if budget is None and answer["estimate"]["fits"] and answer["contract"]["epochs"]:
        return [f"no figures: the samples of {escape(answer['contract']['dataset'])} are not known here; {COUNTED}"]
    if budget is None and answer["estimate"]["fits"] and answer["contract"]["steps"] is None:
        return [f"no figures: nothing says how long it trains; {LENGTHS}"]
    if budget is None and answer["estimate"]["fits"]:
        return ["no figures: failures come before the first checkpoint; add a smaller checkpoint.save_every"]
    if budget is None:
        return ["no figures: this plan does not fit"]
    days, hours = budget["days_band"], budget["gpu_hours_band"]
    source = "" if budget["tokens_from"] == "requested" else f" ({escape(budget['tokens_from'])})"
    where, within = f"on {gpus:,} GPU{'s' if gpus != 1 else ''}", budget["tokens_band"]
    if within is not None:
        lines = [
            f"{short_number(budget['tokens'])} tokens ({short_number(within['low'])} to "
            f"{short_number(within['high'])}) in "
            f"{plural(budget['steps'], 'step')} are what {duration(budget['days'])} train {where}",
            f"{gpu_hours(budget['gpu_hours'])} GPU-hours",
        ]
    else:
        lines = [
            f"{short_number(budget['tokens'])} tokens{source} in {plural(budget['steps'], 'step')}: "
            f"{duration(budget['days'])}{_ends(duration, budget['days'], days)} {where}",
            f"{gpu_hours(budget['gpu_hours'])} GPU-hours{_ends(gpu_hours, budget['gpu_hours'], hours)}",
        ]
    if budget["cost"] is not None:
        unit, cost = f" {budget['currency']}" if budget["currency"] else "", budget["cost_band"]
        lines[-1] += f" at {budget['price']:g}{unit} per GPU-hour: cost {amount(budget['cost'])}{unit}"
        lines[-1] += _ends(amount, budget["cost"], cost) if within is None else ""
    lines.append(f"[dim]{_goodput(budget)}[/]")
    return [*lines, *(f"[yellow]{escape(note)}[/]" for note in budget["notes"])]


def _goodput(budget: Answer) -> str:
    """Return the time that is not training: of a run of minutes, only that of the checkpoint at its end."""
    good, steps = budget["goodput"], budget["steps"]
    saved = _saved(good, steps)
    if budget["days"] * 24 < SHORT_HOURS and saved.startswith(AT_END):
        return f"{duration(budget['days'] * (1 - good['share']))} of it for the checkpoint at the end"
    failures = f"{two_digits(good['failures_per_day'])} failures per day and a checkpoint {saved} are included"
    return f"goodput {good['share']:.1%}{_spare_condition(good)}: {failures}; {failures_from(good)}"


REPLACED = "if a failed node is replaced at once"


def _spare_condition(good: Answer) -> str:
    """Return what the goodput of several nodes assumes about a failed one, and what it is without a spare node."""
    without = good["share_without_spares"]
    if without is None:
        return ""
    return f" {REPLACED}, {without:.1%} if it is missed for {good['repair_hours']:g} hours (no spare node)"


def failures_from(good: Answer) -> str:
    """Return the failure rate and where it is from."""
    each = f"a GPU fails every {_rounded(good['mtbf_hours']):,.0f} hours"
    requested = good["mtbf_from"] == "requested"
    return f"{each}, as requested" if requested else f"{each} ({good['mtbf_from']}; --mtbf-hours sets it)"


def _saved(good: Answer, steps: int) -> str:
    """Return when a run writes checkpoints: in time and steps, or only at its end."""
    every = good["save_every"]
    if every and every < steps:
        blocked = f"blocks training for {seconds(good['blocked_s'])} s"
        if good["storage_gb_s"] is None:
            blocked = f"each {blocked}; storage_gb_s in a cluster file sets the speed"
        else:
            written = f"is written in {seconds(good['save_s'])} s at storage_gb_s={good['storage_gb_s']:g}"
            blocked = f"each {written} and {blocked}"
        return f"every {duration(good['save_interval_s'] / 86400)} ({plural(every, 'step')}; {blocked})"
    longer = f" (checkpoint.save_every={every} is not below its {plural(steps, 'step')})" if every else ""
    return f"{AT_END}{longer}"


def plan_budget_titles(plans: Sequence[Answer]) -> tuple[str, ...]:
    """Return the titles of the columns for days, GPU-hours and cost of ranked plans; empty without a budget."""
    found = next((p["budget"] for p in plans if p.get("budget")), None)
    if found is None:
        return ()
    unit = f" {found['currency']}" if found["currency"] else ""
    return ("time", "GPU-hours", *(() if found["cost"] is None else (f"cost{unit}",)))


def plan_budget(plan: Answer) -> tuple[str, ...]:
    """Return days, GPU-hours and cost of one of several plans; empty without a budget."""
    budget = plan.get("budget")
    if not budget:
        return ()
    cost = () if budget["cost"] is None else (amount(budget["cost"]),)
    return (duration(budget["days"]), gpu_hours(budget["gpu_hours"]), *cost)


def print_sizes(answer: Answer) -> None:
    """Print GPU counts as a table, and which were tried."""
    out, unit = console(), f" {answer['currency']}" if answer["currency"] else ""
    titled(out, "Assumed", assumed_lines(answer["assumed"]))
    headers = (
        f"GPUs ({answer['gpu']})" if answer["compared"] else "GPUs",
        "nodes",
        "layout",
        "GiB",
        "s/step",
        "tokens/s",
        "per GPU",
        "MFU",
        "goodput",
        "time" if answer["tokens"] is not None else "tokens",
        "GPU-hours",
        "cost" + unit,
    )
    timed = answer["tokens"] is not None or answer["deadline_days"] is not None
    columns = len(headers) - (answer["price"] is None) - 2 * (not timed)
    table([_size_row(s, answer["tokens"] is None)[:columns] for s in _shown(answer)], *headers[:columns])
    if answer["compared"]:
        others = ", ".join(one["gpu"] for one in answer["compared"][1:])
        out.print(f"[dim]the rows are of {answer['gpu']}; put another first in --gpu for its rows ({others})[/]")
    titled(out, "yours", [f" {line}" for line in _own_lines(answer, unit)])
    for title in ("smallest", "most_efficient"):
        chosen = answer[title]
        each = [(one["gpu"], one.get(title), one["currency"]) for one in answer["compared"] if title in one]
        chosen_type = f"{answer['gpu']}: " if answer["compared"] else ""
        lines = [f"{gpu}: {_chosen_line(one, f' {paid}' if paid else '')}" for gpu, one, paid in each]
        titled(
            out, title.replace("_", " "), [f" {line}" for line in lines or [chosen_type + _chosen_line(chosen, unit)]]
        )
    if answer["deadline_days"] is not None and answer["tokens"] is not None:
        chosen = answer["in_time"]
        text = f"{_gpus(chosen['gpus'])}: {chosen['layout']}{_band(chosen, unit)}" if chosen else _too_late(answer)
        cheapest = _cheapest_in_time(answer)
        less = [f" cheapest: {_chosen_line(cheapest, unit)}"] if cheapest is not None else []
        titled(out, f"in {answer['deadline_days']:g} days", [" " + text, *less])
    _print_compared(answer)
    if answer["storage"] is not None:
        titled(out, "storage", [" " + line for line in _storage_lines(answer)])
    if answer["reliability"] is not None:
        size = next(s for s in answer["sizes"] if s["gpus"] == answer["reliability"]["gpus"])
        titled(
            out, "failures", [" " + line for line in _reliability_lines(answer["reliability"], size, answer["node"])]
        )
    for note in answer["notes"]:
        out.print(f"[yellow]! {escape(note)}[/]")
    if not timed:
        out.print("[dim]--tokens 1T adds days, and --price 2.50 (of one GPU for one hour) the cost[/]")
    elif answer["price"] is None and not any(one["price"] is not None for one in answer["compared"]):
        out.print("[dim]--price 2.50 (of one GPU for one hour) adds the cost[/]")
    out.print(f"[dim]{_tried(answer)}[/]")


def _own_lines(answer: Answer, unit: str) -> list[str]:
    """Return a line per count that the user named, with the fastest and the cheapest marked."""
    if not answer["compared"]:
        own = next((s for s in answer["sizes"] if s["gpus"] == answer["own"]), None)
        return [_own_line(answer, answer["own"], own, unit)] if answer["own"] else []
    lines = []
    for one in answer["compared"]:
        if one["own"]:
            line = _own_line(answer, one["own"], one["yours"], f" {one['currency']}" if one["currency"] else "")
            lines.append(f"{one['gpu']}: {line}" + "".join(f" [green]({name})[/]" for name in one["best"]))
    return lines


def _own_line(answer: Answer, count: int, own: Answer | None, unit: str) -> str:
    """Return the user's count with its layout, time and cost; without a budget, its speed."""
    if own is None:
        more = count > max(answer["tried"])
        return f"{_gpus(count)}: {'more than --max-gpus' if more else 'no layout divides them'}"
    speed = "" if own["days"] is not None or not own["fits"] else f"; {own['tokens_per_s']:,.0f} tokens/s"
    return _chosen_line(own, unit) + speed


def _chosen_line(chosen: Answer | None, unit: str) -> str:
    """Return a count with its layout, time and cost."""
    if chosen is None:
        return "none fits"
    over = "" if chosen["fits"] else " (does not fit)"
    return f"{_gpus(chosen['gpus'])}{over}: {chosen['layout']}{_band(chosen, unit)}"


def _cheapest_in_time(answer: Answer) -> Answer | None:
    """Return the count that meets the deadline in the fewest GPU-hours; None if it is the smallest that meets it."""
    timed = [one for one in answer["sizes"] if one["fits"] and one["days"] is not None]
    in_time = [one for one in timed if one["days"] <= answer["deadline_days"]]
    found: Answer | None = min(in_time, key=lambda one: one["gpu_hours"], default=None)
    return None if found is None or found["gpus"] == answer["in_time"]["gpus"] else found


def _too_late(answer: Answer) -> str:
    """Return the count that comes closest to a deadline."""
    timed = [one for one in answer["sizes"] if one["fits"] and one["days"] is not None]
    if not timed:
        return "no count fits"
    soonest = min(timed, key=lambda one: one["days"])
    kind = f" of {answer['gpu']}" if answer["compared"] else ""
    time = duration(soonest["days"], answer["deadline_days"])
    return f"no count{kind}; the soonest is {time} with {soonest['gpus']:,} GPUs"


def _print_compared(answer: Answer) -> None:
    """Print the best counts of several GPU types; with a deadline, those that meet it."""
    compared, rows, tokens = answer["compared"], [], answer["tokens"]
    if not compared:
        return
    timed = answer["deadline_days"] is not None and tokens is not None
    for one in compared:
        best = one["in_time"] if timed else one["cheapest"] or one["most_efficient"]
        soonest, best, late = one["soonest"], best or {}, ""
        if timed and soonest:
            late = f"none; {duration(soonest['days'], answer['deadline_days'])} with {soonest['gpus']:,}"
        unit = f" {one['currency']}" if one["currency"] else ""
        rows.append(
            (
                one["gpu"],
                "none fits" if one["smallest"] is None else f"{one['smallest']['gpus']:,}",
                f"{best['gpus']:,}" if best else late,
                f"{best['tokens_per_s_per_gpu']:,.0f}" if best else "",
                _spent(best, tokens is None),
                f"{one['price']:g}{unit}" if one["price"] is not None else "",
                f"{amount(best['cost'])}{unit}" if best.get("cost") is not None else "",
            )
        )
    priced = [bool(one["cheapest"]) for one in compared]
    chosen = "in time" if timed else "cheapest" if all(priced) else "best" if any(priced) else "most efficient"
    taken = "time" if tokens is not None or answer["deadline_days"] is None else "tokens"
    table(rows, "GPU type", "smallest", chosen, "tokens/s per GPU", taken, "price", "cost")


def _spent(best: Answer, within: bool) -> str:
    """Return the days of a size, or the tokens of the days that were given."""
    if best.get("days") is None:
        return ""
    return short_number(best["tokens"]) if within else duration(best["days"])


def _storage_lines(answer: Answer) -> list[str]:
    """Return the size of checkpoints, what is kept of them, and how long one takes to write."""
    found = answer["storage"]
    lines = [
        f"{_gib(found['checkpoint_gib'])} per checkpoint, {found['kept']} kept: {_gib(found['checkpoints_gib'])} with "
        f"the one being written (checkpoint.keep); exported model {_gib(found['model_gib'])}"
    ]
    asked = answer["reliability"]["gpus"] if answer["reliability"] is not None else None
    chosen = next((one for one in answer["sizes"] if one["gpus"] == asked), answer["most_efficient"])
    if chosen:
        of = f" of {answer['gpu']}" if answer["compared"] else ""
        speed = _save_speed(found, chosen["gpus"])
        lines.append(
            f"a checkpoint takes {seconds(chosen['goodput']['save_s'])} s on {_gpus(chosen['gpus'])}{of} at {speed}"
        )
    return lines


def _save_speed(found: Answer, gpus: int) -> str:
    """Return the assumed speed of a checkpoint: that of every GPU, or of the storage if that is less."""
    each, total = found["save_gb_s_per_gpu"], found["save_gb_s_total"]
    if not found["save_gb_s_assumed"] and total < each * gpus:
        return f"{total:g} GB/s in all (storage_gb_s of the cluster file)"
    speed = f"{each:g} GB/s per GPU" if each * gpus <= total else f"{total:,.0f} GB/s in all"
    return f"{speed} (assumed{'; storage_gb_s in a cluster file sets all' if found['save_gb_s_assumed'] else ''})"


def _saves(found: Answer, steps: int | None) -> str:
    """Return how often a run saves, in time and steps; only at the end if that is not sooner."""
    every = found["save_every"]
    if not every or (steps and every >= steps):
        return AT_END
    return f"every {duration(found['save_interval_s'] / 86400)} (checkpoint.save_every={every})"


def _recipe_saves(needs: Answer, good: Answer, steps: int | None) -> list[str]:
    """Return how often the recipe saves, which the days and the goodput of the table assume, and why it is kept."""
    now = _saves(good, steps)
    if now == _saves(needs, steps):
        return []
    gain = needs["share"] - good["share"]
    gained = f"gains {gain:.1%}" if gain >= LEAST_SHOWN else f"gains less than {LEAST_SHOWN:.1%}"
    blocked = f"each save blocks training for {seconds(good['blocked_s'])} s"
    return [
        f"the recipe saves {now}, which recommend and the table assume: goodput {good['share']:.1%}; {blocked}",
        f"checkpoint.save_every={needs['save_every']} {gained} of the time",
    ]


def _reliability_lines(needs: Answer, size: Answer, node: int) -> list[str]:
    """Return the checkpoint interval, the spare nodes and whether replicas should fail alone."""
    good, steps = size["goodput"], size["steps"]
    best = _saves(needs, steps)
    count = needs["failures_per_day"]
    often = f"{two_digits(count)} failures per day" if count >= 1 else f"a failure every {duration(1 / count)}"
    restart = f"each costs {duration(needs['restart_s'] / 86400)} until training goes on"
    spares, repaired = needs["spare_nodes"], f"a failed node is {needs['repair_hours']:g} hours in repair, assumed"
    lines = [
        f"{_gpus(needs['gpus'])}: {often}, {restart}",
        f"goodput: {failures_from(good)}",
        f"a checkpoint {best} is best: goodput {needs['share']:.1%} {REPLACED}",
        *_recipe_saves(needs, good, steps),
    ]
    if needs["gpus"] <= node:  # one node: a spare one or a second replica would double the cost
        return lines
    without = f"{needs['share_without_spares']:.1%}"
    lines.append(
        f"{plural(spares, 'spare node')}: {needs['share_with_spares']:.1%}; none: {without} ({repaired})"
        if spares
        else f"no spare node pays: goodput {without} without ({repaired})"
    )
    pays = needs["replicas_pay_from"]
    start = "it does not pay up to 131,072 GPUs" if pays is None else f"it pays from about {_gpus(pays)}"
    if needs["share_with_replicas"] is None:
        return [*lines, f"replica fault tolerance needs two replicas, and the model takes all of these GPUs; {start}"]
    verdict = "pays" if needs["replicas_pay"] else "does not pay here"
    return [
        *lines,
        f"replica fault tolerance ({needs['replicas']} replicas, only the failed one restarts) {verdict}: "
        f"{needs['share_with_replicas']:.1%}; {start}",
    ]


def _gib(value: float) -> str:
    return (
        f"{value / 1024:,.1f} TiB"
        if value >= 1024
        else f"{value:,.1f} GiB"
        if value >= 0.1
        else f"{value * 1024:,.1f} MiB"
    )


def _band(chosen: Answer, unit: str) -> str:
    if chosen["days"] is None:
        return ""
    days, cost = chosen["days_band"], chosen["cost_band"]
    if days["low"] == days["high"]:  # the days were given
        price = "" if cost is None else f", {amount(chosen['cost'])}{unit}"
        return f"; {short_number(chosen['tokens'])} tokens in {plural(chosen['steps'], 'step')}{price}"
    text = f"; {duration(chosen['days'])}{_ends(duration, chosen['days'], days)}"
    if cost is not None:
        text += f", {amount(chosen['cost'])}{unit}{_ends(amount, chosen['cost'], cost)}"
    return text


def _shown(answer: Answer) -> list[Answer]:
    """Return the sizes to list: all of a few; of many, the smaller ones and those around powers of two."""
    fastest = _fastest(answer)
    sizes: list[Answer] = [
        s for s in answer["sizes"] if fastest is None or s["gpus"] <= max(fastest, answer["own"] or 0)
    ]
    if len(sizes) <= EVERY_ROW:
        return sizes
    named = (answer["smallest"], answer["most_efficient"], answer["in_time"])
    own = answer["own"]
    chosen = {s["gpus"] for s in named if s} | {own}
    few = {s["gpus"] for s in sizes[:10]}
    node = answer["node"]
    round_numbers = {k * node * 2**i for i in range(18) for k in (1, 3)} | {2**i for i in range(18)}
    most = MOST_LISTED if own is None else TIMES_OWN * max(own, answer["smallest"]["gpus"] if answer["smallest"] else 0)
    return [s for s in sizes if s["gpus"] in chosen or (s["gpus"] in few | round_numbers and s["gpus"] <= most)]


def _fastest(answer: Answer) -> int | None:
    """Return the count with the most tokens per second, beyond which GPUs only cost; None if none fits."""
    fitting = [s for s in answer["sizes"] if s["fits"]]
    return max(fitting, key=lambda s: s["tokens_per_s"] * s["goodput"]["share"])["gpus"] if fitting else None


def _rounded(hours: float) -> float:
    """Return hours between failures as they are known, to three digits: 59,999 in a small run are 60,000."""
    return float(f"{hours:.3g}")


def _tried(answer: Answer) -> str:
    tried, node, listed = answer["tried"], answer["node"], len(_shown(answer))
    most, every = tried[-1], min(16 * node, tried[-1])
    text = f"{plural(len(tried), 'count')} tried: " + ("1" if most == 1 else f"1 to {min(node, most)}")
    if most > node:
        text += f", then nodes of {node}: every number up to {every:,} GPUs"
    if most > every:
        text += f", then four per doubling up to {most:,}"
        timed = answer["deadline_days"] is not None and answer["tokens"] is not None
        text += " and whole nodes near the deadline" if timed else ""
    if answer["no_layout"]:
        none = answer["no_layout"]
        text += f"; no layout divides {', '.join(map(str, none[:8]))}" + (" …" if len(none) > 8 else "")
    fastest = _fastest(answer)
    if fastest is not None and fastest < answer["sizes"][-1]["gpus"]:
        text += f"; more than {_gpus(fastest)} are not faster"
    return text + (
        f"; {listed} of {len(answer['sizes'])} listed, --json has all" if listed < len(answer["sizes"]) else ""
    )


def _size_row(s: Answer, within: bool) -> tuple[str, ...]:
    return (
        f"{s['gpus']:,}",
        s["nodes"],
        s["layout"],
        f"{s['total_gib']:.0f}"
        + (f", host {s['host_gib']:.0f}" if s["host_gib"] >= 1 else "")
        + ("" if s["fits"] else " over"),
        seconds(s["step_s"]),
        f"{s['tokens_per_s']:,.0f}",
        f"{s['tokens_per_s_per_gpu']:,.0f}",
        f"{s['mfu']:.0%}",
        f"{s['goodput']['share']:.0%}",
        "" if s["days"] is None else short_number(s["tokens"]) if within else duration(s["days"]),
        "" if s["gpu_hours"] is None else gpu_hours(s["gpu_hours"]),
        "" if s["cost"] is None else amount(s["cost"]),
    )


def _gpus(count: int) -> str:
    return f"{count:,} GPU" if count == 1 else f"{count:,} GPUs"

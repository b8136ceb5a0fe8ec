"""The architecture of a model as text for a terminal."""

from __future__ import annotations

from typing import Any

from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import titled
from meshwright.display import parameter_count

AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
FLOPS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
SHOWN_RUNS = 12
Answer = dict[str, Any]


def inspect(answer: Answer, found: Any) -> None:
    """Print sizes, a picture of the layers, parameters by part, FLOPs, cache, splits and who trains the model."""
    out, model, counts = console(), answer["model"], answer["parameters"]
    where = model["hf_id"] or model["source"]
    out.print(
        f"[bold green]{escape(model['name'])}[/]  {escape(_sizes(answer))}{f'  [dim]{escape(where)}[/]' * bool(where)}"
    )
    out.print("")
    for line in _picture(answer):
        out.print(escape(line))
    out.print("")
    rows = [_group_row(one) for one in answer["groups"]]
    table(rows, "layers", "blocks", "parameters", "active", "forward/token", "sizes")
    out.print("")
    parts = {name: count for name, count in counts.items() if name not in ("total", "active", "mtp") and count}
    table([_part_row(name, count, counts["total"]) for name, count in parts.items()], "part", "parameters", "share")
    out.print("")
    titled(out, "Total", [_total(counts)])
    titled(out, "FLOPs", _flops(answer["flops_per_token"]))
    titled(out, "Cache", _cache(answer["cache_bytes"], answer["flops_per_token"]["seq_length"]))
    titled(out, "Splits", _splits(answer["splits"]))
    titled(out, "Trained", _trainers(answer["trainers"]))
    titled(out, "Read", [_way(answer)])
    titled(out, "Assumed", [f"[yellow]{escape(one)}[/]" for one in answer["assumed"]])


def _of_layer(parameters: int) -> str:
    """Return the parameters of a layer, in millions unless it is tiny."""
    return f"{parameters / 1e6:,.1f} M" if parameters >= 1e5 else parameter_count(parameters, 1)


def _sizes(answer: Answer) -> str:
    model = answer["model"]
    tied = "tied embedding" if model["tied"] else "separate head"
    longest = f", up to {model['max_seq_length']:,} tokens" if model["max_seq_length"] else ""
    vocab = f", vocabulary {model['vocab']:,} ({tied})" if model["vocab"] else ""
    return f"{model['model_type']}, {model['layers']} layers of {model['hidden']:,}{vocab}{longest}"


def _picture(answer: Answer) -> list[str]:
    """Return the model from its input to its output, one line for each run of layers."""
    model, runs = answer["model"], answer["picture"]
    more = [f"… {len(runs) - SHOWN_RUNS} more runs of layers"] if len(runs) > SHOWN_RUNS else []
    ends = (
        (f"embedding {model['vocab']:,} × {model['hidden']:,}", "norm, head") if model["vocab"] else ("input", "output")
    )
    heads = [f"{model['mtp_layers']} × multi-token prediction"] if model["mtp_layers"] else []
    lines = [ends[0], *runs[:SHOWN_RUNS], *more, ends[1], *heads]
    return [f"  {'│ ' if 0 < place < len(lines) - 1 - len(heads) else ''}{line}" for place, line in enumerate(lines)]


def _group_row(one: Answer) -> tuple[str, ...]:
    places = f"{one['first']}" if one["layers"] == 1 else f"{one['first']}–{one['last']}"
    norms = [f"{one['norm_vectors']:g} norm vectors"] if one["norm_vectors"] else []
    sizes = "; ".join([*one["mixer"], *one["ffn"], *norms])
    counts = tuple(_of_layer(one[key]) for key in ("parameters", "active_parameters"))
    return (f"{one['layers']} ({places})", one["kind"], *counts, _scaled(one["forward_flops"], FLOPS), sizes)


def _part_row(name: str, count: int, total: int) -> tuple[str, ...]:
    return (name.replace("_", " "), f"{count:>20,}", f"{count / total:6.1%}")


def _total(counts: Answer) -> str:
    active = f", {counts['active']:,} active ({counts['active'] / counts['total']:.1%})"
    extra = f"; multi-token prediction: {counts['mtp']:,} more" if counts["mtp"] else ""
    return f"{counts['total']:,} parameters{active if counts['active'] < counts['total'] else ''}{extra}"


def _scaled(value: float, units: tuple[tuple[str, float], ...] | tuple[tuple[str, int], ...]) -> str:
    for name, size in units:
        if value >= size:
            return f"{value / size:,.4g} {name}"
    return f"{value:,.0f} {units[-1][0][1:] if units is FLOPS else 'bytes'}"


def _flops(flops: Answer) -> list[str]:
    forward, training = _scaled(flops["forward"], FLOPS), _scaled(flops["training"], FLOPS)
    share = f"{flops['attention_share']:.0%} of it attention and scans"
    return [
        f"{forward} forward, {training} training, per token at {flops['seq_length']:,} tokens; {share}",
        f"[dim]{escape(flops['convention'])}[/]",
    ]


def _cache(cache: Answer, seq: int) -> list[str]:
    if not cache["at_length"]:
        return []
    parts = [f"{_scaled(cache['per_token'], BYTES)} per further token"]
    parts += [f"{_scaled(cache['windows'], BYTES)} in full windows"] if cache["windows"] else []
    parts += [f"{_scaled(cache['state'], BYTES)} of states"] if cache["state"] else []
    return [f"{', '.join(parts)}; {_scaled(cache['at_length'], BYTES)} for {seq:,} tokens in bf16"]


def _splits(splits: list[Answer]) -> list[str]:
    """Return the largest degrees on our engine with what limits them, and where another engine allows others."""
    ours = {one["axis"]: one for one in splits if one["engine"] == splits[0]["engine"]}
    lines = []
    for axis, one in ours.items():
        others = [f"{two['engine']} {two['largest']}" for two in splits
                  if two["axis"] == axis and two["largest"] != one["largest"]]  # fmt: skip
        why = f"  [dim]{escape(one['limit'])}[/]" if one["limit"] else ""
        also = f"  ({', '.join(others)})" if others else ""
        lines.append(f"{AXES[axis]} ({axis}) up to {one['largest']}{also}{why}")
    return lines


def _trainers(trainers: list[Answer]) -> list[str]:
    able = [one["name"] for one in trainers if one["trains"]]
    lines = [f"by {', '.join(able)}" if able else "[yellow]by none of the frameworks here[/]"]
    return [*lines, *(f"[dim]not by {one['name']}: {escape(one['why'])}[/]" for one in trainers if not one["trains"])]


def _way(answer: Answer) -> str:
    if answer["way"] == "table":
        return "by our reader's table of architectures, without torch"
    return f"inspected: built without weights by {escape(answer['inspected_by'])}"

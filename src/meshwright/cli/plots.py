"""Plots of responses as SVG or PNG files. A plot has the name of its verb.

matplotlib (the `plot` extra) draws them; without it an SVG is drawn by `svg_figure`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright import extras
from meshwright.cli.svg_figure import SvgFigure
from meshwright.errors import InputError, OutputError

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
SUFFIXES = (".svg", ".png")
MAX_LABELS = 12


def require(path: str) -> None:
    """Raise InputError for a wrong file type, or for a PNG without matplotlib, before anything runs."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(
            f"a plot is {' or '.join(SUFFIXES)}", field="plot", value=path, fix=(f"--plot {Path(path).stem}.svg",)
        )
    if Path(path).suffix.lower() != ".svg":
        extras.require("plot", "matplotlib")


def figure(columns: int = 1) -> Any:
    """Return an empty figure with axes side by side."""
    if find_spec("matplotlib") is None:
        plain = SvgFigure(columns)
        return plain, plain.axes
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    return drawing, [drawing.add_subplot(1, columns, i + 1) for i in range(columns)]


def save(drawing: Any, path: str) -> None:
    """Write the figure."""
    try:
        drawing.savefig(path, dpi=150)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", field="plot", value=path) from error


def estimate(result: Any, answer: dict[str, Any], path: str) -> None:
    """Plot memory by part and pipeline stage against capacity, and the step by part."""
    drawing, (memory, step) = figure(2)
    stages, capacity = answer["memory_by_stage_gib"], answer["estimate"]["memory_gib"]["capacity"]
    below = [0.0] * len(stages)
    for part in PARTS:
        heights = [stage[part] for stage in stages.values()]
        memory.bar(list(stages), heights, bottom=below, label=part)
        below = [b + h for b, h in zip(below, heights, strict=True)]
    memory.axhline(capacity, linestyle="--", color="black", linewidth=1)
    memory.set(title="memory by stage and part", ylabel="GiB per GPU")
    memory.legend(fontsize="small", ncols=2)
    parts = {name: s for name, s in answer["estimate"]["step_parts_s"].items() if s > 0}
    step.barh(list(parts)[::-1], list(parts.values())[::-1])
    step.set(title=f"step of {answer['estimate']['step_s']:.2f} s by part", xlabel="seconds")
    save(drawing, path)


def inspect(result: Any, answer: dict[str, Any], path: str) -> None:
    """Plot the layers from the first (below) to the last by kind, and the parameters by part."""
    drawing, (layers, parameters) = figure(2)
    kinds = [one["kind"] for one in answer["groups"]]
    below = 0
    for run in answer["runs"]:
        for group in [*run["groups"]] * run["times"]:
            label = kinds[group] if kinds[group] not in layers.get_legend_handles_labels()[1] else None
            layers.bar(
                ["layers"], [1], bottom=[below], color=f"C{group}", edgecolor="white", linewidth=0.3, label=label
            )
            below += 1
    layers.set(title=f"{answer['model']['name']}: {below} layers", ylabel="layer", xlim=(-0.6, 0.6))
    layers.legend(fontsize="small", loc="upper left")
    counts = {k: v for k, v in answer["parameters"].items() if v and k not in ("total", "active", "mtp")}
    parameters.barh(list(counts)[::-1], [v / 1e9 for v in list(counts.values())[::-1]])
    parameters.set(title=f"{answer['parameters']['total'] / 1e9:.3f} B parameters by part", xlabel="billions")
    save(drawing, path)


def size(result: Any, answer: dict[str, Any], path: str) -> None:
    """Plot throughput and MFU against the number of GPUs, for those counts that fit."""
    drawing, (rate, mfu) = figure(2)
    fitting = [s for s in answer["sizes"] if s["fits"]]
    gpus = [s["gpus"] for s in fitting]
    rate.loglog(gpus, [s["tokens_per_s"] for s in fitting], marker="o", base=2)
    rate.set(title="throughput", xlabel="GPUs", ylabel="tokens/s")
    mfu.semilogx(gpus, [100 * s["mfu"] for s in fitting], marker="o", base=2)
    mfu.set(title="model FLOPs utilization", xlabel="GPUs", ylabel="MFU, %", ylim=(0, None))
    save(drawing, path)


def dryrun(result: Any, answer: dict[str, Any], path: str) -> None:
    """Plot memory of the worst rank over a step by part, and its peak next to the estimate."""
    drawing, (step, peak) = figure(2)
    memory, moments = answer["memory_gib"], answer["timeline"]
    heights = [[moment["gib"].get(part, 0.0) for moment in moments] for part in PARTS[:-1]]
    if moments:
        step.stackplot(range(len(moments)), *heights, step="mid")
        starts = [
            place for place, one in enumerate(moments) if not place or moments[place - 1]["phase"] != one["phase"]
        ]
        shown = starts if len(starts) <= MAX_LABELS else starts[:: -(-len(starts) // MAX_LABELS)]
        step.set_xticks(shown, [moments[place]["phase"] for place in shown], rotation=30, ha="right", fontsize="small")
    step.axhline(memory["capacity"] - memory["overhead"], linestyle="--", color="black", linewidth=1)
    step.set(title=f"rank {answer['peak']['rank']} over a step", ylabel="GiB of torch")
    for place, (name, parts) in enumerate((("dry run", memory), ("estimate", answer["estimate_gib"]))):
        below = 0.0
        for color, part in enumerate(PARTS):
            peak.bar([name], [parts[part]], bottom=[below], color=f"C{color}", label=part if not place else None)
            below += parts[part]
    peak.axhline(memory["capacity"], linestyle="--", color="black", linewidth=1)
    peak.set(title="peak by part, and capacity", ylabel="GiB per GPU")
    peak.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    save(drawing, path)


def accuracy(result: Any, answer: dict[str, Any], path: str) -> None:
    """Plot predicted against measured, for step time and memory."""
    points: dict[str, list[tuple[float, float]]] = result.points
    drawing, axes = figure(len(points))
    for (title, pairs), axis in zip(points.items(), axes, strict=True):
        measured, predicted = [p[0] for p in pairs], [p[1] for p in pairs]
        axis.loglog(measured, predicted, ".", markersize=3)
        if pairs:
            ends = (min(*measured, *predicted), max(*measured, *predicted))
            axis.loglog(ends, ends, color="black", linewidth=1)
        axis.set(title=title, xlabel="measured", ylabel="predicted")
    save(drawing, path)


def rehearse(result: Any, answer: dict[str, Any], path: str) -> None:
    """Plot the passes of every pipeline rank over a step, or its collectives, and the step by part."""
    drawing, (time, parts) = figure(2)
    colors = {"F": "C0", "B": "C1", "I": "C2", "W": "C3"}
    for one in answer["passes"]:
        time.barh(
            one["rank"], one["end_s"] - one["start_s"], left=one["start_s"], color=colors[one["kind"]], height=0.8
        )
    if answer["passes"]:
        time.set(title=f"passes of every stage ({answer['schedule']})", xlabel="seconds", ylabel="pipeline rank")
        time.invert_yaxis()
    else:
        spans = result.ranks[0].spans
        axes = sorted({one.axis for one in spans})
        for one in spans:
            time.barh(axes.index(one.axis), one.end_s - one.start_s, left=one.start_s, color=f"C{axes.index(one.axis)}")
        time.set_yticks(range(len(axes)), axes)
        time.set(title="simulated collectives over the rehearsed step", xlabel="seconds")
    shares = {name: seconds for name, seconds in answer["step_parts_s"].items() if seconds > 0}
    parts.barh(list(shares)[::-1], list(shares.values())[::-1])
    parts.set(title=f"step of {answer['step_s']:.2f} s by part", xlabel="seconds")
    save(drawing, path)

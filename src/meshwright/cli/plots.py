"""Pictures of answers, as SVG or PNG files; needs matplotlib (the `plot` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.errors import InputError, OutputError

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
SUFFIXES = (".svg", ".png")


def figure(path: str, columns: int = 1) -> Any:
    """An empty figure with axes side by side; a wrong file type or a missing matplotlib is told at once."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(
            f"a plot is {' or '.join(SUFFIXES)}", field="plot", value=path, fix=(f"--plot {Path(path).stem}.svg",)
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("plots need matplotlib", field="plot", fix=('pip install "meshwright[plot]"',)) from None
    made = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    return made, [made.add_subplot(1, columns, i + 1) for i in range(columns)]


def save(made: Any, path: str) -> None:
    """Writes the figure."""
    try:
        made.savefig(path, dpi=150)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", field="plot", value=path) from error


def estimate(answer: dict[str, Any], path: str) -> None:
    """Memory by part and pipeline stage against capacity, and the step by part."""
    made, (memory, step) = figure(path, 2)
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
    save(made, path)


def sizing(answer: dict[str, Any], path: str) -> None:
    """Throughput and MFU against the number of GPUs, for those counts that fit."""
    made, (rate, mfu) = figure(path, 2)
    fitting = [s for s in answer["sizes"] if s["fits"]]
    gpus = [s["gpus"] for s in fitting]
    rate.loglog(gpus, [s["tokens_per_s"] for s in fitting], marker="o", base=2)
    rate.set(title="throughput", xlabel="GPUs", ylabel="tokens/s")
    mfu.semilogx(gpus, [100 * s["mfu"] for s in fitting], marker="o", base=2)
    mfu.set(title="model FLOPs utilisation", xlabel="GPUs", ylabel="MFU, %", ylim=(0, None))
    save(made, path)


def accuracy(points: dict[str, list[tuple[float, float]]], path: str) -> None:
    """Predicted against measured, for step time and memory."""
    made, axes = figure(path, len(points))
    for (title, pairs), axis in zip(points.items(), axes, strict=True):
        seen, said = [p[0] for p in pairs], [p[1] for p in pairs]
        axis.loglog(seen, said, ".", markersize=3)
        if pairs:
            ends = (min(*seen, *said), max(*seen, *said))
            axis.loglog(ends, ends, color="black", linewidth=1)
        axis.set(title=title, xlabel="measured", ylabel="predicted")
    save(made, path)

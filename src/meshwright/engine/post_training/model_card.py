"""Writes model cards: the model, how it was trained, and the run's metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from meshwright.display import plural
from meshwright.engine.metrics.sinks import METRICS_FILE
from meshwright.hub import base_name
from meshwright.recipes.files import to_text
from meshwright.recipes.types import Recipe

NAME = "README.md"
GOAL_PHRASES = {"pretrain": "pretrained from random weights", "sft": "fine-tuned", "peft": "fine-tuned with adapters"}
MERGED = ", which are merged"


class RunFigures(msgspec.Struct, frozen=True):
    """The metrics of a run."""

    header: dict[str, Any]
    steps: list[dict[str, Any]]  # one per step; the last line of a repeated step
    validation: dict[str, Any] = {}  # the last one


def write_card(
    folder: Path, recipe: Recipe, base: str, run: Path, step: int | None = None, merged: bool = False
) -> Path:
    """Write the model card into the model folder, with figures from the run's metrics.

    `base`: folder or id of the initial weights, empty for random ones; `step`: that of the weights, if not the last
    one; `merged`: adapters are merged into the model.
    """
    path = folder / NAME
    path.write_text(render_card(recipe, base_name(base) if base else "", read_metrics(run, step), date.today(), merged))
    return path


def copy_card(source: Path, folder: Path, merged: bool = False) -> None:
    """Copy the model card of a folder, if it has one, to that of its conversion; `merged` as in `write_card`."""
    path = source / NAME
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    if merged:
        adapters = re.escape(GOAL_PHRASES["peft"])
        text = re.sub(r"^library_name: peft$", "library_name: transformers", text, count=1, flags=re.MULTILINE)
        text = re.sub(rf"^(# .+, {adapters})$", rf"\1{MERGED}", text, count=1, flags=re.MULTILINE)
    (folder / NAME).write_text(text, encoding="utf-8")


def render_card(recipe: Recipe, base: str, figures: RunFigures | None, today: date, merged: bool = False) -> str:
    """Return the model card as Markdown with hub front matter."""
    return "\n".join(
        [
            *_front_matter(recipe, base, merged),
            f"# {recipe.model}, {GOAL_PHRASES[recipe.goal]}{MERGED if merged else ''}",
            "",
            *_origin(recipe, base, today),
            "",
            "## Training data",
            "",
            *_table(_data(recipe)),
            "",
            "## Measured",
            "",
            *(_table(_figures(figures)) if figures is not None and figures.steps else [NOT_MEASURED]),
            "",
            "## Recipe",
            "",
            "```toml",
            to_text(recipe, "toml").rstrip(),
            "```",
            "",
        ]
    )


NOT_MEASURED = "The run's metrics were not found next to the checkpoint."


def read_metrics(run: Path, last: int | None = None) -> RunFigures | None:
    """Return the header and steps of a run's metrics, up to step `last`; the last line of a repeated step is used."""
    path = run / METRICS_FILE
    if not path.is_file():
        return None
    header: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    validation: dict[str, Any] = {}
    for line in path.read_bytes().splitlines():
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:  # a partial line of a killed run
            continue
        if last is not None and record.get("step", 0) > last:
            continue
        if record.get("kind") == "header":
            header = record
        elif record.get("kind") == "step":
            steps[record["step"]] = record
        elif record.get("kind") == "validation":
            validation = record
    return RunFigures(header, [steps[number] for number in sorted(steps)], validation)


def _front_matter(recipe: Recipe, base: str, merged: bool) -> list[str]:
    adapters = recipe.goal == "peft" and not merged
    lines = ["---", f"library_name: {'peft' if adapters else 'transformers'}"]
    if base:
        lines.append(f"base_model: {msgspec.json.encode(base).decode()}")
    sources = list(recipe.data.blend) or [recipe.data.dataset]
    lines += ["datasets:", *(f"- {msgspec.json.encode(source).decode()}" for source in sources)]
    return [*lines, "tags:", "- meshwright", f"- {recipe.goal}", "---", ""]


def _origin(recipe: Recipe, base: str, today: date) -> list[str]:
    start = f"from `{base}`" if base else "from random weights"
    return [f"Trained {start} with the recipe `{recipe.name}` on Meshwright's engine; written on {today.isoformat()}."]


def _data(recipe: Recipe) -> list[tuple[str, object]]:
    data, train = recipe.data, recipe.train
    rows: list[tuple[str, object]] = [("dataset", ", ".join(data.blend) or data.dataset)]
    if data.blend:
        rows.append(("weights", ", ".join(f"{name} {weight:g}" for name, weight in data.blend.items())))
    return [
        *rows,
        ("tokenizer", data.tokenizer or "the model's"),
        ("sequence length", data.seq_length),
        ("global batch size", train.global_batch_size),
        ("tokens in the loss", data.train_on if recipe.goal != "pretrain" else "all"),
        ("packing", "yes, documents isolated" if data.packing else "no"),
    ]


def _figures(figures: RunFigures) -> list[tuple[str, object]]:
    header, steps = figures.header, figures.steps
    first, last = steps[0], steps[-1]
    speeds = sorted(s["tokens_per_s_per_gpu"] for s in steps if s.get("tokens_per_s_per_gpu") is not None)
    rows: list[tuple[str, object]] = [
        ("steps", last["step"]),
        ("loss", f"{_number(first['loss'])} at step {first['step']}, {_number(last['loss'])} at step {last['step']}"),
        ("tokens/s/GPU", f"{speeds[len(speeds) // 2]:,.0f} (median over steps)" if speeds else "–"),
    ]
    if figures.validation:
        done = figures.validation
        over = f"over {done['tokens']:,} tokens of {plural(done['samples'], 'sample')}"
        rows.append(("validation loss", f"{_number(done['loss'])} at step {done['step']}, {over}"))
    if last.get("mfu") is not None:
        rows.append(("MFU", f"{last['mfu']:.1%}"))
    if last.get("memory_gib"):
        rows.append(("memory of rank 0, GiB", ", ".join(f"{k} {v:.3g}" for k, v in last["memory_gib"].items())))
    rows += [(label, header[name]) for name, label in (("world", "ranks"), ("started", "started")) if name in header]
    return [*rows, *((f"{name} version", version) for name, version in header.get("versions", {}).items())]


def _number(value: float | None) -> str:
    return "not a number" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _table(rows: Iterable[tuple[str, object]]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows)]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")

"""The model card: what a folder of weights is, how it was made, and what was measured while it was made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from meshwright.engine.metrics.sinks import METRICS_FILE
from meshwright.recipes.files import to_text
from meshwright.recipes.types import Recipe

NAME = "README.md"
WORDS = {"pretrain": "pretrained from random weights", "sft": "fine-tuned", "peft": "fine-tuned with adapters"}


class Measured(msgspec.Struct, frozen=True):
    """What a run's metrics say."""

    header: dict[str, Any]
    steps: list[dict[str, Any]]  # one for each step, the last word on it


def write_card(folder: Path, recipe: Recipe, base: str, run: Path | None) -> Path:
    """Writes the card beside the weights; figures come from the run's metrics."""
    path = folder / NAME
    path.write_text(card(recipe, base, read_metrics(run) if run is not None else None, date.today()))
    return path


def card(recipe: Recipe, base: str, measured: Measured | None, today: date) -> str:
    """The card as Markdown with the front matter that model hubs read."""
    return "\n".join(
        [
            *_front_matter(recipe, base),
            f"# {recipe.model}, {WORDS[recipe.goal]}",
            "",
            *_origin(recipe, base, today),
            "",
            "## Training data",
            "",
            *_table(_data(recipe)),
            "",
            "## Measured",
            "",
            *(_table(_figures(measured)) if measured is not None and measured.steps else [NOT_MEASURED]),
            "",
            "## Recipe",
            "",
            "```toml",
            to_text(recipe, "toml").rstrip(),
            "```",
            "",
        ]
    )


NOT_MEASURED = "The run's metrics were not beside the checkpoint."


def read_metrics(run: Path) -> Measured | None:
    """The header and the steps of a run's metrics; of a step that was run twice the later line counts."""
    path = run / METRICS_FILE
    if not path.is_file():
        return None
    header: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        try:
            told = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:  # a line that was being written when the run was killed
            continue
        if told.get("kind") == "header":
            header = told
        elif told.get("kind") == "step":
            steps[told["step"]] = told
    return Measured(header, [steps[number] for number in sorted(steps)])


def _front_matter(recipe: Recipe, base: str) -> list[str]:
    adapters = recipe.goal == "peft"
    lines = ["---", f"library_name: {'peft' if adapters else 'transformers'}"]
    if base:
        lines.append(f"base_model: {msgspec.json.encode(base).decode()}")
    sources = list(recipe.data.blend) or [recipe.data.dataset]
    lines += ["datasets:", *(f"- {msgspec.json.encode(source).decode()}" for source in sources)]
    return [*lines, "tags:", "- meshwright", f"- {recipe.goal}", "---", ""]


def _origin(recipe: Recipe, base: str, today: date) -> list[str]:
    start = f"from `{base}`" if base else "from random weights"
    return [
        f"Trained {start} with the recipe `{recipe.name}` on Meshwright's own engine; written on {today.isoformat()}."
    ]


def _data(recipe: Recipe) -> list[tuple[str, object]]:
    data, train = recipe.data, recipe.train
    rows: list[tuple[str, object]] = [("data set", ", ".join(data.blend) or data.dataset)]
    if data.blend:
        rows.append(("weights", ", ".join(f"{name} {weight:g}" for name, weight in data.blend.items())))
    return [
        *rows,
        ("tokenizer", data.tokenizer or "the model's own"),
        ("tokens in a sample", data.seq_length),
        ("samples in a step", train.global_batch_size),
        ("predictions that count", data.train_on if recipe.goal != "pretrain" else "all"),
        ("packing", "yes, documents kept apart" if data.packing else "no"),
    ]


def _figures(measured: Measured) -> list[tuple[str, object]]:
    header, steps = measured.header, measured.steps
    first, last = steps[0], steps[-1]
    speeds = sorted(s["tokens_per_s_per_gpu"] for s in steps if s.get("tokens_per_s_per_gpu") is not None)
    rows: list[tuple[str, object]] = [
        ("steps", last["step"]),
        ("loss", f"{_number(first['loss'])} at step {first['step']}, {_number(last['loss'])} at step {last['step']}"),
        ("tokens per second and GPU", f"{speeds[len(speeds) // 2]:,.0f} (median of the steps)" if speeds else "–"),
    ]
    if last.get("mfu") is not None:
        rows.append(("MFU", f"{last['mfu']:.1%}"))
    if last.get("memory_gib"):
        rows.append(("memory of rank 0, GiB", ", ".join(f"{k} {v:.3g}" for k, v in last["memory_gib"].items())))
    rows += [(said, header[name]) for name, said in (("world", "ranks"), ("started", "started")) if name in header]
    return [*rows, *((f"{name} version", version) for name, version in header.get("versions", {}).items())]


def _number(value: float | None) -> str:
    return "not a number" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _table(rows: Iterable[tuple[str, object]]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows)]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")

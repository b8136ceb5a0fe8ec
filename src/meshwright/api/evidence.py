"""What backs the figures of a plan: the cost model, a dry run of its recipe, and measured runs."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright import clusters, models
from meshwright.api.measure import shipped_measurements
from meshwright.api.plan_responses import PlanResponse
from meshwright.api.responses import Part
from meshwright.dryrun import verification
from meshwright.errors import MeshwrightError
from meshwright.hub import no_downloads
from meshwright.models import ModelSpec

CONTRIBUTED = "contributed"  # folder beside the shipped table, one CSV of `meshwright share` each
NEAREST = 4  # measurements that a plan lists
POINTS = 12  # measurements beside the layouts of a question
USABLE_TIERS = ("A", "B")  # measured and fully described, or with assumed fields; C: recalled or incomplete
Shape = tuple[int, int, int]


class Evidence(Part, frozen=True, kw_only=True):
    """One thing that backs a plan's figures."""

    kind: Literal["estimate", "dry run", "measurement"]
    text: str
    same: bool  # of these GPUs, so it backs this plan itself
    source: str = ""
    reference: str = ""


class Measured(Part, frozen=True, kw_only=True):
    """One measured run of a catalogue model."""

    shape: Shape
    goal: str
    gpu: str
    gpus: int
    framework: str
    seq_length: int
    precision: str
    layout: str
    tokens_per_s_per_gpu: float
    memory_gib: float | None  # peak of the fullest GPU, if published
    source: str
    reference: str


class MeasuredPoint(Part, frozen=True, kw_only=True):
    """A measured run beside the layouts of a question: its speed as seconds per step of that question."""

    words: str
    step_s: float
    total_gib: float | None
    tokens_per_s_per_gpu: float
    same: bool  # on as many GPUs
    source: str
    reference: str


def evidence_for(plan: PlanResponse) -> list[Evidence]:
    """Return what backs a plan, the weakest first: every plan is estimated."""
    return [_estimated(plan), *_dry_run(plan), *_measured(plan)]


def _estimated(plan: PlanResponse) -> Evidence:
    band = plan.estimate.band
    text = (
        f"by the cost model; its errors on published runs of this kind put the step between {band.step_low_s:,.3g} and "
        f"{band.step_high_s:,.3g} s and memory between {band.memory_low_gib:.0f} and {band.memory_high_gib:.0f} GiB"
    )
    return Evidence(kind="estimate", text=text, same=True)


def _dry_run(plan: PlanResponse) -> Iterator[Evidence]:
    """Yield the dry run in the recipe's verification report, unless it is stale or failed."""
    report = verification.current(_reports(), plan.recipe.name)
    check = report.checks.dryrun
    if check is None or check.outcome != "ok" or check.figures is None or report.withdrawn:
        return
    memory, same = check.figures.memory_gib, plan.recipe.match == "exact" and not plan.changes
    subject = "this recipe" if same else f"{plan.recipe.name}, which this plan adapts,"
    text = (
        f"{subject} executed without data on {report.cluster} ({check.date}): {memory['total']:.1f} of "
        f"{memory['capacity']:.1f} GiB on the fullest GPU"
    )
    yield Evidence(kind="dry run", text=text, same=same, source=plan.recipe.name)


@cache
def _reports() -> Mapping[str, verification.VerificationReport]:
    return verification.read()


def _measured(plan: PlanResponse) -> Iterator[Evidence]:
    """Yield measured runs of this model, goal and GPU: the nearest number of GPUs first, then the same precision."""
    place = clusters.cluster(plan.question.gpus)
    shape = _shape(models.find(plan.question.model))
    rows = [
        row for row in measured_runs() if (row.shape, row.goal, row.gpu) == (shape, plan.question.goal, place.gpu.name)
    ]
    precision = plan.contract.precision
    rows.sort(
        key=lambda row: (abs(math.log(row.gpus / place.world)), row.precision != precision, -row.tokens_per_s_per_gpu)
    )
    each = {row.source: row for row in reversed(rows)}  # one of every source, its nearest
    for row in sorted(each.values(), key=rows.index)[:NEAREST]:
        text = (
            f"{row.tokens_per_s_per_gpu:,.0f} tokens/s per GPU with {row.framework} on {row.gpus}x{row.gpu}, "
            f"{row.seq_length:,} tokens, {row.precision}{row.layout and f', {row.layout}'}"
        )
        same = row.gpus == place.world
        yield Evidence(kind="measurement", text=text, same=same, source=row.source, reference=row.reference)


def measured_points(model: str, gpus: str, goal: str, contract: Mapping[str, Any]) -> list[MeasuredPoint]:
    """Return measured runs of a model on a type of GPU in the same precision and sequence length, the nearest first.

    They ran on their own number of GPUs with their own batch: a step here takes its tokens over their speed.
    """
    with suppress(MeshwrightError):
        place, wanted = clusters.cluster(gpus), _shape(models.find(model))
        tokens = contract["seq_length"] * contract["global_batch_size"] / place.world
        kept = [
            row
            for row in measured_runs()
            if (row.shape, row.goal, row.gpu, row.seq_length) == (wanted, goal, place.gpu.name, contract["seq_length"])
            and _number_format(row.precision) == _number_format(contract["precision"])
        ]
        kept.sort(key=lambda row: (abs(math.log(row.gpus / place.world)), -row.tokens_per_s_per_gpu))
        return [
            MeasuredPoint(
                words=f"{row.framework} on {row.gpus}x{row.gpu}{row.layout and f', {row.layout}'}",
                step_s=tokens / row.tokens_per_s_per_gpu, total_gib=row.memory_gib, same=row.gpus == place.world,
                tokens_per_s_per_gpu=row.tokens_per_s_per_gpu, source=row.source, reference=row.reference,
            )
            for row in kept[:POINTS]
        ]  # fmt: skip
    return []  # the user's own model or GPU


def _number_format(precision: str) -> str:
    """Return the number format of a precision: fp8 of fp8_tensor and of FP8-CS."""
    return re.split("[^a-z0-9]", precision.lower())[0]


def _shape(model: ModelSpec) -> Shape:
    """Return what two names of one architecture share, such as Llama 3 8B and Llama 3.1 8B."""
    return model.num_layers, model.hidden, model.params.total


@cache
def measured_runs() -> tuple[Measured, ...]:
    """Return the measured runs of catalogue models: the shipped table, and the files that users contributed."""
    table = Path(shipped_measurements())
    found = [table, *sorted(table.parent.joinpath(CONTRIBUTED).glob("*.csv"))]
    return tuple(row for path in found if path.is_file() for row in _rows(path))


def _rows(path: Path) -> Iterator[Measured]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if row["status"].lower() != "ok" or row["tier"] not in USABLE_TIERS or row.get("flag"):
                continue
            if not (row["n_gpus"].isdecimal() and row["seq_len"].isdecimal()):
                continue
            shape, gpu = _shape_named(row["hf_id_or_dims"]) or _shape_named(row["model"]), _gpu_named(row["gpu"])
            speed = _tokens_per_s(row)
            if shape is None or not gpu or not speed:
                continue
            yield Measured(
                shape=shape, goal=row["mode"], gpu=gpu, gpus=int(row["n_gpus"]), framework=row["framework"],
                seq_length=int(row["seq_len"]), precision=row["precision"], layout=_layout(row),
                tokens_per_s_per_gpu=speed, memory_gib=_memory_gib(row), source=row["source"],
                reference=row["source_url_or_path"].replace("+", "/", 1),  # of owner+repository:path
            )  # fmt: skip


def _tokens_per_s(row: Mapping[str, str]) -> float:
    """Return measured tokens per second and GPU; 0 if the row states neither them nor a step's time."""
    with suppress(ValueError, ZeroDivisionError):
        if row["tokens_per_s_per_gpu"]:
            return float(row["tokens_per_s_per_gpu"])
        return int(row["gbs"]) * int(row["seq_len"]) / float(row["step_time_s"]) / int(row["n_gpus"])
    return 0.0


def _memory_gib(row: Mapping[str, str]) -> float | None:
    """Return the measured peak: reserved by the allocator, else allocated."""
    for name in ("peak_mem_gib_reserved", "peak_mem_gib_allocated"):
        with suppress(ValueError):
            return float(row[name])
    return None


def _layout(row: Mapping[str, str]) -> str:
    degrees = [f"{name} {row[name]}" for name in ("tp", "pp", "cp", "ep") if row[name] not in ("", "1")]
    return " · ".join(degrees)


@cache
def _shape_named(text: str) -> Shape | None:
    if not text or " H" in text:  # dimensions, not a name
        return None
    with suppress(MeshwrightError), no_downloads():
        return _shape(models.find(text))
    return None


@cache
def _gpu_named(text: str) -> str:
    with suppress(MeshwrightError):
        return clusters.gpu(text).name
    return ""

"""The records of metrics.jsonl: one header per run, one record per step."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from meshwright.engine.metrics.meter import Constants


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one step."""

    step: int  # counted from 1
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    step_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    parts_s: dict[str, float]
    memory_gib: dict[str, float] = {}
    remaining_s: float | None = None
    epoch: float | None = None  # passes over the data so far; None if it has no end
    skipped: bool = False  # the optimizer step was skipped
    extra: dict[str, float] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return the line of the metrics file, where values that are not finite become null."""
        return {"kind": "step", **msgspec.structs.asdict(self)}


class ValidationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one validation."""

    step: int  # completed steps
    loss: float  # mean over target tokens
    perplexity: float | None  # None for models that predict no tokens
    tokens: int  # in the loss
    samples: int
    seconds: float
    best: bool  # the lowest loss so far

    def to_dict(self) -> dict[str, Any]:
        """Return the line of the metrics file."""
        return {"kind": "validation", **msgspec.structs.asdict(self)}


class EndRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run ended before its last step: early stopping, or a signal after which it saved a checkpoint."""

    step: int  # completed steps
    why: str
    best_step: int | None = None  # of the checkpoint that is kept for its validation loss

    def to_dict(self) -> dict[str, Any]:
        """Return the line of the metrics file."""
        return {"kind": "end", **msgspec.structs.asdict(self)}


def scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a step under grouped names, for TensorBoard and trackers."""
    values = record.to_dict()
    for name in ("loss", "lr", "grad_norm"):
        if values[name] is not None:
            yield f"train/{name}", values[name]
    for name in ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"):
        if values[name] is not None:
            yield f"speed/{name}", values[name]
    for group in ("parts_s", "memory_gib", "extra"):
        for name, value in values[group].items():
            yield f"{group}/{name}", value


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; infinite if it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def header(
    recipe: str, constants: Constants, first_step: int = 1, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the header line that starts a metrics file, and every part that a resumed run appends to it.

    `details` are further fields of the run: its full recipe, its GPUs.
    """
    import torch

    versions = {
        "meshwright": _meshwright_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return {
        "kind": "header",
        "recipe": recipe,
        **(details or {}),
        "first_step": first_step,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        **msgspec.structs.asdict(constants),
    }


def _meshwright_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshwright")
    except PackageNotFoundError:  # running from a source tree
        return "unknown"

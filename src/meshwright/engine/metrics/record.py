"""What is told about one step, and about the run it belongs to."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from meshwright.engine.metrics.meter import Constants


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step as metrics tell it."""

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
    skipped: bool = False  # the optimizer did not take it
    extra: dict[str, float] = {}

    def to_dict(self) -> dict[str, Any]:
        """The line of the metrics file; a value that is not finite becomes null there."""
        return {"kind": "step", **msgspec.structs.asdict(self)}


def header(
    recipe: str, constants: Constants, first_step: int = 1, told: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The first line of a metrics file, and of every part that a resumed run adds to it.

    `told` is what else a reader may want to know of the run: its whole recipe, its GPUs.
    """
    import torch

    versions = {"meshwright": _own_version(), "torch": str(torch.__version__), "python": platform.python_version()}
    return {
        "kind": "header",
        "recipe": recipe,
        **(told or {}),
        "first_step": first_step,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        **msgspec.structs.asdict(constants),
    }


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshwright")
    except PackageNotFoundError:  # run from its sources
        return "unknown"

"""Logs of DeepSpeed's own messages: steps with skipped steps and learning rate, samples per second and memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, has_any, merge_header, number, of_one_rank, time_of
from meshwright.doctor.run import Run, RunHeader
from meshwright.recipes.key_maps.deepspeed import ZERO_STAGES

LOOKED_FOR = "`step=10, skipped=0, lr=[…], mom=[…]` and `global_step=10, RunningAvgSamplesPerSec=…` of DeepSpeed"
HINTS = (", skipped=", "/global_step=")
MARKS = re.compile(r"\[INFO\] \[(?:logging|timer|config|engine|launch|runner)\.py:\d+:\w+\]|\[deepspeed\]")
STEP = re.compile(rf"\bstep=(?P<step>\d+), skipped=(?P<skipped>\d+), lr=\[\s*(?P<lr>{NUMBER})?"
                  rf"|/global_step=(?P<timed>\d+), RunningAvgSamplesPerSec=")  # fmt: skip
PEAK = re.compile(rf"MaxMemAllocated=({NUMBER})GB")  # its GB are GiB
RATE = re.compile(rf"CurrSamplesPerSec=({NUMBER})")
OVERFLOW = re.compile(
    r"\[deepspeed\] OVERFLOW! Rank \d+ Skipping step\.(?: Attempted loss scale: \d+, reducing to (\d+))?"
)
"""DeepSpeed skips a step whose gradients overflow in fp16."""
TIMES = re.compile(r"time \(ms\) \|(.*)")
TIME = re.compile(rf"\b(\w+): ({NUMBER})")
PARTS = {
    **dict.fromkeys(("fwd", "forward"), "forward_backward"),
    **dict.fromkeys(("bwd", "backward"), "forward_backward"),
    **dict.fromkeys(("bwd_allreduce", "backward_allreduce"), "collectives"),
    "step": "optimizer",
}
"""Times of wall_clock_breakdown; the one of the backward pass contains that of its collectives."""
SETTING = re.compile(r"\[config\.py:\d+:print(?:_config)?\]\s+(\w+) [ .]*([\d.e+-]+)\s*$")
FIELDS = {"train_batch_size": "train.global_batch_size", "train_micro_batch_size_per_gpu": "layout.micro_batch_size"}
UNSHARDED = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "sp": False, "pp_schedule": "1f1b"}
"""ZeRO alone; programs that also shard layers, such as Megatron-DeepSpeed, print steps in another format."""
RELEVANT = ("time (ms)", "[deepspeed] OVERFLOW", "[config.py:")
NO_LOSS = "DeepSpeed's own messages have no loss: log it beside them, or name the trainer's log too"


class Overflows:
    """The steps that DeepSpeed skipped since the last record, and its loss scale."""

    def __init__(self) -> None:
        self._skipped = 0
        self.scale: float | None = None

    def add(self, found: re.Match[str]) -> None:
        """Count a skipped step."""
        self._skipped += 1
        self.scale = number(found[1]) or self.scale

    def of_record(self) -> dict[str, float]:
        """Return the figures for a record, and start counting for the next one."""
        skipped, self._skipped = self._skipped, 0
        return {} if self.scale is None else {"loss_scale": self.scale, "skipped": float(skipped)}


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of a program that trains with DeepSpeed and prints no steps in another format."""
    steps, overflows = Steps(), Overflows()
    header: dict[str, Any] = {}
    skipped = 0
    for line, found in of_one_rank(lines, STEP, HINTS):
        text = line.text
        if found is not None:
            step = int(found["step"] or found["timed"])
            if step != steps.last:
                steps.add(step, line.number, at_s=time_of(text), loss_scale=overflows.scale)
            if found["step"]:
                all_skipped = int(found["skipped"])
                steps.amend(skipped=max(0, all_skipped - skipped))
                skipped = all_skipped
                if (rate := number(found["lr"])) is not None:
                    steps.amend(lr=rate)
            if peak := PEAK.search(text):
                steps.amend(memory_gib=number(peak[1]))
        elif not has_any(text, RELEVANT):
            continue
        elif overflow := OVERFLOW.search(text):
            overflows.add(overflow)
        elif times := TIMES.search(text):
            steps.amend(**_parts(times[1]))
        elif setting := SETTING.search(text):
            merge_header(header, _setting(setting[1], setting[2]))
    return Run(
        kind="deepspeed",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        header=RunHeader(**header),
        notes=(NO_LOSS,),
    )


def _parts(text: str) -> dict[str, Any]:
    """Return the parts of a step in seconds."""
    parts: dict[str, float] = {}
    for name, value in TIME.findall(text):
        if name in PARTS:
            parts[PARTS[name]] = parts.get(PARTS[name], 0.0) + (number(value) or 0.0) / 1000
    if "collectives" in parts and "forward_backward" in parts:
        parts["forward_backward"] = max(0.0, parts["forward_backward"] - parts["collectives"])
    return {"parts_s": parts} if parts else {}


def _setting(name: str, value: str) -> dict[str, Any]:
    """Return the header fields of a line of the printed config."""
    found = number(value)
    if found is None or found <= 0:
        return {}
    if name == "world_size":
        return {"world": int(found)}
    if name == "zero_optimization_stage" and int(found) in ZERO_STAGES:
        strategy, reshard = ZERO_STAGES[int(found)]
        layout = {"strategy": strategy, "reshard_after_forward": reshard, **UNSHARDED}
        return {"overrides": {f"layout.{key}": value for key, value in layout.items()}, "states_layout": True}
    return {"overrides": {FIELDS[name]: int(found)}} if name in FIELDS else {}

"""Logs of KempnerForge: `[step 10] loss=… | lr=… | grad_norm=… | tok/s=… | mfu=… | mem=…/…GB | step_time=…s` lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, figures_of, merge_header, number, of_one_rank
from meshwright.doctor.run import Run, RunHeader

LOOKED_FOR = "`[step 10] loss=… | lr=… | grad_norm=… | tok/s=… | mfu=… | mem=… | step_time=…` of KempnerForge"
HINTS = ("] loss=",)
MARKS = re.compile(r"kempnerforge|^\[rank \d+\] [A-Z]+ +(?:DeviceMesh: dims=|Starting training: step=)")
STEP = re.compile(r"\[step (\d+)\] loss=.*\| (?:tok/s|step_time)=")

FIELDS = {
    "loss": re.compile(rf"\] loss=({NUMBER})", re.IGNORECASE),
    "lr": re.compile(rf"\| lr=({NUMBER})"),
    "grad_norm": re.compile(rf"\| grad_norm=({NUMBER})", re.IGNORECASE),
    "all_tokens_per_s": re.compile(rf"\| tok/s=({NUMBER})"),
    "mfu": re.compile(rf"\| mfu=({NUMBER})%"),
    "memory_gib": re.compile(rf"\| mem=({NUMBER})/"),  # its GB are GiB
    "seconds": re.compile(rf"\| step_time=({NUMBER})s"),
}
CAPACITY = re.compile(rf"\| mem={NUMBER}/({NUMBER})GB")
VALIDATION = re.compile(rf"\[step (\d+)\] .*?\beval/loss=({NUMBER})", re.IGNORECASE)
BAD = re.compile(r"(?:NaN/Inf loss|NaN/Inf detected on another rank) at step (\d+)")
MESH = re.compile(r"DeviceMesh: dims=\[(.*?)\], sizes=\[([\d, ]*)\], world_size=(\d+)")
START = re.compile(
    r"Starting training: step=(\d+), max_steps=(\d+), batch_size=(\d+), grad_accum=(\d+), world_size=(\d+)"
)
GPU = re.compile(r"Detected GPU: (?:NVIDIA )?(\S+)")
LENGTH = re.compile(r"Training config: .*?[( ]seq_len=(\d+)")
AXES = ("pp", "dp_replicate", "dp_shard", "ep", "tp")
RELEVANT = ("eval/loss=", "NaN/Inf", "DeviceMesh:", "Starting training:", "Detected GPU:", "Training config:")
"""Every other line that is parsed contains one of these."""
CONVENTION = "as KempnerForge counts it: attention not halved for the causal mask"


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of KempnerForge."""
    steps = Steps()
    header: dict[str, Any] = {}
    for line, found in of_one_rank(lines, STEP, HINTS):
        text = line.text
        if found is not None:
            steps.add(int(found[1]), line.number, **_figures(text, header))
        elif not any(word in text for word in RELEVANT):
            continue
        elif done := VALIDATION.search(text):
            steps.validated(int(done[1]), number(done[2]), line.number)
        elif bad := BAD.search(text):  # such a step has no step line
            steps.add(int(bad[1]) + 1, line.number, loss=float("nan"), bad=1, skipped=1, covers=1)
        elif start := START.search(text):
            steps.start(int(start[1]) + 1)
            merge_header(header, _batch(start, header))
        else:
            merge_header(header, _header_fields(text))
    return Run(
        kind="kempnerforge",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        validations=steps.validations,
        header=RunHeader(**header, mfu_convention=CONVENTION),
    )


def _figures(text: str, header: dict[str, Any]) -> dict[str, Any]:
    # zero on CPU and in steps of under 5 ms
    figures = figures_of(FIELDS, text, above_zero=("all_tokens_per_s", "seconds", "mfu", "memory_gib"))
    if "mfu" in figures:
        figures["mfu"] /= 100
    if header.get("world") and "all_tokens_per_s" in figures:
        figures["tokens_per_s"] = figures["all_tokens_per_s"] / header["world"]
    if "memory_gib" in figures and "capacity_gib" not in header and (capacity := CAPACITY.search(text)):
        header["capacity_gib"] = number(capacity[1])
    return figures


def _header_fields(text: str) -> dict[str, Any]:
    """Return the header fields in a line."""
    if mesh := MESH.search(text):
        sizes = [int(size) for size in mesh[2].split(",") if size.strip()]
        named = dict(zip([name.strip(" '\"") for name in mesh[1].split(",")], sizes, strict=False))
        degrees = {f"layout.{axis}": named.get(axis, 1) for axis in AXES}
        return {"world": int(mesh[3]), "overrides": degrees, "states_layout": True}
    if gpu := GPU.search(text):
        return {"gpu": gpu[1]}
    if length := LENGTH.search(text):
        return {"seq_length": int(length[1]), "overrides": {"data.seq_length": int(length[1])}}
    return {}


def _batch(found: re.Match[str], header: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of a start: every data-parallel rank has batch_size × grad_accum samples."""
    _, total, local, accumulated, world = (int(part) for part in found.groups())
    stated = header.get("overrides", {})
    fields: dict[str, Any] = {"world": world, "total_steps": total}
    overrides = {"layout.micro_batch_size": local, "train.steps": total}
    if header.get("states_layout") or world == 1:
        ranks = stated.get("layout.dp_replicate", 1) * stated.get("layout.dp_shard", 1)
        overrides["train.global_batch_size"] = local * accumulated * ranks
        if header.get("seq_length"):
            fields["tokens_per_step"] = overrides["train.global_batch_size"] * header["seq_length"]
    return {**fields, "overrides": overrides}

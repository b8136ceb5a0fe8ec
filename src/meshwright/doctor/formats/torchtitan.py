"""Logs of torchtitan: colored lines with loss, memory and tokens per second."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, figures_of, has_any, merge_header, number, of_one_rank, time_of
from meshwright.doctor.run import Run, RunHeader

LOOKED_FOR = "`step: 10  loss: …  grad_norm: …  memory: …GiB(…%)  tps: …` of torchtitan"
HINTS = ("loss:",)
MARKS = re.compile(r"\[titan\]|torchtitan")
STEP = re.compile(r"step:(?<=\bstep:)(?<!validate step:)\s*(\d+)\s+loss:\s*\S.*\b(?:[tw]ps|memory):")

# A pattern that starts with plain letters is searched several times faster: \b comes after them, as a look-behind.
FIELDS = {
    "loss": re.compile(rf"loss:(?<=\bloss:)\s*((?i:{NUMBER}))"),
    "grad_norm": re.compile(rf"grad_norm:\s*((?i:{NUMBER}))"),
    "lr": re.compile(rf"lr:(?<=\blr:)\s*({NUMBER})"),
    "memory_gib": re.compile(rf"memory:\s*({NUMBER})GiB"),
    "tokens_per_s": re.compile(rf"ps:(?<=\b[tw]ps:)\s*({NUMBER})"),
    "tflops": re.compile(rf"tflops:\s*({NUMBER})"),
    "mfu": re.compile(rf"mfu:\s*({NUMBER})%"),
    "data_share": re.compile(rf"data_loading(?:\(%\))?:\s*({NUMBER})%?"),
    "seconds": re.compile(rf"end_to_end\(s\):\s*({NUMBER})"),
}
VALIDATION = re.compile(rf"\bvalidate step:\s*(\d+)\s+loss:\s*({NUMBER})", re.IGNORECASE)
START = re.compile(r"Training starts at step (\d+)")
SAVED = re.compile(rf"(?:Finished (?:sav|stag)ing|Saving) the checkpoint.{{0,80}}?in ({NUMBER}) seconds")
CAPACITY = re.compile(rf"CUDA capacity: (?:NVIDIA )?(\S+).* with ({NUMBER})GiB memory")
OLD_MESH = re.compile(r"Building \d+-D device mesh with \[(.*?)\], \[([\d, ]*)\]")
MESH = re.compile(r"Building device mesh with parallelism: (.*)")
DEGREE = re.compile(r"(\w+)=(\d+)")
MODEL = re.compile(r"Model (\S+) (\S+) size: ([\d,]+) total parameters")
BATCH = re.compile(
    r"local batch size (\d+)(?:, global batch size (\d+))?(?:, gradient accumulation steps (\d+))?"
    r", sequence length (\d+), total steps (\d+) \(warmup (\d+)\)"
)
RECOMPUTE = re.compile(r"Applied (\w+) activation checkpointing to the model")
RECOMPUTE_MODES = ("full", "selective")  # other modes have no equivalent here
COMPILED = "Compiling each TransformerBlock with torch.compile"
APPLIED = re.compile(r"Applied (?:FSDP|HSDP|DDP|fully_shard|Tensor Parallelism|Context Parallel|Pipeline Parallel)")
"""A log with such a line has the lines of all techniques: one that is not in it is off."""
MICRO_BATCHES = re.compile(r"Using pipeline schedule \S+ with (\d+) microbatches")
TOKEN_BATCH = re.compile(
    r"(\d+) tokens per DP rank, (\d+) tokens per train step, gradient accumulation steps (\d+), maximum context length "
    r"(\d+), total steps (\d+) \(warmup (\d+)\)"
)
"""Since July 2026: batches are counted in tokens."""
RETRIES = re.compile(r"(\d+) \w+ memory allocation retries")
MICRO_BATCH = "layout.micro_batch_size"
OLD_NAMES = {"dp": "dp_shard"}
OTHER_HINTS = (
    "the checkpoint", "allocation retries", "CUDA capacity", "Model ",
    "device mesh", "activation checkpointing", COMPILED, "Applied ", "local batch size", "tokens per DP rank",
)  # fmt: skip
"""Every line that is parsed besides steps and starts contains one of these."""
KNOWN_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
CONVENTION = "as torchtitan counts it: attention not halved for the causal mask"


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of torchtitan."""
    steps = Steps()
    header: dict[str, Any] = {}
    retries, retry_line = 0, 0
    for line, found in of_one_rank(lines, STEP, HINTS):
        text = line.text
        if found is not None:
            steps.add(int(found[1]), line.number, at_s=time_of(text), **_figures(text, header))
        elif start := START.search(text):
            steps.start(int(start[1]))
            merge_header(header, _header_fields(text))  # up to 0.1, the batch is in this line
        elif not has_any(text, OTHER_HINTS) and "validate step" not in text.lower():
            continue
        elif done := VALIDATION.search(text):
            steps.validated(int(done[1]), number(done[2]), line.number)
        elif saved := SAVED.search(text):
            steps.block(number(saved[1]) or 0.0)
        elif retried := RETRIES.search(text):
            if int(retried[1]) > retries:
                retries, retry_line = int(retried[1]), line.number
        else:
            merge_header(header, _header_fields(text))
    return Run(
        kind="torchtitan",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        validations=steps.validations,
        header=RunHeader(**_with_techniques(_with_micro_batch(header, lines)), mfu_convention=CONVENTION),
        retries=retries,
        retry_line=retry_line,
    )


def _with_techniques(header: dict[str, Any]) -> dict[str, Any]:
    """Return the header with the techniques that are off: torchtitan logs only those that it applies."""
    logged = header.pop("logs_techniques", False)
    off = {"layout.recompute": "none", "kernels.compile": False} if logged else {}
    stated = off | header.get("overrides", {})
    return {**header, "overrides": {name: value for name, value in stated.items() if value is not None}}


def _with_micro_batch(header: dict[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """Return the header with the micro batch of a pipeline: its schedule splits the local batch.

    Without the schedule's line the log does not have it (parallelism.pipeline_parallel_microbatch_size).
    """
    overrides = dict(header.get("overrides", {}))
    if overrides.get("layout.pp", 1) == 1 or MICRO_BATCH not in overrides:
        return header
    local = overrides.pop(MICRO_BATCH)
    found = (MICRO_BATCHES.search(line.text) for line in lines if "Using pipeline schedule" in line.text)
    count = next((int(one[1]) for one in found if one), 0)
    if count and local % count == 0:
        overrides[MICRO_BATCH] = local // count
    return {**header, "overrides": overrides}


def _figures(text: str, header: dict[str, Any]) -> dict[str, Any]:
    figures = figures_of(FIELDS, text, above_zero=("tokens_per_s", "tflops", "seconds"))
    if "mfu" in figures:
        figures["mfu"] /= 100
    tokens, world = header.get("tokens_per_step"), header.get("world")
    if tokens and world and "tokens_per_s" in figures:
        figures.setdefault("seconds", tokens / world / figures["tokens_per_s"])
    share = figures.pop("data_share", None)
    if share is not None and "seconds" in figures:
        figures["parts_s"] = {"data": share / 100 * figures["seconds"]}
    return figures


def _header_fields(text: str) -> dict[str, Any]:
    """Return the header fields in a line."""
    if capacity := CAPACITY.search(text):
        return {"gpu": capacity[1], "capacity_gib": number(capacity[2])}
    if model := MODEL.search(text):
        return {"model": f"{model[1]} {model[2]}", "parameters": int(model[3].replace(",", "") or 0) or None}
    if mesh := OLD_MESH.search(text):
        return _old_mesh(mesh)
    if mesh := MESH.search(text):
        degrees = {name: int(value) for name, value in DEGREE.findall(mesh[1]) if name in KNOWN_AXES}
        return _layout(degrees, _world(degrees))
    if recompute := RECOMPUTE.search(text):
        mode = next((one for one in RECOMPUTE_MODES if recompute[1].lower().startswith(one)), None)
        return {"overrides": {"layout.recompute": mode}}
    if COMPILED in text:
        return {"overrides": {"kernels.compile": True}}
    if APPLIED.search(text):
        return {"logs_techniques": True}
    if batch := BATCH.search(text):
        return _batch(batch)
    if batch := TOKEN_BATCH.search(text):
        return _token_batch(batch)
    return {}


def _layout(degrees: dict[str, int], world: int) -> dict[str, Any]:
    overrides = {f"layout.{name}": value for name, value in degrees.items()}
    return {"world": world, "overrides": overrides, "states_layout": True}


def _old_mesh(found: re.Match[str]) -> dict[str, Any]:
    """Read a mesh of older versions, which list only the axes with several ranks."""
    names = [name.strip(" '\"") for name in found[1].split(",")]
    sizes = [int(size) for size in found[2].split(",") if size.strip()]
    degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
    degrees |= {OLD_NAMES.get(name, name): size for name, size in zip(names, sizes, strict=False)}
    return _layout({name: size for name, size in degrees.items() if name in KNOWN_AXES}, prod(sizes))


def _world(degrees: dict[str, int]) -> int:
    world = 1
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        world *= max(1, degrees.get(name, 1))
    return world


def _token_batch(found: re.Match[str]) -> dict[str, Any]:
    """Read a batch that is stated in tokens: so many sequences of full length, if it is a multiple of them."""
    local, tokens, accumulated, length, total, warmup = (int(part) for part in found.groups())
    samples, rest = divmod(tokens, length)
    micro = local // max(1, accumulated) // length
    fields = _fields(micro or None, samples if samples and not rest else None, length, total, warmup)
    return fields | {"tokens_per_step": tokens}


def _batch(found: re.Match[str]) -> dict[str, Any]:
    local, batch, _, length, total, warmup = (int(part) if part else None for part in found.groups())
    return _fields(local, batch, length, total, warmup)


def _fields(
    local: int | None, batch: int | None, length: int | None, total: int | None, warmup: int | None
) -> dict[str, Any]:
    return {
        "seq_length": length,
        "total_steps": total,
        "tokens_per_step": batch * length if batch and length else None,
        "overrides": {
            key: value
            for key, value in (
                (MICRO_BATCH, local),
                ("train.global_batch_size", batch),
                ("data.seq_length", length),
                ("train.steps", total),
                ("schedule.warmup_steps", warmup),
            )
            if value is not None
        },
    }

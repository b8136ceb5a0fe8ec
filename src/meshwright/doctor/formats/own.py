"""Logs of our own runs: metrics.jsonl with a header per start, or the printed step lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright import json_text
from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, number, of_one_rank
from meshwright.doctor.run import Run, RunHeader
from meshwright.recipes.types import Recipe

LOOKED_FOR = "metrics.jsonl of Meshwright, or its `step 10/100  loss …  lr …` lines"
HINTS = ("step ", '"kind"')
Record = TypeVar("Record", bound=msgspec.Struct)
MARKS = re.compile(r'"kind":"header"|meshwright')
VALIDATION = re.compile(
    rf'^\{{\s*"kind":\s*"validation".*?"step":\s*(\d+).*?"loss":\s*({NUMBER}|null)|'
    rf"^validation  step (\d+)(?:/\d+)?  loss ({NUMBER})"
)
END = re.compile(r'^\{\s*"kind":\s*"end"')
STEP = re.compile(r'^\{\s*"kind":\s*"(?:step|(header))"|^step (\d+)(?:/(\d+))?  (?:epoch \S+  )?loss ')

FIELDS = {
    "loss": re.compile(rf"  loss ({NUMBER})", re.IGNORECASE),
    "lr": re.compile(rf"  lr ({NUMBER})"),
    "grad_norm": re.compile(rf"  grad norm ({NUMBER})", re.IGNORECASE),
    "tokens_per_s": re.compile(rf"  tokens/s/(?:GPU|rank) ({NUMBER})"),
    "mfu": re.compile(rf"  MFU ({NUMBER})%"),
    "seconds": re.compile(rf"  step time ({NUMBER}) s"),
    "memory_gib": re.compile(rf"  memory ({NUMBER}) GiB"),
}
SHARES = {"data": "data", "fwd+bwd": "forward_backward", "optimizer": "optimizer", "other": "other"}
SHARE = re.compile(r"(data|fwd\+bwd|optimizer|other) (\d+)%")


class Header(msgspec.Struct):
    """The first line of every start in metrics.jsonl."""

    recipe: str = ""
    first_step: int = 1
    started: str = ""
    tokens_per_step: int | None = None
    world: int | None = None
    peak_flops: float | None = None
    mfu_convention: str = ""
    steps: int | None = None
    settings: dict[str, Any] | None = None
    gpus: str = ""
    tiny: bool = False
    estimate_memory_gib: dict[str, float] = {}
    versions: dict[str, str] = {}


class End(msgspec.Struct):
    """The last line of a run that ended before its last step."""

    why: str
    best_step: int | None = None  # of the checkpoint that is kept for its validation loss

    def text(self, folder: str) -> str:
        """Return why the run ended, and the command that takes its best checkpoint."""
        if self.best_step is None:
            return self.why
        run = shlex.quote(folder)
        return f"{self.why}; best checkpoint: step {self.best_step} (meshwright convert {run} OUT --checkpoint best)"


class Metrics(msgspec.Struct):
    """One step of metrics.jsonl."""

    step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    parts_s: dict[str, float] = {}
    memory_gib: dict[str, float] = {}
    skipped: bool = False
    extra: dict[str, float | None] = {}


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of ours."""
    steps = Steps()
    header, end, total, damaged, on_gpu = None, None, None, 0, True
    for line, found in of_one_rank(lines, STEP, HINTS):
        if found is None:
            if "validation" in line.text and (done := VALIDATION.search(line.text)):
                steps.validated(int(done[1] or done[3]), number(done[2] or done[4]), line.number)
            elif END.match(line.text):
                end = _decoded(line.text, End)
            continue
        if found[2] is not None:
            total = int(found[3]) if found[3] else total
            on_gpu = "tokens/s/rank" not in line.text  # CPU ranks are not GPUs
            steps.add(int(found[2]), line.number, **_printed(line.text))
            continue
        one = _decoded(line.text, Header) if found[1] else _decoded(line.text, Metrics)
        if one is None:
            damaged += 1
        elif isinstance(one, Header):
            header, end = one, None
            steps.start(one.first_step)
        else:
            steps.add(one.step, line.number, **_measured(one))
    notes = [f"{damaged} lines of {path} are damaged"] if damaged else []
    recipe, why = _recipe(header)
    if why:
        notes.append(f"no estimate: the recipe in the log's header is of another version ({why}); add --recipe NAME")
    return Run(
        kind="meshwright",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        validations=steps.validations,
        ending=end.text(str(Path(path).parent)) if end else "",
        header=_run_header(header, recipe) if header else RunHeader(total_steps=total, on_gpu=on_gpu),
        notes=tuple(notes),
    )


def _decoded(text: str, record_type: type[Record]) -> Record | None:
    """Decode a line of metrics.jsonl; None if it is truncated."""
    try:
        record: Record = json_text.decode(text, type=record_type)
        return record
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def _measured(one: Metrics) -> dict[str, Any]:
    parts = {name: gib for name, gib in one.memory_gib.items() if name not in ("peak", "reserved")}
    return {
        "loss": float("nan") if one.loss is None else one.loss,  # the file has null for non-finite values
        "lr": one.lr,
        "grad_norm": one.grad_norm,
        "seconds": one.step_s,
        "tokens_per_s": one.tokens_per_s_per_gpu,
        "tflops": one.tflops_per_gpu,
        "mfu": one.mfu,
        "memory_gib": one.memory_gib.get("peak"),
        "memory_parts": parts,
        "parts_s": one.parts_s,
        "skipped": int(one.skipped),
        "bad": int(one.skipped or one.loss is None),
        "blocked_s": one.extra.get("save_blocked_s") or 0.0,
        "covers": 1,
    }


def _printed(text: str) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: number(match[1]) for name, regex in FIELDS.items() if (match := regex.search(text))
    }
    if figures.get("mfu") is not None:
        figures["mfu"] /= 100
    seconds = figures.get("seconds")
    if seconds:
        figures["parts_s"] = {SHARES[name]: int(share) / 100 * seconds for name, share in SHARE.findall(text)}
    if "(skipped)" in text:
        figures |= {"skipped": 1, "bad": 1}
    return figures


def _run_header(header: Header, recipe: Recipe | None) -> RunHeader:
    return RunHeader(
        recipe=recipe,
        recipe_name=header.recipe,
        started=header.started,
        versions=header.versions,
        model=recipe.model if recipe else "",
        gpus=header.gpus,
        world=header.world,
        capacity_gib=header.estimate_memory_gib.get("capacity"),
        seq_length=recipe.data.seq_length if recipe else None,
        tokens_per_step=header.tokens_per_step,
        total_steps=header.steps,
        mfu_convention=header.mfu_convention,
        on_gpu=header.peak_flops is not None,
        mock_data=recipe is not None and recipe.data.is_mock,
        tiny=header.tiny,
    )


def _recipe(header: Header | None) -> tuple[Recipe | None, str]:
    """Return the recipe of the run, or why it cannot be read; older runs have only its name."""
    if header is None or header.settings is None:
        return None, ""
    try:
        return msgspec.convert(header.settings, Recipe, strict=False), ""
    except msgspec.ValidationError as error:
        return None, str(error)

"""Logs of the Hugging Face Trainer, and of TRL, axolotl, LLaMA-Factory and ms-swift, which train with it.

It prints `{'loss': …, 'grad_norm': …, 'learning_rate': …, 'epoch': …}` every logging_steps (numbers, or strings since
transformers 5) and a progress bar with the step. trainer_state.json has the same records with their steps, and
trainer_log.jsonl (LLaMA-Factory) and logging.jsonl (ms-swift) have some of them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshwright import json_text
from meshwright.display import plural
from meshwright.doctor.formats.bar_steps import Bar, steps_of, total_of_bars
from meshwright.doctor.formats.deepspeed import OVERFLOW, Overflows
from meshwright.doctor.formats.deepspeed_timers import Timer, steps_of_starts, timers_of
from meshwright.doctor.formats.derived_steps import Range, derive, per_epoch, total_of
from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, number, of_one_rank, positive, tokens_between
from meshwright.doctor.run import Run, RunHeader

LOOKED_FOR = (
    "`{'loss': …, 'grad_norm': …, 'learning_rate': …, 'epoch': …}` or trainer_state.json of the Hugging Face Trainer "
    "(TRL, axolotl, LLaMA-Factory, ms-swift)"
)
HINTS = ("'loss':", '"current_steps":', '"global_step/max_steps":', '"iteration": "')
MARKS = re.compile(
    r"\"log_history\": ?\[|'train_runtime':|'eval_loss':|\*{5} Running training \*{5}|transformers[./]trainer"
    r"|Unsloth \d{4}\.\d|Num GPUs = \d+\. Max memory"
)
STARTS = "***** Running training *****"
STEP = re.compile(
    r"\{(?>[^{}']*(?:'(?!loss')[^{}']*)*)'loss': '?" + NUMBER + r"'?[^{}]*\}"
    r"|^\s*\{.*\"(?:current_steps\": ?\d|global_step/max_steps\": ?\"\d|iteration\": ?\"\d+/)"
)

VALIDATION = re.compile(
    r"\{(?>[^{}']*(?:'(?!eval_loss')[^{}']*)*)'eval_loss': '?" + NUMBER + r"'?[^{}]*\}", re.IGNORECASE
)
PLAIN = r"[-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?)"  # a comma ends a number of a dict
PAIR = re.compile(rf"'([^'{{}}]{{1,60}})': '?({PLAIN})'?(?=[,}}])", re.IGNORECASE)
BAR = re.compile(r"^\s*(?:Train(?:ing)?: *)?\d+%\|[^|]*\| *(\d+)/(\d+) \[((?:\d+ days?, )?[\d:]+)<")
BAR_TICK_S = 1.0  # progress bars show whole seconds
POSITION = re.compile(r"'(?:global_step/max_steps|iteration)': '(\d+)/(\d+)'")  # ms-swift's
PASSED = re.compile(r"'elapsed_time': '([^'{}]{1,40})'")
WORDS = re.compile(r"(\d+)([dhms])")
UNIT_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}
STATED = {
    "total_steps": re.compile(r"Total (?:optimization )?steps ?= ?([\d,]+)"),
    "batch": re.compile(r"Total (?:train )?batch size[^=]*= ?([\d,]+)"),
    "micro_batch": re.compile(r"\b(?:Instantaneous b|B)atch size per device ?= ?([\d,]+)"),
    "accumulated": re.compile(r"Gradient [Aa]ccumulation steps ?= ?([\d,]+)"),
    "examples": re.compile(r"Num examples ?= ?([\d,]+)"),
    "trainable": re.compile(
        r"(?:Number of trainable|\bTrainable) parameters ?= ?([\d,]+)|\btrainable params: ([\d,]+) \|\|"
    ),
}
RECOMPUTES = re.compile(r"`use_cache=True` is incompatible with gradient checkpointing")
"""Numbers that the Trainer prints before its first step; after a restart with a smaller batch the last ones count."""
FRONT_ENDS = {
    "axolotl": re.compile(r"\[axolotl\.|/axolotl/|\baxolotl[./](?:cli|train)\b"),
    "llama-factory": re.compile(r"\bllamafactory[./\]-]|LLaMA-?Factory/", re.IGNORECASE),
    "ms-swift": re.compile(r":swift\]|\bswift/(?:llm|cli|trainers?)/|\bms-swift\b"),
    "unsloth": re.compile(r"Unsloth \d{4}\.\d|\bUnsloth - \d+x faster"),
    "trl": re.compile(r"/trl/(?:trainer|scripts)/"),
}
"""Messages and paths of the front ends that train with the Trainer; TRL last, whose trainers the others use."""
WORLD = re.compile(
    r"(?:world_size|Num(?:ber of)? (?:processes|GPUs(?: used)?)) ?[=:] ?(\d+)\b(?!\. Max memory)", re.IGNORECASE
)
GPU = re.compile(r"/\|\s+(\w[\w -]*)\. Num GPUs = (\d+)\. Max memory")
"""The GPU in Unsloth's banner, and the number of those that the machine has: not all of them need to train."""
NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "lr": "lr",
    "throughput": "all_tokens_per_s",  # LLaMA-Factory's
    "tokens_per_second_per_gpu": "tokens_per_s",  # axolotl's
    "epoch": "epoch",
    "loss_scale": "loss_scale",
    "skipped": "skipped",
    "memory/max_allocated (GiB)": "memory_gib",  # axolotl's
    "memory/max_mem_allocated(gib)": "memory_gib",  # of older versions
    "memory(GiB)": "memory_gib",  # ms-swift's
    "vram_allocated": "memory_gib",  # LLaMA-Factory's
}
TOTAL_TOKENS = ("tokens/total", "num_input_tokens_seen", "num_tokens", "total_tokens")  # since the start, of all ranks
LEAST_ZEROS = 3  # records with a loss of 0 to the end, of a log without gradient norms


class _Record:
    """One logged record: its line, its figures, and the step and the elapsed seconds as far as they are known."""

    def __init__(self, line: int, figures: dict[str, float], step: int | None, at_s: float | None) -> None:
        self.line, self.figures, self.step, self.at_s = line, figures, step, at_s
        self.place = 0  # among the lines, where updates of a bar count too
        self.total: int | None = None  # steps of the run, if the record has them
        self.of_deepspeed: dict[str, Any] = {}  # figures of its step in DeepSpeed's messages, by our names


MAX_STATE = 64 * 1024**2  # characters of a trainer_state.json with its indents


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of the Hugging Face Trainer."""
    state = _state(lines)
    if state is not None:
        return _run(path, *_of_state(state, lines), _header(None, {"total_steps": _whole(state.get("max_steps")) or 0}))
    records: list[_Record] = []
    validations: list[_Record] = []
    summary: dict[str, float] = {}
    world, stated = None, dict[str, int]()
    overflows = Overflows()
    bars, places = list(_bars(lines)), {id(line): place for place, line in enumerate(lines)}
    for line, found in of_one_rank(lines, STEP, HINTS):
        if found is not None:
            for record in _record(line, found[0]):
                record.place = places[id(line)]
                if "loss" in record.figures:
                    records.append(record)
                    record.figures |= overflows.of_record()
                elif "eval_loss" in record.figures:
                    validations.append(record)
        elif "[deepspeed] OVERFLOW" in line.text and (skipped := OVERFLOW.search(line.text)):
            overflows.add(skipped)
        elif "'eval_loss':" in line.text and (done := VALIDATION.search(line.text)):
            record = _Record(line.number, _figures(done[0]), None, None)
            record.place = places[id(line)]
            validations.append(record)
        elif "'train_runtime':" in line.text:
            summary = _figures(line.text)
        elif numbers := _stated(line.text):
            stated |= numbers
        elif world is None and (found := WORLD.search(line.text)):
            world = int(found[1])
    notes = list[str]()
    starts = [place for place, line in enumerate(lines) if STARTS in line.text]
    timers = timers_of(lines, stated.get("batch", 0), starts)
    if not total_of_bars(bars, stated.get("total_steps")) and all(record.step is None for record in records):
        found_steps = steps_of_starts([record.place for record in records], timers, starts) or []
        for record, step in zip(records, found_steps, strict=False):
            record.step = step
    stated["total_steps"] = _with_steps(records, bars, summary, stated, notes) or 0
    _place_validations(validations, records)
    known_total = next((record.total for record in reversed(records) if record.total), None)
    stated["total_steps"] = stated["total_steps"] or known_total or 0
    header = msgspec.structs.replace(_header(world, stated), front_end=_front_end(lines))
    if banner := next((found for line in lines if "Num GPUs" in line.text and (found := GPU.search(line.text))), None):
        header = msgspec.structs.replace(header, gpu=banner[1], world=world or (1 if banner[2] == "1" else None))
    if any("use_cache" in line.text and RECOMPUTES.search(line.text) for line in lines):
        header = msgspec.structs.replace(header, overrides={**header.overrides, "layout.recompute": "full"})
    for record in records:
        if record.at_s is None:  # with include_num_input_tokens_seen, every record has its time
            record.at_s = record.figures.get("train_runtime")
    return _run(path, _with_timers(records, timers), validations, _with_mean_tokens(header, summary), notes)


def _front_end(lines: Sequence[Line]) -> str:
    """Return the front end whose messages a log has; empty if it has none."""
    found = (name for name, pattern in FRONT_ENDS.items() if any(pattern.search(line.text) for line in lines))
    return next(found, "")


def _stated(text: str) -> dict[str, int]:
    """Return the number that a line before the first step states, by its name."""
    if " = " not in text and " || " not in text:
        return {}
    found = ((name, pattern.search(text)) for name, pattern in STATED.items())
    return {name: int(match[match.lastindex or 1].replace(",", "")) for name, match in found if match}


def _header(world: int | None, stated: Mapping[str, int]) -> RunHeader:
    """Return what the Trainer states: its ranks are the global batch, divided by what one rank accumulates."""
    batch, micro = stated.get("batch", 0), stated.get("micro_batch", 0)
    per_rank = micro * stated.get("accumulated", 0)
    overrides = {"train.global_batch_size": batch, "layout.micro_batch_size": micro}
    return RunHeader(
        world=world,
        data_ranks=batch // per_rank if per_rank and batch and batch % per_rank == 0 else None,
        total_steps=stated.get("total_steps") or None,
        trainable_parameters=stated.get("trainable"),
        overrides={key: value for key, value in overrides.items() if value},
    )


def _run(
    path: str, records: Sequence[_Record], validations: Sequence[_Record], header: RunHeader, notes: Sequence[str] = ()
) -> Run:
    times = [record.at_s for record in records if record.at_s is not None]
    steps, hidden = Steps(BAR_TICK_S if all(map(float.is_integer, times)) else 0.0), _hidden_nans(records)
    for record in validations:
        steps.validated(record.step, record.figures["eval_loss"], record.line)
    for number_, record in enumerate(records, 1):
        known = {NAMES[name]: value for name, value in record.figures.items() if name in NAMES}
        speeds = ("tokens_per_s", "all_tokens_per_s")
        known = {name: value for name, value in known.items() if name not in speeds or positive(str(value))}
        if "skipped" in known:
            known["skipped"] = int(known["skipped"])
        if id(record) in hidden:
            known |= {"loss": float("nan"), "hides_nan": True}
        steps.add(record.step or number_, record.line, at_s=record.at_s, **{**record.of_deepspeed, **known})
    if tokens := _tokens_per_step(records):
        header = msgspec.structs.replace(header, tokens_per_step=tokens)
    uncounted = bool(records) and all(record.step is None for record in records)
    notes = ("the log has no step numbers: a step here is one logged record",) if uncounted else tuple(notes)
    return Run(
        kind="transformers",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        validations=steps.validations,
        numbered=not uncounted,
        header=header,
        notes=notes,
    )


def _record(line: Line, text: str) -> Iterator[_Record]:
    """Yield the record of a step line; those of LLaMA-Factory and ms-swift have a step, in files as JSON."""
    if "'loss':" in text:
        place, passed = POSITION.search(text), PASSED.search(text)
        record = _Record(line.number, _figures(text), int(place[1]) if place else None, None)
        record.at_s = _passed(passed[1]) if passed else None
        record.total = int(place[2]) if place else None
        yield record
        return
    found = _decoded(line.text)
    if not isinstance(found, dict):
        return
    counts = ("current_steps", "global_step/max_steps", "iteration")
    step, _, total = str(next((found[name] for name in counts if name in found), "")).partition("/")
    if step.isdigit():
        figures = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        at_s = _passed(str(found["elapsed_time"])) if "elapsed_time" in found else None
        record = _Record(line.number, figures, int(step), at_s)
        record.total = int(total) if total.isdigit() else _whole(found.get("total_steps"))
        yield record


def _hidden_nans(records: Sequence[_Record]) -> frozenset[int]:
    """Return the ids of records whose loss of 0 hides a NaN: those with a NaN norm, or all to the end without a norm.

    The Trainer adds no NaN to the loss that it logs (logging_nan_inf_filter), so that nothing but 0 is left.
    """
    logged = [record for record in records if "loss" in record.figures]
    zero = [record for record in logged if record.figures["loss"] == 0]
    with_nan = [record for record in zero if not math.isfinite(record.figures.get("grad_norm", 0.0))]
    last = len(logged)
    while last and logged[last - 1].figures["loss"] == 0 and "grad_norm" not in logged[last - 1].figures:
        last -= 1
    at_end = logged[last:] if 0 < last <= len(logged) - LEAST_ZEROS else []
    return frozenset(map(id, (*with_nan, *at_end)))


def _tokens_per_step(records: Sequence[_Record]) -> int | None:
    """Return the tokens of a step that the totals of two records imply; None if the log has none."""
    for name in TOTAL_TOKENS:
        rows = [(one.step, one.figures[name]) for one in records if one.step and name in one.figures]
        if tokens := tokens_between(rows):
            return tokens
    return None


def _with_mean_tokens(header: RunHeader, summary: Mapping[str, float]) -> RunHeader:
    """Return the header with the tokens of a step that the Trainer's last line implies, on one GPU or on all.

    include_tokens_per_second counts those of one device; include_num_input_tokens_seen those of all.
    """
    rate, runtime = summary.get("train_tokens_per_second"), summary.get("train_runtime")
    if not rate or not runtime or not header.total_steps:
        return header
    tokens = round(rate * runtime / header.total_steps)
    if "num_input_tokens_seen" in summary:
        return msgspec.structs.replace(header, tokens_per_step=tokens or None)
    return msgspec.structs.replace(header, rank_tokens_per_step=tokens or None)


def _figures(text: str) -> dict[str, float]:
    found = {name: number(value) for name, value in PAIR.findall(text)}
    return {name: value for name, value in found.items() if value is not None}


def _bars(lines: Sequence[Line]) -> Iterator[Bar]:
    """Yield the progress bars without a title: those of training and of evaluation."""
    for place, line in enumerate(lines):
        if "%|" in line.text and (found := BAR.search(line.text)):
            yield place, int(found[1]), int(found[2]), _seconds(found[3])


def _with_steps(
    records: Sequence[_Record],
    bars: Sequence[Bar],
    summary: Mapping[str, float],
    stated: Mapping[str, int],
    notes: list[str],
) -> int | None:
    """Give the records the steps of the progress bar, else those that their epochs imply; return the total."""
    untold, total = [record for record in records if record.step is None], stated.get("total_steps")
    if not untold:
        return total
    if whole := total_of_bars(bars, total):
        found = steps_of([record.place for record in untold], [bar for bar in bars if bar[2] == whole])
        for record, (step, at_s) in zip(untold, found, strict=True):
            record.step, record.at_s = step, at_s
        return whole
    return _from_epochs(untold, summary, stated, notes)


def _with_timers(records: Sequence[_Record], timers: Sequence[Timer]) -> list[_Record]:
    """Return the records with the figures that DeepSpeed prints of their steps, and a record of each other such step.

    Times of progress bars are kept: they are of every record.
    """
    timed = any(record.at_s is not None for record in records)
    if not timers or (len(records) > 1 and any(record.step is None for record in records)):
        return [*records]
    if len(records) == 1 and records[0].step is None:
        records[0].step = max((one.step for one in timers if one.place < records[0].place), default=1)
    rows = sorted(records, key=lambda record: record.place)
    for one in timers:
        figures = {name: value for name, value in one.figures.items() if name != "seconds" or not timed}
        after = bisect_left(rows, one.place, key=lambda record: record.place)
        same = next((record for record in rows[max(0, after - 1) : after + 1] if record.step == one.step), None)
        if same is not None:
            same.of_deepspeed = {name: value for name, value in figures.items() if name != "lr"}
        elif not timed:
            row = _Record(one.line, {}, one.step, None)
            row.place, row.of_deepspeed = one.place, figures
            rows.insert(after, row)
    return rows


def _from_epochs(
    records: Sequence[_Record], summary: Mapping[str, float], stated: Mapping[str, int], notes: list[str]
) -> int | None:
    """Give the records the steps that their epochs and the length of the run imply; return the total."""
    runtime, rate, total = (
        summary.get("train_runtime"),
        summary.get("train_steps_per_second"),
        stated.get("total_steps"),
    )
    if total:
        length, source = Range(total, total), f"the {total:,} steps of the run"
    elif runtime and rate:
        length, source = total_of(runtime, rate), f"the final rate of {rate:g} steps/s"
    else:
        return None
    if (ends := summary.get("epoch")) is not None and ends > 0:
        in_epoch = per_epoch(length, ends)
    elif stated.get("examples") and stated.get("batch"):
        batches, rest = divmod(stated["examples"], stated["batch"])
        in_epoch, source = Range(batches, batches + bool(rest)), "the examples and the batch size"
    else:
        return total
    epochs = [record.figures["epoch"] for record in records if "epoch" in record.figures]
    found = derive(epochs, in_epoch) if len(epochs) == len(records) else None
    if found is None:
        return total
    last = max(found.steps)
    if total is None:
        ended = ends is not None and records[-1].figures["epoch"] >= ends and length.low <= last <= length.high
        total = last if ended else max(last, round(sum(length) / 2))
    for record, step in zip(records, found.steps, strict=True):
        record.step = step
        record.at_s = step * runtime / total if runtime else None
    about = "" if found.sure else "about "
    notes.append(
        f"the log has no step numbers: {about}{plural(found.every, 'step')} per record follow from the epochs and "
        f"{source}" + ("" if found.sure else "; the steps here are approximate")
    )
    return total


def _place_validations(validations: Sequence[_Record], records: Sequence[_Record]) -> None:
    """Give each validation the step of the last record before it: evaluations follow the step that they are due at."""
    places = [record.place for record in records]
    for one in validations:
        if one.step is not None:
            continue
        before = bisect_left(places, one.place)
        one.step = (records[before - 1].step or before) if before else 0


def _passed(text: str) -> float | None:
    """Return the seconds of a time in either form: 1:02:03, or 1h 2m 3s as ms-swift writes it."""
    if ":" in text:
        return _seconds(text)
    parts = WORDS.findall(text)
    return float(sum(int(count) * UNIT_S[unit] for count, unit in parts)) if parts else None


def _seconds(text: str) -> float | None:
    """Return the seconds of a time such as 1:02:03 or 02:03, with days before it."""
    days, _, clock = text.rpartition(",")
    total = 0.0
    for part in clock.strip().split(":"):
        if not part.isdigit():
            return None
        total = total * 60 + int(part)
    return total + 86400 * int(days.split()[0]) if days else total


def _state(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return a trainer_state.json; None for any other log."""
    if not any('"log_history"' in line.text for line in lines) or sum(len(line.text) for line in lines) > MAX_STATE:
        return None
    found = _decoded("\n".join(line.text for line in lines))
    return found if isinstance(found, dict) and isinstance(found.get("log_history"), list) else None


def _of_state(state: dict[str, Any], lines: Sequence[Line]) -> tuple[list[_Record], list[_Record]]:
    """Return the training records and the validations of a trainer_state.json."""
    starts = [line.number for line in lines if line.text.strip().startswith('"step":')]
    found: dict[str, list[_Record]] = {"loss": [], "eval_loss": []}
    for order, record in enumerate(state["log_history"]):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            continue
        figures = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
        for name, records in found.items():
            if name in figures:
                line = starts[order] if order < len(starts) else 1
                records.append(_Record(line, figures, record["step"], None))
    return found["loss"], found["eval_loss"]


def _decoded(text: str) -> Any:
    try:
        return json_text.loads(text)  # accepts the NaN that Python writes
    except ValueError:
        return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None

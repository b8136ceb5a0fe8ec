"""Reads a rehearsal's file to draw it: the JSON of `rehearse --out`, or the trace of `rehearse --trace`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.costs.timeline import ScheduledPass
from meshwright.errors import InputError
from meshwright.rehearsal.trace_file import KINDS, MICRO

FIELD = "rehearsal"
FIX = ("meshwright rehearse RECIPE --gpus 64xH100 --out rehearsal.json --trace step.json",)
MOST_RANKS = 1024
LETTERS = {name: letter for letter, name in KINDS.items()}


class LaneSpan(msgspec.Struct, frozen=True):
    """A collective, on the row of its kind of rank and axis."""

    lane: str
    name: str
    start_s: float
    end_s: float


class CollectiveSum(msgspec.Struct, frozen=True):
    """All collectives of one kind over one axis in a step."""

    axis: str
    kind: str
    count: float
    gib: float
    seconds: float
    pp_rank: int = 0


class RehearsalTimeline(msgspec.Struct, frozen=True):
    """The step of a rehearsal over time."""

    recipe: str
    cluster: str
    device: str
    step_s: float
    parts: dict[str, float]  # empty in a trace
    line: dict[str, Any] | None  # passes as the verb schedule returns them; None without a pipeline
    collectives: list[CollectiveSum]  # empty in a trace
    spans: list[LaneSpan]  # of a trace only


def read_timeline(text: str) -> RehearsalTimeline:
    """Read a file's text; raise InputError if it is not a rehearsal's."""
    try:
        found = json.loads(text.removeprefix("\ufeff"), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise _refused(f"is not valid JSON: {error}") from None
    if isinstance(found, dict) and found.get("kind") == "rehearsal":
        return _of_response(found)
    if isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
        return _of_trace(found)
    raise _refused("is neither a rehearsal's JSON nor its trace")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return float(text)


def _refused(reason: str) -> InputError:
    return InputError(reason, field=FIELD, fix=FIX)


class _Rank(msgspec.Struct, frozen=True):
    pp_rank: int
    collectives: list[CollectiveSum] = []


class _Response(msgspec.Struct, frozen=True):
    """The part of the response of rehearse that is drawn."""

    recipe: str
    cluster: str
    device: str
    step_s: float
    step_parts_s: dict[str, float]
    schedule: str
    passes: list[ScheduledPass]
    ranks: list[_Rank]


def _of_response(found: dict[str, Any]) -> RehearsalTimeline:
    try:
        read = msgspec.convert(found, _Response, strict=False)
    except msgspec.ValidationError as error:
        raise _refused(f"is not a rehearsal's JSON as rehearse --out writes it: {error}") from None
    sums = [msgspec.structs.replace(one, pp_rank=rank.pp_rank) for rank in read.ranks for one in rank.collectives]
    return RehearsalTimeline(
        read.recipe,
        read.cluster,
        read.device,
        _positive(read.step_s),
        {name: seconds for name, seconds in read.step_parts_s.items() if seconds > 0},
        _line(read.passes, read.schedule),
        sums,
        [],
    )


def _positive(step_s: float) -> float:
    if not step_s > 0:
        raise _refused(f"step_s must be a positive number, not {step_s}")
    return step_s


def _line(passes: Sequence[ScheduledPass], schedule: str) -> dict[str, Any] | None:
    """Return the passes as the verb schedule returns them; None without a pipeline."""
    if not passes:
        return None
    for one in passes:
        ordered = math.isfinite(one.end_s) and 0 <= one.start_s <= one.end_s
        if one.kind not in KINDS or not 0 <= one.rank < MOST_RANKS or not ordered:
            raise _refused(f"has a pass that cannot be drawn: {msgspec.json.encode(one).decode()}")
    ranks = max(one.rank for one in passes) + 1
    span = max(one.end_s for one in passes)
    if not span or not any(one.kind == "F" and one.end_s > one.start_s for one in passes):
        raise _refused("has no forward pass that takes time")
    micro_batches = len({one.micro_batch for one in passes})
    busy = sum(one.end_s - one.start_s for one in passes)
    return {
        "passes": [msgspec.structs.asdict(one) for one in passes],
        "span_s": span,
        "ranks": ranks,
        "chunks": len({one.chunk for one in passes if one.rank == 0}) or 1,
        "schedule": schedule or "rehearsed passes",
        "micro_batches": micro_batches,
        "followed": micro_batches,
        "idle_share": max(1 - busy / (ranks * span), 0.0),
    }


def _of_trace(found: dict[str, Any]) -> RehearsalTimeline:
    about = found.get("otherData")
    if not (isinstance(about, dict) and isinstance(about.get("recipe"), str) and "step_s" in about):
        raise _refused("is a trace of another program: it does not name a rehearsed recipe")
    try:
        events = msgspec.convert([one for one in found["traceEvents"] if _is_span(one)], list[_Event], strict=False)
        names, step_s = _names(found["traceEvents"]), float(about["step_s"])
        passes = [one.as_pass() for one in events if one.is_pass]
    except (msgspec.ValidationError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _refused(f"is not a trace as rehearse --trace writes it: {error}") from None
    spans = [one.as_span(names) for one in events if not one.is_pass]
    if any(not 0 <= one.start_s <= one.end_s < math.inf for one in spans):
        raise _refused("has a collective whose time is negative or not a number")
    cluster, device = str(about.get("cluster", "")), str(about.get("device", ""))
    return RehearsalTimeline(about["recipe"], cluster, device, _positive(step_s), {}, _line(passes, ""), [], spans)


class _Event(msgspec.Struct, frozen=True):
    """A span of a trace, in microseconds."""

    name: str
    ts: float
    dur: float
    pid: int
    tid: int
    args: dict[str, Any] = {}

    @property
    def is_pass(self) -> bool:
        return "micro batch" in self.args

    def as_pass(self) -> ScheduledPass:
        kind = LETTERS.get(self.name.rpartition(" ")[0], self.name)
        start, end = self.ts / MICRO, (self.ts + self.dur) / MICRO
        return ScheduledPass(self.pid, kind, int(self.args["chunk"]), int(self.args["micro batch"]), start, end)

    def as_span(self, names: dict[tuple[int, int], str]) -> LaneSpan:
        lane = names.get((self.pid, self.tid), f"{self.pid}.{self.tid}")
        return LaneSpan(lane, self.name, self.ts / MICRO, (self.ts + self.dur) / MICRO)


def _is_span(event: Any) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X"


def _names(events: Sequence[Any]) -> dict[tuple[int, int], str]:
    """Return the name of every row by process and thread."""
    found: dict[tuple[int, int], str] = {}
    processes = {
        one["pid"]: str(one["args"]["name"])
        for one in events
        if isinstance(one, dict) and one.get("ph") == "M" and one.get("name") == "process_name"
    }
    for one in events:
        if isinstance(one, dict) and one.get("ph") == "M" and one.get("name") == "thread_name":
            found[one["pid"], one["tid"]] = f"{processes.get(one['pid'], one['pid'])}: {one['args']['name']}"
    return found

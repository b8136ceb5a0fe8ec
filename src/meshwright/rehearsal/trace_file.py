"""A rehearsal as a trace for Perfetto and chrome://tracing: passes and collectives of every kind of rank."""

from __future__ import annotations

from typing import Any

from meshwright.rehearsal.types import RankRehearsal, Rehearsal

MICRO = 1e6  # microseconds per second
KINDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
COLORS = {"F": "thread_state_running", "B": "thread_state_runnable", "I": "thread_state_iowait", "W": "generic_work"}


def chrome_trace(found: Rehearsal) -> dict[str, Any]:
    """Return the trace: with a pipeline a process per rank with its passes, else the step with its collectives."""
    events: list[dict[str, Any]] = []
    stages = max((one.rank for one in found.passes), default=-1) + 1
    for rank in range(stages):
        events += _names(rank, f"pipeline rank {rank}", {0: "passes"})
    for one in found.passes:
        name = f"{KINDS[one.kind]} {one.micro_batch}"
        place = {"pid": one.rank, "tid": 0, "cname": COLORS[one.kind]}
        arguments = {"micro batch": one.micro_batch, "chunk": one.chunk}
        events.append(_span(name, one.start_s, one.end_s, place, arguments))
    for kind in found.ranks:
        events += _collectives(kind, stages)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "recipe": found.recipe,
            "cluster": found.cluster,
            "step_s": found.step_s,
            "device": found.device,
            "note": "collectives are simulated; in a pipeline they are those of the rank run alone, without its bubble",
        },
    }


def _collectives(rank: RankRehearsal, stages: int) -> list[dict[str, Any]]:
    """Return a rank's collectives, one row per axis, in a process of their own."""
    axes = sorted({one.axis for one in rank.spans})
    if not axes:
        return []
    process = stages + rank.pp_rank
    name = f"collectives of rank {rank.rank}" + (", run alone" if stages else "")
    events = _names(process, name, dict(enumerate(axes)))
    for one in rank.spans:
        place = {"pid": process, "tid": axes.index(one.axis)}
        events.append(_span(f"{one.axis} {one.kind}", one.start_s, one.end_s, place, {"GiB": round(one.gib, 6)}))
    return events


def _names(process: int, name: str, threads: dict[int, str]) -> list[dict[str, Any]]:
    found = [{"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}]
    return found + [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": text}}
        for number, text in threads.items()
    ]


def _span(name: str, start_s: float, end_s: float, place: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "ts": round(MICRO * start_s, 3),
        "dur": round(MICRO * max(end_s - start_s, 0.0), 3),
        "args": arguments,
        **place,
    }

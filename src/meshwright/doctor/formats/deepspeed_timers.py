"""Steps that DeepSpeed prints among the records of a trainer without step numbers: their times, memory and rate."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from meshwright.doctor.formats.deepspeed import HINTS, PEAK, RATE, STEP
from meshwright.doctor.formats.derived_steps import ROUND
from meshwright.doctor.formats.text import Line, number, of_one_rank, positive, time_of


class Timer:
    """One step of DeepSpeed's messages: its place among the lines, its time and its figures."""

    def __init__(self, place: int, line: int, step: int, at_s: float | None) -> None:
        self.place, self.line, self.step, self.at_s = place, line, step, at_s
        self.figures: dict[str, Any] = {}
        self.samples_per_s: float | None = None


def timers_of(lines: Sequence[Line], batch: int, starts: Iterable[int]) -> list[Timer]:
    """Return the steps that DeepSpeed prints, with the seconds of one step; `starts` are places where a run starts."""
    places, found = {id(line): place for place, line in enumerate(lines)}, list[Timer]()
    for line, match in of_one_rank(lines, STEP, HINTS):
        if match is None:
            continue
        step = int(match["step"] or match["timed"])
        if not found or found[-1].step != step:
            found.append(Timer(places[id(line)], line.number, step, time_of(line.text)))
        if (rate := number(match["lr"])) is not None:
            found[-1].figures["lr"] = rate
        if peak := PEAK.search(line.text):
            found[-1].figures["memory_gib"] = number(peak[1])
        if speed := RATE.search(line.text):
            found[-1].samples_per_s = positive(speed[1])
    begins = sorted(starts)
    for one in found:
        if batch and one.samples_per_s:
            one.figures["seconds"] = batch / one.samples_per_s  # of this step, without its wait for data
    for before, now in pairwise(found):
        same = bisect_right(begins, before.place) == bisect_right(begins, now.place)
        if same and before.at_s is not None and now.at_s is not None and now.step > before.step:
            passed = now.at_s - before.at_s
            now.figures |= {"seconds": passed / (now.step - before.step)} if passed > 0 else {}
    return found


def steps_of_starts(records: Sequence[int], timers: Sequence[Timer], starts: Sequence[int]) -> list[int] | None:
    """Return the steps of records by their places, for each start of the run; None if those of one do not follow."""
    found = list[int]()
    for begin, end in pairwise([-1, *starts, math.inf]):
        rows = [place for place in records if begin <= place < end]
        steps = steps_between(rows, [one for one in timers if begin <= one.place < end]) if rows else []
        if steps is None:
            return None
        found += steps
    return found


def steps_between(records: Sequence[int], timers: Sequence[Timer]) -> list[int] | None:
    """Return the steps of a start's records by their places: multiples of one number; None if none or several fit.

    DeepSpeed prints a step before the trainer logs it: a record is of the step printed last, or of one before the next.
    """
    steps, places = [one.step for one in timers], [one.place for one in timers]
    if len(records) < 2 or not steps or any(b <= a for a, b in pairwise(steps)):
        return None
    after = [bisect_right(places, place) for place in records]
    open_end = steps[-1] + max((b - a for a, b in pairwise(steps)), default=steps[-1])
    ranges = [(steps[i - 1] if i else 1, (steps[i] if i < len(steps) else open_end) - 1) for i in after]
    found = _multiples(ranges)
    if found is None and ranges[0][0] == 1 and len(ranges) > 2 and (rest := _multiples(ranges[1:])):
        return [1, *rest]  # logging_first_step adds a record of step 1
    return found


def _multiples(ranges: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return rising multiples of one number, each in its range; the roundest number if several fit."""
    (first_low, first_high), (last_low, last_high), between = ranges[0], ranges[-1], len(ranges) - 1
    least = max(1, math.ceil((last_low - first_high) / between))
    fitting = dict[int, int]()
    for every in range(least, (last_high - first_low) // between + 1):
        low = max(-(-low // every) - at for at, (low, _) in enumerate(ranges))
        high = min(high // every - at for at, (_, high) in enumerate(ranges))
        if low <= high and high >= 1:
            fitting[every] = max(1, low)
    every = next((one for divisor in ROUND for one in fitting if one % divisor == 0), 0)
    return [every * (fitting[every] + at) for at in range(len(ranges))] if every else None

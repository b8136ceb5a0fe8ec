"""Steps of a log whose records only a progress bar numbers, which is drawn again after a record or before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

Bar = tuple[int, int, int, float | None]
"""Place among the lines, step, total and elapsed seconds of a progress bar."""
REDRAWN = 2  # lines after a record in which its bar is drawn again


def total_of_bars(bars: Sequence[Bar], total: int | None) -> int:
    """Return the total of the progress bar of training; 0 if it does not advance in the log."""
    counts = {bar[2] for bar in bars}
    whole = total if total in counts else max(counts, default=0)
    return whole if whole and len({bar[1] for bar in bars if bar[2] == whole}) > 1 else 0


def steps_of(records: Sequence[int], bars: Sequence[Bar]) -> Iterator[tuple[int, float | None]]:
    """Yield the step and the elapsed seconds of each record, by its place: the bar after it, or the last one before.

    In a log that keeps a few bars, most records have one far away: the time is then another step's.
    """
    places = [bar[0] for bar in bars]
    following = [_bar_of(record, bars, places) for record in records]
    preceding = _bars_before(records, bars, places)
    # a bar that only the next record redraws is that of the next step: the last record would repeat its neighbor's
    found = preceding if preceding and not _rises(following) and _rises(preceding) else following
    last = 0
    for bar, latest in zip(found, _latest_steps(records, bars, places), strict=True):
        last = max(min(bar[1], latest), last + 1)
        yield last, bar[3] if last == bar[1] else None


def _latest_steps(records: Sequence[int], bars: Sequence[Bar], places: Sequence[int]) -> list[int]:
    """Return the latest step of each record: that of the next bar, or the one before the next record's.

    A bar near two records, as in a log that keeps every twentieth, is that of the later one.
    """
    restarted = any(second[1] < first[1] for first, second in pairwise(bars))
    total = bars[-1][2]
    if restarted:
        return [total] * len(records)
    found, latest = [], total
    for record in reversed(records):
        after = bisect_right(places, record)
        latest = min(latest, bars[after][1] if after < len(bars) else total)
        found.append(latest)
        latest -= 1
    return found[::-1]


def _bar_of(record: int, bars: Sequence[Bar], places: Sequence[int]) -> Bar:
    after = bisect_right(places, record)
    redrawn = after < len(bars) and places[after] <= record + REDRAWN
    return bars[after] if redrawn or not after else bars[after - 1]


def _bars_before(records: Sequence[int], bars: Sequence[Bar], places: Sequence[int]) -> list[Bar]:
    """Return the bar right before each record; empty if one of them has none there."""
    at = [bisect_left(places, record) - 1 for record in records]
    near = all(i >= 0 and places[i] >= record - REDRAWN for i, record in zip(at, records, strict=True))
    return [bars[i] for i in at] if near else []


def _rises(bars: Sequence[Bar]) -> bool:
    return all(first[1] < second[1] for first, second in pairwise(bars))

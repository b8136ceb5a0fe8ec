"""Find the smallest GPU count that meets a deadline between the counts that a sizing tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from math import inf

from meshwright.planner.divisors import undivided_factor

MAX_REFINED_COUNTS = 12  # each takes a search of 20 to 200 ms
MOST_EFFICIENT = 1.05  # GPUs are hardly this much faster than the best of the tried counts


def refine_deadline(
    days: Mapping[int, float],
    deadline: float,
    node: int,
    batch: int,
    limit: int,
    days_on: Callable[[int], float | None],
) -> list[int]:
    """Try whole nodes below the smallest count in time, and return the counts that were tried.

    `days` has the time of every count that fits. A larger count is often slower, because the batch divides over fewer
    of its GPUs and the rest has to be pipeline stages. So the counts are grouped by that factor: within a group more
    GPUs are faster, and the first in time is found by bisection.
    """
    if not days:
        return []
    first = min((count for count, taken in days.items() if taken <= deadline), default=None)
    if first is None:  # more GPUs than the fastest count has are slower: look around it
        fastest = min(days, key=lambda count: days[count])
        first = min((count for count in days if count > fastest), default=limit + 1)
    least = min(count * taken for count, taken in days.items()) / deadline / MOST_EFFICIENT
    counts = [n for n in range(-(-int(least) // node) * node or node, first, node) if n not in days]
    tried: dict[int, float] = {}

    def in_time(count: int) -> bool:
        if count not in tried:
            taken = days_on(count)
            tried[count] = inf if taken is None else taken
        return tried[count] <= deadline

    ordered = sorted(counts, key=lambda count: (undivided_factor(batch, count), count))
    for _, same in groupby(ordered, key=lambda count: undivided_factor(batch, count)):
        group = [count for count in same if count < first]
        low, high = 0, len(group)
        while low < high and len(tried) < MAX_REFINED_COUNTS:
            middle = (low + high) // 2
            if in_time(group[middle]):
                first, high = group[middle], middle
            else:
                low = middle + 1
    return sorted(tried)

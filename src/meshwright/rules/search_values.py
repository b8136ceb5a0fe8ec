"""Candidate values for fixes, closest to the current value first, and predicates that accept arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, reduce
from math import log
from operator import or_
from typing import Any

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix

Values = Callable[[Case], list[Any]]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    return list(_divisors(number))


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def nearest_first(values: Sequence[int], current: int) -> list[int]:
    """Sort the values by their ratio to the current one; on a tie, the smaller first."""
    return sorted(values, key=lambda v: (abs(log(max(v, 1) / max(current, 1))), v))


def _possible(case: Case, name: str) -> list[int]:
    """Return the divisors of the GPU count; tensor parallelism stays inside the fast links of a node."""
    most = int(case.nvlink_domain) if name == "tp" else int(case.world)
    return [d for d in divisors(int(case.world)) if d <= most]


def degrees(name: str) -> Values:
    """Return possible degrees, closest to the current one first."""
    return lambda case: nearest_first(_possible(case, name), int(getattr(case, name)))


def larger(name: str) -> Values:
    """Return possible degrees above the current one, smallest first."""
    return lambda case: [d for d in _possible(case, name) if d > int(getattr(case, name))]


def smaller(name: str) -> Values:
    """Return possible degrees below the current one, largest first."""
    return lambda case: [d for d in reversed(_possible(case, name)) if d < int(getattr(case, name))]


def divisors_of(name: str, field: str) -> Values:
    """Return divisors of one of the case's numbers, closest to the field's current value first."""
    return lambda case: nearest_first(divisors(max(int(getattr(case, name)), 1)), int(getattr(case, field)))


def multiples(field: str, unit: Callable[[Case], Column]) -> Values:
    """Return the multiples of a unit on both sides of the field's current value, the nearer one first."""

    def both_sides(case: Case) -> list[int]:
        step = max(int(unit(case)), 1)
        current = int(getattr(case, field))
        lower = current // step * step
        around = sorted((lower, lower + step), key=lambda value: abs(value - current))
        return [value for value in around if value > 0]

    return both_sides


def nearest_split(batch: int, micro: int, ranks: int) -> tuple[int, int]:
    """Return the batch and micro batch that some ranks can run, next to those of a file.

    The batch stays if a smaller micro batch splits it: another batch is another experiment. Otherwise it is the nearest
    multiple of the ranks; of two that are as near, the one that keeps more of the micro batch.
    """
    lower = batch // ranks * ranks
    around = [batch] if batch % ranks == 0 else [value for value in (lower, lower + ranks) if value > 0]
    splits = [(value, max(one for one in divisors(value // ranks) if one <= micro)) for value in around]
    return min(splits, key=lambda split: (abs(split[0] - batch), -split[1]))


def without(field: str, unwanted: Callable[[Case], Collection[str]]) -> Values:
    """Return the field's list without the unwanted names."""
    return lambda case: [tuple(name for name in getattr(case, field) if name not in unwanted(case))]


def even_stages(case: Case) -> list[tuple[int, ...]]:
    """Return layers per stage chunk, as even as possible; earlier chunks get the extra layers."""
    base, extra = divmod(int(case.layers), int(case.stages))
    return [(base + 1,) * extra + (base,) * (int(case.stages) - extra)] if base else []


# Turning off a mesh axis also resets the fields that depend on it.
NO_PP: Fix = {
    "pp": [1],
    "vp": [1],
    "pp_schedule": ["1f1b"],
    "pp_micro_batches": [0],
    "stage_layers": [()],
    "embedding_as_layer": [False],
    "head_as_layer": [False],
}
NO_TP: Fix = {"tp": [1], "sp": [False], "tp_comm_overlap": [False]}
NO_CP: Fix = {"cp": [1]}
NO_GRAPHS: Fix = {"cuda_graphs": ["none"], "cuda_graph_scope": [()]}
PLAIN_1F1B: Fix = {"pp_schedule": ["1f1b"], "vp": [1], "stage_layers": [()]}
NO_EP: Fix = {"ep": [1], "etp": [1], "ep_overlap": [False]}


def one_of(value: Column, names: Collection[str]) -> Column:
    """Return where a value, or an array of values, is one of the names."""
    if not isinstance(value, np.ndarray):
        return np.bool_(value in names)
    return reduce(or_, (value == name for name in names), np.False_)


def not_(value: Column) -> Column:
    """Return the logical not of a boolean or a boolean array."""
    return np.logical_not(value)

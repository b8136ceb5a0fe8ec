"""Values worth trying when a field must change, nearest to the present one first; and tests over columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from math import log
from operator import or_
from typing import Any

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix

Values = Callable[[Case], list[Any]]


def divisors(number: int) -> list[int]:
    """All divisors of a number, smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_first(values: Sequence[int], present: int) -> list[int]:
    """The values ordered by ratio to the present one; of two as near, the smaller first."""
    return sorted(values, key=lambda v: (abs(log(max(v, 1) / max(present, 1))), v))


def degrees(name: str) -> Values:
    """Divisors of the GPU count, nearest to the present degree first."""
    return lambda case: nearest_first(divisors(int(case.world)), int(getattr(case, name)))


def larger(name: str) -> Values:
    """Divisors of the GPU count above the present degree, smallest first."""
    return lambda case: [d for d in divisors(int(case.world)) if d > int(getattr(case, name))]


def smaller(name: str) -> Values:
    """Divisors of the GPU count below the present degree, largest first."""
    return lambda case: [d for d in reversed(divisors(int(case.world))) if d < int(getattr(case, name))]


def divisors_of(name: str, field: str) -> Values:
    """Divisors of one of the case's numbers, nearest to the field's present value first."""
    return lambda case: nearest_first(divisors(max(int(getattr(case, name)), 1)), int(getattr(case, field)))


def multiples(field: str, unit: Callable[[Case], Column]) -> Values:
    """The multiples of a unit on both sides of the field's present value, the lower one first."""

    def around(case: Case) -> list[int]:
        step = max(int(unit(case)), 1)
        lower = int(getattr(case, field)) // step * step
        return [value for value in (lower, lower + step) if value > 0]

    return around


def without(field: str, unwanted: Callable[[Case], Collection[str]]) -> Values:
    """The present list less what does not belong in it."""
    return lambda case: [tuple(name for name in getattr(case, field) if name not in unwanted(case))]


def even_stages(case: Case) -> list[tuple[int, ...]]:
    """Layers per stage chunk, as even as they can be; the earlier chunks get the extra ones."""
    base, extra = divmod(int(case.layers), int(case.stages))
    return [(base + 1,) * extra + (base,) * (int(case.stages) - extra)] if base else []


# Whole axes taken back together with what depends on them.
NO_PP: Fix = {
    "pp": [1],
    "vp": [1],
    "pp_schedule": ["1f1b"],
    "stage_layers": [()],
    "embedding_as_layer": [False],
    "head_as_layer": [False],
}
NO_TP: Fix = {"tp": [1], "sp": [False], "tp_comm_overlap": [False]}
NO_CP: Fix = {"cp": [1]}
NO_EP: Fix = {"ep": [1], "etp": [1], "ep_overlap": [False]}


def one_of(value: Column, names: Collection[str]) -> Column:
    """Where a value, or a column of values, is one of the names."""
    return reduce(or_, (value == name for name in names), np.False_)


def not_(value: Column) -> Column:
    """Not, for a truth or a column of them."""
    return np.logical_not(value)

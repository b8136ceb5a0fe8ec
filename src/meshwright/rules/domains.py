"""Values worth trying when a field must change, nearest to the present one first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

from meshwright.recipes.case import Case


def divisors(number: int) -> list[int]:
    """All divisors of a number, smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_first(values: Sequence[int], present: int) -> list[int]:
    """The values ordered by ratio to the present one; of two as near, the smaller first."""
    return sorted(values, key=lambda v: (abs(log(max(v, 1) / max(present, 1))), v))


def degrees(name: str) -> Callable[[Case], list[int]]:
    """Divisors of the GPU count, nearest to the present degree first."""
    return lambda case: nearest_first(divisors(int(case.world)), int(getattr(case, name)))


def divisors_of(name: str, field: str) -> Callable[[Case], list[int]]:
    """Divisors of one of the case's numbers, nearest to the field's present value first."""
    return lambda case: nearest_first(divisors(max(int(getattr(case, name)), 1)), int(getattr(case, field)))

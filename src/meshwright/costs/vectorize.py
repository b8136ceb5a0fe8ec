"""Helpers for values that are one number or a numpy column of candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwright.recipes.case import VECTORIZED_NAMES, Case

Column = Any  # int, float, bool or str, or a numpy array of them

GIB = 1024**3
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def shape_of(case: Case) -> tuple[int, ...]:
    """Return the common shape of a case's columns; () if every value is scalar."""
    columns = [value for value in (getattr(case, name) for name in VECTORIZED_NAMES) if isinstance(value, np.ndarray)]
    return np.broadcast_shapes(*(column.shape for column in columns)) if columns else ()


def pick(column: Column, table: Mapping[str, float]) -> Column:
    """Return the table's number for each name in the column."""
    if isinstance(column, str):
        return table[column]
    out = np.zeros(np.shape(column))
    for name, value in table.items():
        if value:
            out[column == name] = value
    return out


def any_of(column: Column, *names: str) -> Column:
    """Return where the column equals one of the names."""
    found = column == names[0]
    for name in names[1:]:
        found = found | (column == name)
    return found


_NUMPY = (np.ndarray, np.generic)  # a union in a function is created in every call


def plain(value: Column) -> Column:
    """Convert a zero-dimensional value to a Python number; columns stay as they are."""
    return value.item() if isinstance(value, _NUMPY) and np.ndim(value) == 0 else value


# numpy's functions cost microseconds per scalar; an estimate of one layout calls a hundred of them.


def anywhere(condition: Column) -> bool:
    """Return whether a condition holds for any candidate."""
    return condition if isinstance(condition, bool) else bool(np.any(condition))


def everywhere(condition: Column) -> bool:
    """Return whether a condition holds for every candidate."""
    return condition if isinstance(condition, bool) else bool(np.all(condition))


_FLAG = (bool, np.bool_)


def where(condition: Column, yes: Column, no: Column) -> Column:
    """numpy.where, with a plain branch for a scalar condition."""
    if isinstance(condition, _FLAG):
        return yes if condition else no
    return np.where(condition, yes, no)


def larger(one: Column, other: Column) -> Column:
    """Return the elementwise maximum."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return one if one >= other else other


def smaller(one: Column, other: Column) -> Column:
    """Return the elementwise minimum."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return one if one <= other else other

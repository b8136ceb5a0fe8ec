"""Small helpers for values that are one number or a numpy column of candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwright.recipes.case import Case

Column = Any  # int, float, bool or str, or a numpy array of them

GIB = 1024**3
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Every name of a case that a search may turn into a column.
LAYOUT_NAMES = (
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "etp",
    "dp_shard",
    "dp_replicate",
    "sp",
    "micro_batch_size",
    "recompute",
    "strategy",
    "pp_schedule",
    "offload",
    "cp_comm",
    "world",
    "global_batch_size",
    "seq_length",
    "recompute_layers",
)


def shape_of(case: Case) -> tuple[int, ...]:
    """The common shape of a case's columns; () when every name holds one value."""
    columns = [value for value in (getattr(case, name) for name in LAYOUT_NAMES) if isinstance(value, np.ndarray)]
    return np.broadcast_shapes(*(column.shape for column in columns)) if columns else ()


def pick(column: Column, table: Mapping[str, float]) -> Column:
    """The table's number for each name in the column."""
    if isinstance(column, str):
        return table[column]
    out = np.zeros(np.shape(column))
    for name, value in table.items():
        if value:
            out[column == name] = value
    return out


def any_of(column: Column, *names: str) -> Column:
    """Where the column holds one of the names."""
    found = column == names[0]
    for name in names[1:]:
        found = found | (column == name)
    return found


def plain(value: Column) -> Column:
    """A Python number for a value without a shape; columns stay what they are."""
    return value.item() if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0 else value


# numpy's own functions cost microseconds for one number; an estimate of one layout calls a hundred of them.


_NUMBER = (float, int, np.integer)


def where(condition: Column, yes: Column, no: Column) -> Column:
    """numpy.where, and a plain branch for one condition."""
    if isinstance(condition, bool | np.bool_):
        return yes if condition else no
    return np.where(condition, yes, no)


def larger(one: Column, other: Column) -> Column:
    """The larger of two values, column by column."""
    if isinstance(one, _NUMBER) and isinstance(other, _NUMBER):
        return one if one >= other else other
    return np.maximum(one, other)


def smaller(one: Column, other: Column) -> Column:
    """The smaller of two values, column by column."""
    if isinstance(one, _NUMBER) and isinstance(other, _NUMBER):
        return one if one <= other else other
    return np.minimum(one, other)

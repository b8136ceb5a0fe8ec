"""Micro batches of 5, 7, 10 and others with prime factors other than 2 and 3, for batches that nothing near divides.

Five samples per rank are one micro batch of 5 or five of 1: without 5, every layout that leaves 5 looks slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np

from meshwright.recipes.case import Case

LARGEST = 16  # samples
NEAR = 1.6  # times smaller or larger: micro batches about as fast


def odd_micro_batches(sizes: Sequence[int], case: Case) -> tuple[int, ...]:
    """Return the odd sizes that divide a global batch.

    Spaces of a few small sizes, which compare batches with each other, have none for any of them.
    """
    odd = (size for size in range(5, LARGEST + 1) if _is_odd(size))
    return tuple(size for size in odd if np.any(case.global_batch_size % size == 0)) if max(sizes) >= LARGEST else ()


def has_near_size(batch: Case, sizes: Sequence[int]) -> Any:
    """Return where a micro batch is odd and another of these sizes, about as large, divides a rank's samples too."""
    found = np.zeros(batch.micro_batch_size.shape, dtype=bool)
    for odd in filter(_is_odd, sizes):
        for near in (size for size in sizes if not _is_odd(size) and odd / NEAR <= size <= odd * NEAR):
            found |= (batch.micro_batch_size == odd) & (batch.global_batch_size % (near * batch.dp) == 0)
    return found


def _is_odd(size: int) -> bool:
    return gcd(size, 5 * 7 * 11 * 13) > 1

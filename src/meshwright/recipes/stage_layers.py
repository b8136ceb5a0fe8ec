"""Layers of each pipeline stage: as a recipe lists them, or balanced in every layout of a search."""

from __future__ import annotations


class Balanced(tuple[int, ...]):
    """Stands for the stages of all layouts of a search: even where the layers divide, else balanced.

    A search needs no list per layout, so all pipelines are one batch.
    """


BALANCED = Balanced()


def balanced_stages(layers: int, chunks: int) -> tuple[int, ...]:
    """Return layers per chunk if they do not divide: the first and last, with embedding and head, get fewer."""
    low, more = divmod(layers, chunks)
    start = (chunks - more + 1) // 2 if chunks - more > 1 else 0
    return tuple(low + (start <= i < start + more) for i in range(chunks))


def stages_of(given: tuple[int, ...], layers: int, pp: int) -> tuple[int, ...]:
    """Return the listed layers of one pipeline; empty if every stage has the same number."""
    if not isinstance(given, Balanced):
        return given
    return balanced_stages(layers, pp) if layers % pp else ()

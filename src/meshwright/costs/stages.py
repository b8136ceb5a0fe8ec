"""Layers of four representative pipeline stages: first, heaviest middle, fullest middle and last.

These bound the peak: the first keeps the most micro batches and the embedding, the last has the head and the loss (a
V-shaped schedule has them on the first rank), and an uneven model may have its heaviest layers in between, or lighter
ones where more micro batches are kept. Costs are computed for all four together, along a leading axis, and the worst is
reported.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.costs.vectorize import Column, any_of, shape_of, where
from meshwright.models import Layer, ModelSpec
from meshwright.recipes.capabilities import V_SHAPED
from meshwright.recipes.case import Case
from meshwright.recipes.stage_layers import stages_of

FIRST, MIDDLE, FULLEST, LAST = range(4)


class Stages(msgspec.Struct, frozen=True):
    """Pipeline stages: leading axis first, heaviest and fullest middle, last (or all); then the candidates."""

    index: Column  # position in the pipeline, 0 = first
    first: Column  # has the embedding
    last: Column  # has the head and computes the loss
    layers: tuple[tuple[Layer, Column], ...]  # each layer type and its count per stage

    @property
    def count(self) -> Column:
        """Layers of each stage."""
        return sum(number for _, number in self.layers)


def trains_mtp(case: Case) -> bool:
    """Return whether the multi-token-prediction modules are trained."""
    return case.model.mtp_layer is not None and case.mtp_loss > 0


def stages(case: Case, every: bool = False) -> Stages:
    """Return the representative stages of every candidate, cached per case; or every stage of one layout."""
    return _stages(case, True) if every else case.cached(_stages)  # memory and time both need the three


def _stages(case: Case, every: bool = False) -> Stages:
    """Compute stage contents once per model and distinct pipeline shape."""
    shape, model = shape_of(case), case.model
    v_shaped = any_of(case.pp_schedule, *V_SHAPED)
    keys = (case.pp, case.vp, v_shaped, case.embedding_as_layer, case.head_as_layer)
    if shape:
        flat = np.stack([np.broadcast_to(key, shape).reshape(-1) for key in keys]).astype(np.int64)
        code = flat[0] * 4096 + flat[1] * 8 + flat[2] * 4 + flat[3] * 2 + flat[4]
        _, at, inverse = np.unique(code, return_index=True, return_inverse=True)
        shapes = [tuple(map(int, flat[:, i])) for i in at]
        tables = np.stack([_table(model, _given(case, one[0]), every, *one) for one in shapes], axis=-1)
        spread = tables[..., inverse].reshape(*tables.shape[:-1], *shape)  # (1 + kinds, stages, *shape)
    else:
        spread = _table(model, _given(case, int(case.pp)), every, *map(int, keys))
    index = spread[0]
    last = index == where(v_shaped, 0, index[-1])  # a V ends on the rank where it starts
    layers = [(group.layer, spread[1 + i]) for i, group in enumerate(model.groups)]
    if trains_mtp(case) and model.mtp_layer is not None:
        layers.append((model.mtp_layer, model.mtp_layers * last))
    return Stages(index, index == 0, last, tuple(layers))


def _given(case: Case, pp: int) -> tuple[int, ...]:
    return stages_of(case.stage_layers, int(case.layers), pp)


def _table(model: ModelSpec, *shape: Any) -> NDArray[np.float64]:
    """Return the stages of one pipeline shape, cached on the model."""
    known: dict[tuple[Any, ...], NDArray[np.float64]] = model.__dict__.setdefault("_stage_tables", {})
    if shape not in known:
        known[shape] = _chosen_stages(model, *shape)
    return known[shape]


def _chosen_stages(
    model: ModelSpec, given: tuple[int, ...], every: bool, pp: int, vp: int, v_shaped: int, embedding: int, head: int
) -> NDArray[np.float64]:
    """Return a table: position in the pipeline, then the number of layers of each group; columns are stages."""
    counts = _stage_counts(model, chunk_layers(model.num_layers, given, pp * vp, embedding, head), pp, bool(v_shaped))
    weight = counts @ np.array([group.layer.params(model.hidden) for group in model.groups], dtype=float)
    inner = weight[1:-1]
    middle = 1 + int(np.argmax(inner)) if pp > 2 else 0
    fullest = 1 + int(np.argmax(inner * np.arange(pp - 1, 1, -1))) if pp > 2 else 0
    chosen = list(range(pp)) if every else [0, middle, fullest, pp - 1]
    return np.vstack([np.array(chosen, dtype=float), counts[chosen].T])


def chunk_layers(layers: int, given: tuple[int, ...], chunks: int, embedding: int, head: int) -> NDArray[np.int64]:
    """Return the layers of each stage chunk: as given, or even with earlier chunks taking the remainder."""
    if len(given) == chunks:
        return np.array(given)
    low, more = divmod(layers + embedding + head, chunks)
    sizes: NDArray[np.int64] = low + (np.arange(chunks) < more).astype(np.int64)
    sizes[0] -= embedding
    sizes[-1] -= head
    return np.maximum(sizes, np.int64(0))


def _stage_counts(model: ModelSpec, sizes: NDArray[np.int64], pp: int, v_shaped: bool) -> NDArray[np.float64]:
    """Return layers of each group (columns) on each stage (rows), from a running count over the layer order."""
    kind = np.zeros((model.num_layers + 1, len(model.groups)))
    for i, group in enumerate(model.groups):
        kind[np.array(group.places, dtype=int) + 1, i] = 1
    running = np.cumsum(kind, axis=0)
    ends = np.minimum(np.cumsum(sizes), model.num_layers)
    per_chunk = running[ends] - running[np.concatenate([[0], ends[:-1]])]
    chunk = np.arange(len(sizes))
    lap, place = np.divmod(chunk, pp)
    stage = np.where(v_shaped & (lap % 2 == 1), pp - 1 - place, place)
    counts = np.zeros((pp, len(model.groups)))
    np.add.at(counts, stage, per_chunk)
    return counts

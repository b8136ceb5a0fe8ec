"""How far a model can be split: the largest degree of every axis that an engine's rules allow, and what limits it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from meshwright import clusters, rules
from meshwright.models import ModelSpec
from meshwright.planner.baseline import with_engine_strategy
from meshwright.planner.space import DEGREES, MIN_CONTEXT_CHUNK
from meshwright.recipes.case import Case
from meshwright.recipes.stage_layers import BALANCED
from meshwright.recipes.types import Data, Engine, Recipe

MOST = 1024  # ranks of one axis that are tried
GPUS = f"{MOST}xH100"
SUBJECTS = ("heads", "moe", "pipeline", "sequence", "engine", "dispatch")
"""Subjects of rules that depend on the model; the others are about batches, links and memory."""
AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}


class Split(msgspec.Struct, frozen=True):
    """The degrees of one axis that a model allows on an engine."""

    axis: str
    largest: int
    degrees: tuple[int, ...]  # that are powers of two, or divide the largest
    limit: str  # why no larger degree works; empty if none was tried
    rule: str  # that says so


def splits(recipe: Recipe, model: ModelSpec, engine: Engine, seq: int) -> tuple[Split, ...]:
    """Return the splits of a model on an engine, one axis at a time."""
    plain = msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data or Data(), seq_length=seq))
    case = Case(with_engine_strategy(plain, engine), model, clusters.cluster(GPUS), engine)
    return tuple(_split(case, axis, seq) for axis in DEGREES)


def _split(case: Case, axis: str, seq: int) -> Split:
    tried = np.arange(1, MOST + 1)
    more: dict[str, Any] = {"stage_layers": BALANCED} if axis == "pp" else {}
    column = case.replace(**{axis: tried, "world": tried}, **more)
    masks = {id: mask for id, mask in rules.illegal_by_rule(column).items() if id.partition(".")[0] in SUBJECTS}
    ok = ~np.logical_or.reduce(list(masks.values())) if masks else np.ones(MOST, dtype=bool)
    if axis == "cp":
        ok &= (tried == 1) | (tried * MIN_CONTEXT_CHUNK <= seq)
    allowed = [int(degree) for degree in tried[ok & np.ones(MOST, dtype=bool)]]
    largest = max(allowed, default=1)
    shown = tuple(one for one in allowed if one & (one - 1) == 0 or (largest % one == 0 and axis != "pp"))
    if axis == "cp" and largest * 2 * MIN_CONTEXT_CHUNK > seq:
        return Split(axis, largest, shown, f"a rank would have fewer than {MIN_CONTEXT_CHUNK:,} of {seq:,} tokens", "")
    following = largest * 2 if axis != "pp" else largest + 1
    if following > MOST:
        return Split(axis, largest, shown, "", "")
    broken = next((id for id, mask in masks.items() if np.broadcast_to(mask, (MOST,))[following - 1]), "")
    one = case.replace(**{axis: following, "world": following}, **more)
    return Split(axis, largest, shown, rules.message(rules.all_rules()[broken], one) if broken else "", broken)

"""Random layouts for property tests, drawn as columns."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st

from meshwright.models import ModelSpec
from meshwright.recipes.adapter_targets import target_names
from meshwright.recipes.types import ENGINES, Layout, Strategy, recipe_fields

from .helpers import BIASED_MIXTURE, DELTA, DENSE, LATENT, MIXTURE, STATE_SPACE, TIED, VISION_LANGUAGE, WINDOWED

MODELS: list[ModelSpec] = [
    DENSE, TIED, MIXTURE, BIASED_MIXTURE, LATENT, STATE_SPACE, DELTA, VISION_LANGUAGE, WINDOWED,
]  # fmt: skip
WORLDS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128)


def _choices(name: str) -> tuple[str, ...]:
    """Return the values of a layout field with choices."""
    return get_args(get_type_hints(Layout)[name])


DOMAINS: dict[str, st.SearchStrategy[Any]] = {
    "tp": st.sampled_from([1, 1, 2, 3, 4, 8, 16]),
    "pp": st.sampled_from([1, 1, 2, 3, 4, 8]),
    "vp": st.sampled_from([1, 1, 2, 4]),
    "cp": st.sampled_from([1, 1, 2, 4, 8]),
    "ep": st.sampled_from([1, 1, 2, 4, 8, 16]),
    "etp": st.sampled_from([1, 1, 1, 2]),
    "dp_shard": st.sampled_from([-1, -1, 0, 1, 2, 4, 8]),
    "dp_replicate": st.sampled_from([1, 1, 2, 3]),
    "sp": st.booleans(),
    "micro_batch_size": st.sampled_from([1, 1, 2, 3, 4]),
    "global_batch_size": st.sampled_from([1, 8, 96, 256, 512]),
    "seq_length": st.sampled_from([1000, 4096, 4100, 8192, 65536]),
    "recompute": st.sampled_from(_choices("recompute")),
    "strategy": st.sampled_from(get_args(Strategy)),
    "pp_schedule": st.sampled_from(_choices("pp_schedule")),
    "cp_comm": st.sampled_from(_choices("cp_comm")),
    "offload": st.sampled_from(_choices("offload")),
    "loss": st.sampled_from(["vocab_parallel", "plain", "chunked", "fused_linear"]),
}

ROW = st.fixed_dictionaries(DOMAINS)
ROWS = st.lists(ROW, min_size=1, max_size=24)
PLACES = st.tuples(st.sampled_from(MODELS), st.sampled_from(WORLDS), st.sampled_from(ENGINES))


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Convert rows to one numpy column per name."""
    return {name: np.array([row[name] for row in rows]) for name in DOMAINS}


CONTRACTS = st.fixed_dictionaries(
    {
        "global_batch_size": st.sampled_from([1, 12, 96, 256, 480, 512]),
        "seq_length": st.sampled_from([1000, 4096, 4100, 8192, 65536]),
        "dp_replicate": st.sampled_from([1, 2, 3]),
        "dp_shard": st.sampled_from([-1, 1, 2, 8]),
    }
)


@lru_cache(maxsize=1)
def every_layout() -> dict[str, Any]:
    """All combinations of common degrees as columns."""
    grid = np.meshgrid(
        [1, 2, 3, 4, 8], [1, 2, 3, 4, 8], [1, 2, 4], [1, 2, 4], [1, 2, 4, 8], [1, 2, 3], [False, True], indexing="ij"
    )
    names = ("tp", "pp", "vp", "cp", "ep", "micro_batch_size", "sp")
    columns = {name: column.ravel() for name, column in zip(names, grid, strict=True)}
    schedule = np.where(columns["vp"] > 1, "interleaved_1f1b", "1f1b")
    return {**columns, "sp": columns["sp"].astype(bool), "pp_schedule": schedule}


def _anything(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a recipe field of this type accepts."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = next(m for m in args[1:] if isinstance(m, msgspec.Meta))
        return _number(args[0], limits) if args[0] in (int, float) else _anything(args[0])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(_anything(args[0]), max_size=4).map(tuple)
    if origin is dict:
        return st.just({})
    return {int: st.integers(0, 9), bool: st.booleans(), str: st.sampled_from(["", "mock", "squad", "cord-v2", "x"])}[
        hint
    ]


def _number(kind: type, limits: msgspec.Meta) -> st.SearchStrategy[Any]:
    low = limits.ge if limits.ge is not None else limits.gt
    if kind is int:
        return st.integers(int(low or 0), 70)
    high = limits.lt if limits.lt is not None else 10.0
    return st.floats(low or 0.0, high, exclude_min=limits.gt is not None, exclude_max=limits.lt is not None)


NAMED = {"peft.targets": st.lists(st.sampled_from(target_names()), max_size=4).map(tuple)}
ANYTHING = st.fixed_dictionaries(
    {
        info.flat: NAMED[key] if key in NAMED else _anything(info.type)
        for key, info in recipe_fields().items()
        if not key.startswith(("architecture.", "checkpoint."))
    }
)

"""Random layouts for property tests, drawn as columns."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import numpy as np
from hypothesis import strategies as st

from meshwright.models import ModelSpec
from meshwright.recipes.types import ENGINES, Layout, Strategy

from .helpers import BIASED_MIXTURE, DELTA, DENSE, LATENT, MIXTURE, STATE_SPACE, TIED, VISION_LANGUAGE, WINDOWED

MODELS: list[ModelSpec] = [
    DENSE, TIED, MIXTURE, BIASED_MIXTURE, LATENT, STATE_SPACE, DELTA, VISION_LANGUAGE, WINDOWED,
]  # fmt: skip
WORLDS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128)


def _choices(name: str) -> tuple[str, ...]:
    """The values a layout field of words may take."""
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
    """The rows turned into one numpy column per name."""
    return {name: np.array([row[name] for row in rows]) for name in DOMAINS}

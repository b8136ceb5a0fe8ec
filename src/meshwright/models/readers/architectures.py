"""All decoder architectures, by model_type."""

from __future__ import annotations

from .dense_table import DENSE
from .sparse_table import SPARSE
from .traits import Traits

TRAITS: dict[str, Traits] = DENSE | SPARSE

# The same architecture under another name.
SAME_AS = {"kimi_k2": "deepseek_v3", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

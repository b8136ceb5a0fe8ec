"""Model families that engines treat differently, detected by architecture or name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from meshwright.recipes.case import Case


def _matches_family(*starts: str) -> Callable[[Case], bool]:
    """Return a predicate: the model type or name, letters and digits only, starts with one of these."""

    def matches(c: Case) -> bool:
        return _letters(c.model.model_type).startswith(starts) or _letters(c.model.name).startswith(starts)

    return matches


@lru_cache(maxsize=1024)
def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


is_qwen35 = _matches_family("qwen35")
is_qwen3_next = _matches_family("qwen3next")
is_glm45 = _matches_family("glm4moe", "glm45")
is_gemma3 = _matches_family("gemma3")
is_qwen3_vl = _matches_family("qwen3vl")

overflows_in_fp16 = _matches_family("gemma2", "gemma3", "gemma4", "gptoss")
"""Families whose activations exceed 65,504, the largest fp16 number: Gemma 2 and later scale embeddings and norms up
(huggingface/transformers#36822), gpt-oss grows through its layers (microsoft/onnxruntime-genai#2444)."""

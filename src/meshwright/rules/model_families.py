"""Model families that an engine treats in its own way, recognised by architecture or name."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.recipes.case import Case


def _matches_family(*starts: str) -> Callable[[Case], bool]:
    """Whether the model's architecture or name, in letters and digits alone, starts like one of these."""

    def known(c: Case) -> bool:
        names = ("".join(filter(str.isalnum, name.lower())) for name in (c.model.model_type, c.model.name))
        return any(name.startswith(starts) for name in names)

    return known


is_qwen35 = _matches_family("qwen35")
is_qwen3_next = _matches_family("qwen3next")
is_glm45 = _matches_family("glm4moe", "glm45")
is_gemma3 = _matches_family("gemma3")
is_qwen3_vl = _matches_family("qwen3vl")

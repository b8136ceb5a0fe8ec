"""The linear layers of models that name them as Llama does, which adapters name."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.models.layer_classes import family_prefix
from meshwright.models.spec import ModelSpec

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo", "Olmo2", "Olmo3"),
    *("Granite", "SmolLM3", "Cohere", "Cohere2", "Qwen2_5_VL", "Qwen3VL", "Qwen2VL"),
)
"""Families whose language model has these linear layers and no others."""
OUTSIDE = ("embed_tokens", "lm_head")
ENCODERS = ("qkv", "proj", "fc1", "fc2", "out_proj", "linear_fc1", "linear_fc2", "mlp", "attn", "merger", "visual")
"""Names in vision encoders of these families."""
ALL = ("all", "all-linear", "all-router", "all-embedding")  # words of front ends
PATTERN = frozenset("*+?|()[]{}^$\\")


def missing_targets(spec: ModelSpec, targets: Sequence[str]) -> list[str]:
    """Return the modules to adapt that a model does not have; empty if its names or the targets are not known."""
    if family_prefix(spec) not in FAMILIES or any(PATTERN & {*one} or one in ALL for one in targets):
        return []
    known = (*LINEAR_LAYERS, *OUTSIDE, *(ENCODERS if spec.vision is not None else ()))
    return [one for one in targets if one.rpartition(".")[2] not in known]

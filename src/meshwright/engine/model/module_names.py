"""The names of the embedding, layers, norm and rotary module in each model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import InputError

NAMES = {  # part -> transformers' names for it
    "body": ("model.language_model", "model", "transformer"),
    "embedding": ("embed_tokens", "embeddings", "wte"),
    "positions": ("wpe",),
    "layers": ("layers", "h"),
    "norm": ("norm", "norm_f", "ln_f"),
    "rotary": ("rotary_emb",),
}
# Families that scale embeddings by sqrt(hidden) in the model, unless the embedding module does (transformers 5).
SCALED_BY_THE_MODEL = ("gemma2",)
ROTARY_BY_LAYER_TYPE = ("gemma3_text",)
# Families with three position ids per token: time, height and width (equal for text).
THREE_POSITIONS = (
    *("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"),
    "glm4v_moe_text",
)


@dataclass(frozen=True)
class ModuleNames:
    """The names of a model's parts, and how its layers get positions."""

    body: str  # path in the model
    embedding: str
    layers: str
    norm: str
    positions: str | None  # a learned position table
    rotary: str | None
    embedding_scale: float
    rotary_by_layer_type: bool


def find_module_names(model: nn.Module) -> ModuleNames:
    """Return the module names of a transformers causal language model, or of the one in a vision-language model."""
    body = _named(model, "body")
    inner = model.get_submodule(body)
    config: Any = inner.config
    found = {
        part: _named(inner, part, required=part not in ("positions", "rotary")) for part in NAMES if part != "body"
    }
    scales_itself = hasattr(getattr(inner, found["embedding"]), "embed_scale")
    scaled = config.model_type in SCALED_BY_THE_MODEL and not scales_itself
    return ModuleNames(
        body=body,
        embedding=found["embedding"],
        layers=found["layers"],
        norm=found["norm"],
        positions=found["positions"] or None,
        rotary=found["rotary"] or None,
        embedding_scale=config.hidden_size**0.5 if scaled else 1.0,
        rotary_by_layer_type=config.model_type in ROTARY_BY_LAYER_TYPE,
    )


def _named(module: nn.Module, part: str, required: bool = True) -> str:
    found = next((name for name in NAMES[part] if _has(module, name)), "")
    if required and not found:
        raise InputError(
            f"{type(module).__name__} has no {part}: none of {', '.join(NAMES[part])} exists",
            field="model",
            fix=("meshwright models",),
        )
    return found


def _has(module: nn.Module, path: str) -> bool:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, nn.Module)


def rotary_tables(body: Any, names: ModuleNames, like: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """Return rotary cosines and sines by layer type; one entry "" if all layers share them.

    Positions are [batch, tokens], or [batch, 3, tokens] for models with three position ids.
    """
    if names.rotary is None:
        return {}
    rotary = getattr(body, names.rotary)
    if body.config.model_type in THREE_POSITIONS:
        positions = positions.transpose(0, 1) if positions.dim() == 3 else positions.expand(3, *positions.shape)
    if not names.rotary_by_layer_type:
        return {"": rotary(like, positions)}
    return {layer_type: rotary(like, positions, layer_type) for layer_type in sorted(set(body.config.layer_types))}


def layer_arguments(body: Any, names: ModuleNames, tables: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the position arguments of one layer."""
    if not tables:
        return {}
    layer_type = body.config.layer_types[layer] if names.rotary_by_layer_type else ""
    return {"position_embeddings": tables[layer_type]}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module calls transformers' attention interface."""
    return hasattr(module, "is_causal") and hasattr(module, "config")

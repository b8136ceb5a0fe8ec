"""Where the parts of a causal language model are, whatever its family calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import InputError

NAMES = {  # part -> the names transformers has for it
    "body": ("model.language_model", "model", "transformer"),
    "embedding": ("embed_tokens", "embeddings", "wte"),
    "positions": ("wpe",),
    "layers": ("layers", "h"),
    "norm": ("norm", "norm_f", "ln_f"),
    "rotary": ("rotary_emb",),
}
# Families whose model multiplies by sqrt(hidden), unless its embedding module does (since transformers 5).
SCALED_BY_THE_MODEL = ("gemma2",)
ROTARY_BY_LAYER_TYPE = ("gemma3_text",)
# Time, height and width of a token; equal for text.
THREE_POSITIONS = (
    *("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"),
    "glm4v_moe_text",
)


@dataclass(frozen=True)
class ModuleNames:
    """The names of a model's parts, and how positions reach its layers."""

    body: str  # its path in the model
    embedding: str
    layers: str
    norm: str
    positions: str | None  # a learnt position table
    rotary: str | None
    embedding_scale: float
    rotary_by_layer_type: bool


def find_module_names(model: nn.Module) -> ModuleNames:
    """Finds the parts of a transformers causal language model, or of the one in a vision-language model."""
    body = _named(model, "body")
    inner = model.get_submodule(body)
    config: Any = inner.config
    found = {part: _named(inner, part, needed=part not in ("positions", "rotary")) for part in NAMES if part != "body"}
    by_itself = hasattr(getattr(inner, found["embedding"]), "embed_scale")
    scaled = config.model_type in SCALED_BY_THE_MODEL and not by_itself
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


def _named(module: nn.Module, part: str, needed: bool = True) -> str:
    found = next((name for name in NAMES[part] if _has(module, name)), "")
    if needed and not found:
        raise InputError(
            f"{type(module).__name__} has no {part} under any of the names {', '.join(NAMES[part])}",
            field="model",
            fix=("meshwright models",),
        )
    return found


def _has(module: nn.Module, path: str) -> bool:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, nn.Module)


def rotary_tables(body: Any, parts: ModuleNames, like: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """Cosines and sines of the positions by layer type; one entry under "" where all layers share them.

    Positions are [batch, tokens], or [batch, 3, tokens] where images give them three axes.
    """
    if parts.rotary is None:
        return {}
    rotary = getattr(body, parts.rotary)
    if body.config.model_type in THREE_POSITIONS:
        positions = positions.transpose(0, 1) if positions.dim() == 3 else positions.expand(3, *positions.shape)
    if not parts.rotary_by_layer_type:
        return {"": rotary(like, positions)}
    return {kind: rotary(like, positions, kind) for kind in sorted(set(body.config.layer_types))}


def layer_arguments(body: Any, parts: ModuleNames, tables: dict[str, Any], layer: int) -> dict[str, Any]:
    """What one layer is told about positions."""
    if not tables:
        return {}
    kind = body.config.layer_types[layer] if parts.rotary_by_layer_type else ""
    return {"position_embeddings": tables[kind]}


def is_attention(module: nn.Module) -> bool:
    """Whether a module calls the attention interface."""
    return hasattr(module, "is_causal") and hasattr(module, "config")

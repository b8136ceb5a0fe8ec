"""What model types compute that no size shows: a framework that builds a model from sizes trains another model."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.errors import InputError, MeshwrightError
from meshwright.models import ModelSpec
from meshwright.models.numerics import published_config, ropes_of_layers
from meshwright.recipes.types import Recipe

_GRANITE = "multiplies embeddings, residuals, attention scores and logits by the multipliers of its config"
_MINICPM = "multiplies embeddings and residuals, and divides what the head reads, by its config"
_HUNYUAN = "normalizes queries and keys after rotating them, not before"
_UNROTATED = "does not rotate the queries and keys of some layers"
_MINIMAX_M3 = "has clamped activations with a scaled sigmoid, and norms that multiply by 1 + weight"
_TWO_ROPES = "rotates the queries and keys of its layers with a window in another way than the others"
_LLAMA4 = f"{_UNROTATED}, and multiplies what an expert reads, not its output, by the router's score"


class _Beyond(NamedTuple):
    does: str
    key: str = ""  # the config key that turns it off
    off: Any = None


BEYOND_SIZES: dict[str, tuple[_Beyond, ...]] = {
    "baichuan": (
        _Beyond("has ALiBi in place of rotated positions if it has 13 B parameters", "max_position_embeddings", 4096),
        _Beyond("normalizes the rows of its head from its second release on", "vocab_size", 64000),
    ),
    "biogpt": (_Beyond("multiplies its embeddings by the root of their width", "scale_embedding", False),),
    "chatglm": (_Beyond("rotates half of each head, in pairs of neighbours"),),
    "dbrx": (_Beyond("has LayerNorms without biases, and clips queries, keys and values"),),
    "exaone4": (_Beyond("normalizes the outputs of attention and feed-forward layers, not their inputs"),),
    "exaone_moe": (_Beyond(_UNROTATED, "sliding_window", None),),
    "gpt_neox": (_Beyond("computes attention and feed-forward layers in parallel", "use_parallel_residual", False),),
    "granite": (_Beyond(_GRANITE),),
    "granite_swa": (_Beyond(_GRANITE),),
    "granitemoe": (_Beyond(_GRANITE),),
    "granitemoe_swa": (_Beyond(_GRANITE),),
    "granitemoehybrid": (_Beyond(_GRANITE),),
    "granitemoeshared": (_Beyond(_GRANITE),),
    "hunyuan_v1_dense": (_Beyond(_HUNYUAN),),
    "hunyuan_v1_moe": (_Beyond(_HUNYUAN),),
    "llama4": (_Beyond(_LLAMA4),),
    "llama4_text": (_Beyond(_LLAMA4),),
    "minicpm": (_Beyond(_MINICPM),),
    "minicpm3": (_Beyond(_MINICPM),),
    "minimax_m3": (_Beyond(_MINIMAX_M3),),
    "minimax_m3_vl_text": (_Beyond(_MINIMAX_M3),),
    "mpt": (_Beyond("has ALiBi in place of positions"),),
    "phimoe": (_Beyond("has LayerNorms, and a router that masks experts by their distance to the best one"),),
    "smollm3": (_Beyond(_UNROTATED),),
    "xglm": (_Beyond("has sinusoidal positions, and multiplies its embeddings by the root of their width"),),
}


def require_plain(recipe: Recipe, model: ModelSpec, title: str) -> None:
    """Raise InputError for a model that computes something for which a framework's settings have no word."""
    known = BEYOND_SIZES.get(model.model_type, ())
    config = _published(recipe.model)
    parts = [one for one in known if not one.key or config.get(one.key, ...) != one.off]
    does = parts[0].does if parts else _TWO_ROPES if len(ropes_of_layers(config)) > 1 else ""
    if does:
        reason = (
            f"a model of type {model.model_type} {does}; {title} would build it from its sizes alone: another model"
        )
        raise InputError(reason, field="model", value=model.name)


def _published(model: str) -> dict[str, Any]:
    """Return the config of a model; empty for one that only the settings of a file describe."""
    try:
        return published_config(model)
    except MeshwrightError:
        return {}

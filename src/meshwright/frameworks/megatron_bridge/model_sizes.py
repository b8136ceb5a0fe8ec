"""Model sizes that a Megatron-Bridge config changes after its recipe, and those to write for a resized model."""

from __future__ import annotations

from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.common import is_int
from meshwright.frameworks.megatron_bridge.bridge_recipes import BridgeRecipe
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.parsed_config import get_value
from meshwright.frameworks.model_match import OWN_MODEL
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import Attention, Dense, ModelSpec, reshape
from meshwright.recipes.types import Recipe

MODEL_SIZES = {
    "model.num_layers": "layers",
    "model.hidden_size": "hidden",
    "model.ffn_hidden_size": "ffn",
    "model.num_attention_heads": "heads",
    "model.num_query_groups": "kv_heads",
    "model.kv_channels": "head_dim",
    "model.vocab_size": "vocab",
    "model.num_moe_experts": "experts",
    "model.moe_router_topk": "topk",
}
EXPERT_WIDTH = "model.moe_ffn_hidden_size"
NULL_TOKENIZER = "NullTokenizer"
HEAD_DIM_FOLLOWS = ("qwen2",)  # their config has no head_dim, so kv_channels is hidden / heads


def changed_sizes(settings: Settings, model: ModelSpec | None) -> tuple[dict[str, Any], str]:
    """Return the sizes that differ from the named model's, and why they cannot be applied; empty if they can."""
    found = {name: get_value(settings, key) for key, name in _keys(model).items() if key in settings}
    sizes = {name: value for name, value in found.items() if is_int(value) and value > 0}
    if model is None or not sizes:
        return sizes, ""
    try:
        before, after = _attention(model), _attention(reshape(model, **sizes))
        if (
            before
            and after
            and "head_dim" not in sizes
            and _keeps_head_dim(model)
            and before.head_dim != after.head_dim
        ):
            sizes["head_dim"] = before.head_dim
            reshape(model, **sizes)
    except (InputError, ZeroDivisionError) as error:
        field = getattr(error, "field", "")
        key = next((key for key, name in _keys(model).items() if name == field and key in settings), "")
        shown = format_override(key, sizes[field]) if key else "the changed sizes"
        reason = getattr(error, "reason", "the sizes do not fit together")
        return {}, f"{shown}: {reason}; the changed model was not checked ({OWN_MODEL}, gives its shape)"
    return sizes, ""


def null_vocabulary(row: BridgeRecipe | None, settings: Settings) -> int | None:
    """Return the vocabulary that the recipe's NullTokenizer gives the model; None if another tokenizer is set."""
    if row is None or row.null_vocabulary is None:
        return None
    if str(get_value(settings, "tokenizer.tokenizer_type", NULL_TOKENIZER)) != NULL_TOKENIZER:
        return None
    if get_value(settings, "tokenizer.use_tokenizer_vocab_size", True) is False:
        return None
    if any(setting.unresolved for key, setting in settings.items() if key.startswith("tokenizer.")):
        return None
    size = get_value(settings, "tokenizer.vocab_size", row.null_vocabulary)
    return size if is_int(size) and size > 0 else None


def without_model_sizes(settings: dict[str, SourcedValue], model: ModelSpec | None) -> dict[str, SourcedValue]:
    """Drop the model sizes of a saved config, except a different number of layers."""
    kept = {"model.num_layers"} if model and get_value(settings, "model.num_layers") != model.num_layers else set()
    return {key: setting for key, setting in settings.items() if key not in MODEL_SIZES or key in kept}


def size_settings(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    """Return the settings that resize the recipe's base model; kv_channels does not follow the width there."""
    sizes = {name: getattr(recipe.architecture, name) for name in MODEL_SIZES.values()}
    attention = _attention(model)
    if attention and (sizes["hidden"] or sizes["heads"]) and _keeps_head_dim(model):
        sizes["head_dim"] = attention.head_dim
    return {key: sizes[name] for key, name in _keys(model).items() if sizes[name] is not None}


def _keys(model: ModelSpec | None) -> dict[str, str]:
    """Return our names of the sizes by key; without dense blocks, the width is that of the experts."""
    if model is None or model.moe is None or any(isinstance(group.layer.ffn, Dense) for group in model.groups):
        return MODEL_SIZES
    return {EXPERT_WIDTH if name == "ffn" else key: name for key, name in MODEL_SIZES.items()}


def _attention(model: ModelSpec) -> Attention | None:
    mixers = (group.layer.mixer for group in model.groups)
    return next((one for one in mixers if isinstance(one, Attention)), None)


def _keeps_head_dim(model: ModelSpec) -> bool:
    return not model.learned_positions and model.model_type not in HEAD_DIM_FOLLOWS

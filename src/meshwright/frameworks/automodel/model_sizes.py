"""Model sizes that an AutoModel config changes: keyword arguments of AutoConfig.from_pretrained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.common import is_int
from meshwright.frameworks.initial_weights import is_hub_id
from meshwright.frameworks.model_match import OWN_MODEL, find_model, same_shape
from meshwright.frameworks.types import Settings
from meshwright.models import Attention, Dense, ModelSpec, config_named, reshape
from meshwright.recipes.model_changes import sizes
from meshwright.recipes.types import Recipe

PREFIX = "model.config."
KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "topk": ("num_experts_per_tok",),
}
"""Keys of a Hugging Face config by our name of a size."""
_WEIGHTS = re.compile(r"(?m)^# weights of (\S+)$")
EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")


def size_settings(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    """Return the settings that resize the model that the recipe names; raise InputError for a size without a key."""
    changed = sizes(recipe)
    if not changed:
        return {}
    config = config_named(recipe.model)
    attention = next((one.layer.mixer for one in model.groups if isinstance(one.layer.mixer, Attention)), None)
    if attention and {"hidden", "heads"} & changed.keys() and not model.learned_positions:
        changed["head_dim"] = attention.head_dim  # the config keeps its own
    found = {}
    for name, value in changed.items():
        key = next((one for one in _keys(name, model) if one in config or name == "head_dim"), "")
        if not key:
            reason = f"AutoModel resizes the config of {recipe.model}, which has no key for it"
            raise InputError(reason, field=f"architecture.{name}", value=value, fix=[f"architecture.{name}=null"])
        found[PREFIX + key] = value
    return found


def changed_sizes(settings: Settings, model: ModelSpec | None) -> tuple[dict[str, int], str]:
    """Return the sizes that a file changes in the model it names, and why they cannot be applied; empty if they can."""
    if model is None:
        return {}, ""
    found: dict[str, int] = {}
    for name in KEYS:
        key = next((PREFIX + one for one in _keys(name, model) if PREFIX + one in settings), "")
        if key and not settings[key].unresolved and is_int(settings[key].value):
            found[name] = settings[key].value
    try:
        reshape(model, **found)
    except (InputError, ZeroDivisionError) as error:
        reason = getattr(error, "reason", "the sizes do not fit together")
        return {}, f"the sizes in {PREFIX[:-1]} were not applied: {reason} ({OWN_MODEL}, gives the shape)"
    return found, ""


def _keys(name: str, model: ModelSpec) -> tuple[str, ...]:
    """Return the keys of a size; without dense blocks, the width is that of the experts."""
    has_dense = any(isinstance(group.layer.ffn, Dense) for group in model.groups)
    return EXPERT_WIDTH if name == "ffn" and model.moe is not None and not has_dense else KEYS[name]


def weights_comment(recipe: Recipe, model: ModelSpec) -> str:
    """Return the comment that names the model of weights that a file names by path; empty if check can tell it."""
    weights, published = recipe.checkpoint.pretrained, find_model(model.name)
    if not weights or is_hub_id(weights) or published is None or not same_shape(published, model):
        return ""
    return f"# weights of {model.name}\n"


def commented_model(text: str) -> ModelSpec | None:
    """Return the model of weights that are elsewhere, as the comment of an export names it; None without one."""
    stated = _WEIGHTS.search(text)
    return None if stated is None else find_model(stated[1])

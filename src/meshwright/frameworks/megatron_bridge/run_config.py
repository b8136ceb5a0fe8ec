"""Read a saved run config or a YAML file of overrides."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun
from meshwright.frameworks.model_match import from_sizes
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Goal

SFT_DATA = ("GPTSFTDatasetConfig", "FinetuningDatasetConfig", "HFDatasetConfig", "DirectHFSFTDatasetConfig")
OBJECT_KEYS = re.compile(r"\._(target|call|partial|args|name)_(\[\d+\])?$")


def read(content: Content) -> ParsedRun:
    """Return the settings of the file; objects such as torch.bfloat16 are given by name."""
    settings = strip_object_keys(content.settings)
    model = settings.get("model.hf_model_id")
    return ParsedRun("saved", settings, goal=goal(settings), model=str(model.value) if model and model.value else "")


def strip_object_keys(leaves: Settings) -> dict[str, SourcedValue]:
    """Remove the _target_ and _call_ keys that rebuild objects."""
    found: dict[str, SourcedValue] = {}
    for key, setting in leaves.items():
        match = OBJECT_KEYS.search(key)
        if match is None:
            if key != "_target_" and not _is_unused_removed_key(key, setting):
                found[key] = setting
            continue
        owner = key[: match.start()]
        if match[1] == "name" or (match[1] == "target" and str(setting.value).startswith("torch.")):
            found[owner] = setting
        elif match[1] == "target":
            found[f"{owner}._target_"] = setting
    return {key: setting for key, setting in found.items() if not _is_type_of_value(key, found)}


def _is_unused_removed_key(key: str, setting: SourcedValue) -> bool:
    """Return whether a removed field was saved with an unused value."""
    config_key = config_keys("megatron_bridge").get(key)
    return config_key is not None and config_key.status == "removed" and setting.value in (None, False)


def _is_type_of_value(key: str, found: dict[str, SourcedValue]) -> bool:
    """Return whether a key only gives the class of a value, such as an enum."""
    return key.endswith("._target_") and key[: -len("._target_")] in found


def goal(settings: Settings) -> Goal:
    """Infer the goal of the saved run."""
    if any(key.startswith("peft.") for key in settings):
        return "peft"
    dataset = settings.get("dataset._target_")
    fine_tuning = dataset is not None and str(dataset.value).rsplit(".", 1)[-1] in SFT_DATA
    checkpoint = settings.get("checkpoint.pretrained_checkpoint")
    return "sft" if fine_tuning or (checkpoint is not None and checkpoint.value) else "pretrain"


SIZE_KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def model_of(settings: Settings) -> ModelSpec | None:
    """Return the model with the sizes in a saved config; None for unsupported architectures."""

    def size(name: str) -> Any:
        setting = settings.get(f"model.{name}")
        return None if setting is None or setting.unresolved else setting.value

    sizes = {ours: size(theirs) for ours, theirs in SIZE_KEYS.items()}
    if any(not isinstance(value, int) or isinstance(value, bool) for value in sizes.values()):
        return None
    if size("multi_latent_attention") or not size("gated_linear_unit") or size("is_hybrid_model"):
        return None
    sizes |= {
        "num_key_value_heads": size("num_query_groups") or sizes["num_attention_heads"],
        "head_dim": size("kv_channels"),
        "max_position_embeddings": size("seq_length"),
        "tie_word_embeddings": size("share_embeddings_and_output_weights"),
        "intermediate_size": size("ffn_hidden_size"),
    }
    try:
        if not size("num_moe_experts"):
            return from_sizes("qwen3" if size("qk_layernorm") else "llama", **sizes)
        return from_sizes(
            "qwen3_moe",
            moe_intermediate_size=size("moe_ffn_hidden_size"),
            num_experts=size("num_moe_experts"),
            num_experts_per_tok=size("moe_router_topk"),
            **sizes,
        )
    except (InputError, TypeError, ValueError, ZeroDivisionError, OverflowError, msgspec.ValidationError):
        return None

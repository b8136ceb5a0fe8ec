"""A saved run config, or a file of overrides: YAML with the sections of the config."""

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
MARKS = re.compile(r"\._(target|call|partial|args|name)_(\[\d+\])?$")


def read(content: Content) -> ParsedRun:
    """The settings of the file, objects such as torch.bfloat16 by their names."""
    settings = plain(content.settings)
    model = settings.get("model.hf_model_id")
    return ParsedRun("saved", settings, goal=goal(settings), model=str(model.value) if model and model.value else "")


def plain(leaves: Settings) -> dict[str, SourcedValue]:
    """Settings without the marks that say how to build an object again."""
    found: dict[str, SourcedValue] = {}
    for key, setting in leaves.items():
        mark = MARKS.search(key)
        if mark is None:
            if key != "_target_" and not _is_left_over(key, setting):
                found[key] = setting
            continue
        owner = key[: mark.start()]
        if mark[1] == "name" or (mark[1] == "target" and str(setting.value).startswith("torch.")):
            found[owner] = setting
        elif mark[1] == "target":
            found[f"{owner}._target_"] = setting
    return {key: setting for key, setting in found.items() if not _is_mark_of_value(key, found)}


def _is_left_over(key: str, setting: SourcedValue) -> bool:
    """Whether a field that is gone was saved without anybody using it."""
    word = config_keys("megatron_bridge").get(key)
    return word is not None and word.status == "removed" and setting.value in (None, False)


def _is_mark_of_value(key: str, found: dict[str, SourcedValue]) -> bool:
    """Whether a key only tells the class of a value, such as that of an enumeration."""
    return key.endswith("._target_") and key[: -len("._target_")] in found


def goal(settings: Settings) -> Goal:
    """What the saved run did."""
    if any(key.startswith("peft.") for key in settings):
        return "peft"
    kind = settings.get("dataset._target_")
    tuned = kind is not None and str(kind.value).rsplit(".", 1)[-1] in SFT_DATA
    named = settings.get("checkpoint.pretrained_checkpoint")
    return "sft" if tuned or (named is not None and named.value) else "pretrain"


SHAPE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def model_of(settings: Settings) -> ModelSpec | None:
    """The model of the sizes that a saved config lists; None where they are not a kind that is known here."""

    def size(name: str) -> Any:
        setting = settings.get(f"model.{name}")
        return None if setting is None or setting.unresolved else setting.value

    sizes = {ours: size(theirs) for ours, theirs in SHAPE.items()}
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

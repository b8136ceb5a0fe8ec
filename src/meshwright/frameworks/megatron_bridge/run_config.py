"""Read a saved run config or a YAML file of overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.errors import InputError, some
from meshwright.frameworks.framework import Content
from meshwright.frameworks.megatron_bridge.keys import is_section
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun
from meshwright.frameworks.model_match import from_sizes
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Goal
from meshwright.rules.rule import Finding

SFT_DATA = ("GPTSFTDatasetConfig", "FinetuningDatasetConfig", "HFDatasetConfig", "DirectHFSFTDatasetConfig")
PRETRAINING_DATA = ("GPTDatasetConfig", "MockGPTDatasetConfig", "GPTFIMDatasetConfig")
OBJECT_KEYS = re.compile(r"\._(target|call|partial|args|name)_(\[\d+\])?$")


RECIPES = "megatron.bridge.recipes."
INTERPOLATION = re.compile(r"\$\{([^{}]+)\}")
_REST = re.compile(r"[.\[].*")  # of a key, after its section


def read(content: Content) -> ParsedRun:
    """Return the settings of the file; objects such as torch.bfloat16 are given by name."""
    stated = {key: _resolved(setting, content.settings) for key, setting in content.settings.items()}
    kept = {key: setting for key, setting in stated.items() if is_section(_section(key))}
    settings = strip_object_keys(kept)
    model = settings.get("model.hf_model_id")
    added = tuple(_added_sections(stated))
    name = str(model.value) if model and model.value else ""
    recipe = recipe_of(stated)
    return ParsedRun("saved", settings, recipe, goal=goal(settings), model=name, findings=added)


def recipe_of(settings: Settings) -> SourcedValue | None:
    """Return the name of the recipe that a file with overrides gives as recipe._target_."""
    target = settings.get("recipe._target_")
    if target is None or not str(target.value).startswith(RECIPES):
        return None
    return msgspec.structs.replace(target, value=str(target.value).rpartition(".")[2])


def _section(key: str) -> str:
    return _REST.sub("", key)


def _resolved(setting: SourcedValue, settings: Settings) -> SourcedValue:
    """Return a setting with the value of the key that it names with ${}; unresolved if the file does not have that."""
    found = INTERPOLATION.search(setting.value) if isinstance(setting.value, str) else None
    if found is None:
        return setting
    other = settings.get(found[1])
    if other is not None and found[0] == setting.value and not INTERPOLATION.search(str(other.value)):
        return msgspec.structs.replace(setting, value=other.value)
    return msgspec.structs.replace(setting, unresolved="OmegaConf resolves it when the program reads the file")


def _added_sections(settings: Settings) -> Iterator[Finding]:
    """Yield a warning on the sections that only the program which reads the file can have."""
    added = [(name, one) for key, one in settings.items() if not is_section(name := _section(key))]
    if added:
        names = some(sorted({name for name, _ in added}), 6)
        first, at = added[0]
        message = f"Megatron-Bridge's config has no {names}: the program that reads the file must add it"
        yield Finding("key.unused", "warning", first, message, (), at.file, at.line)


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
    data = "" if dataset is None else str(dataset.value).rsplit(".", 1)[-1]
    if data in PRETRAINING_DATA:  # with initial weights, it continues
        return "pretrain"
    fine_tuning = data in SFT_DATA
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

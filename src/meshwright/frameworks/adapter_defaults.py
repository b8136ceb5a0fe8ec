"""LoRA settings of a training that leaves them out: those of PEFT, or of the library that calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.frameworks.types import SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.adapter_targets import ALL_LINEAR

LIBRARY = "lora_defaults"  # internal argument: the library whose defaults apply


class AdapterDefaults(msgspec.Struct, frozen=True):
    """What a library sets; without targets, PEFT chooses them by the type of the model."""

    rank: int
    alpha: float | None  # None: twice the rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ()


LIBRARIES: Mapping[str, AdapterDefaults] = {
    "peft": AdapterDefaults(8, 8.0),  # LoraConfig
    "trl": AdapterDefaults(16, 32.0, 0.05),  # ModelConfig of its scripts
    "unsloth": AdapterDefaults(16, 16.0, 0.0, ("qkv", "proj", "fc1", "fc2")),  # get_peft_model
    "llama-factory": AdapterDefaults(8, None, 0.0, (ALL_LINEAR,)),
    "ms-swift": AdapterDefaults(8, 32.0, 0.05, (ALL_LINEAR,)),
}
QUERY_VALUE = ("q_proj", "v_proj")
PEFT_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "llama4", "mistral", "mixtral", "qwen2", "qwen3"), QUERY_VALUE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "stablelm", "opt", "gptj", "gpt_neo"), QUERY_VALUE),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon", "chatglm"), ("query_key_value",)),
    "phi": (*QUERY_VALUE, "fc1", "fc2"),
    "gpt2": ("c_attn",),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
"""TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of peft 0.21, by model_type; others need target_modules."""


def library_setting(name: str, place: SourcedValue) -> dict[str, SourcedValue]:
    """Return the internal argument that names the library whose defaults apply; empty if it has none here."""
    return {LIBRARY: SourcedValue(name, place.line, place.file)} if name in LIBRARIES else {}


def adapter_defaults(
    arguments: Mapping[str, SourcedValue], values: Mapping[str, Any], model: ModelSpec | None
) -> Iterator[tuple[str, Any]]:
    """Yield the fields of adapters that the library of a training sets by itself; `values` are those that are set."""
    library = arguments.get(LIBRARY)
    if library is None:
        return
    own = LIBRARIES[str(library.value)]
    yield "peft.rank", own.rank
    yield "peft.alpha", 2.0 * values.get("peft.rank", own.rank) if own.alpha is None else own.alpha
    yield "peft.dropout", own.dropout
    targets = own.targets or PEFT_TARGETS.get(model.model_type if model is not None else "", ())
    if targets:
        yield "peft.targets", targets

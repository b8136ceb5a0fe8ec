"""The class of a decoder's layers in transformers, which wrapping policies name."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.models.spec import ModelSpec

HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of the names of models
TORCH_MODULES = ("Embedding", "Linear", "LayerNorm", "RMSNorm", "ModuleList")
PARTS = ("Layer", "Block")  # ends of the names of layer classes
EXPERTS = ("SparseMoeBlock", "MoEBlock")  # parts of a layer
TEXT_PARTS = ("DecoderLayer",)  # of a vision-language model, whose encoder has layers of another family
BLOCK_FAMILIES = (
    *("GPT2", "GPTJ", "GPTNeo", "GPTBigCode", "CodeGen", "Bloom", "Mpt", "Dbrx"),
    *("NemotronH", "Mamba", "Mamba2", "FalconMamba"),
)
"""Families whose layers are named Block."""
TEXT_FAMILIES = (*("Llama4", "Gemma4", "Gemma4Unified", "Gemma3n"), *("Qwen3VL", "Qwen3VLMoe", "Glm4vMoe"))
"""Families whose text model has a name of its own."""
OTHERS = {
    **{family: f"{family}Block" for family in BLOCK_FAMILIES},
    **{family: f"{family}Layer" for family in ("GPTNeoX", "GPTNeoXJapanese")},
    **{family: f"{family}TextDecoderLayer" for family in TEXT_FAMILIES},
    **dict.fromkeys(("BioGpt", "OpenAIGPT", "CTRL", "AriaText", "Jamba", "OlmoHybrid", "Zamba", "Zamba2"), ""),
    **dict.fromkeys(("Mistral3", "KimiK25", "KimiK3"), ""),
    **dict.fromkeys(("MiMo", "Step3p7Flash", "DeciLM", "NemotronHPuzzle"), ""),
}
"""Layer classes that are not the family's name and DecoderLayer; empty: several, or code of the model's own."""


def family_prefix(spec: ModelSpec) -> str:
    """Return what the classes of a model start with, such as Llama; empty if it is not known."""
    return next((spec.hf_class.removesuffix(end) for end in HEADS if spec.hf_class.endswith(end)), "")


def layer_class(spec: ModelSpec) -> str:
    """Return the class of the layers of the language model, such as LlamaDecoderLayer; empty if it is not known."""
    prefix = family_prefix(spec)
    return OTHERS.get(prefix, f"{prefix}DecoderLayer") if prefix else ""


def wrong_layer_class(spec: ModelSpec, names: Sequence[str]) -> str:
    """Return the first of the classes to wrap that the model does not have; other modules of it may be wrapped too."""
    expected, prefix = layer_class(spec), family_prefix(spec)
    if not expected:
        return ""
    for name in names:
        own = name.startswith(prefix) and (not name.endswith(PARTS) or name.endswith(EXPERTS))
        of_encoder = spec.vision is not None and not name.endswith(TEXT_PARTS)
        if name and name not in (expected, *TORCH_MODULES) and not own and not of_encoder:
            return name
    return ""

"""The class of a decoder's layers in transformers, which wrapping policies name."""

from __future__ import annotations

from meshwright.models.spec import ModelSpec

HEADS = ("ForCausalLM", "LMHeadModel")  # ends of the names of classes of text models
BLOCK_FAMILIES = (
    *("GPT2", "GPTJ", "GPTNeo", "GPTBigCode", "CodeGen", "Bloom", "Mpt", "Dbrx"),
    *("NemotronH", "Mamba", "Mamba2", "FalconMamba"),
)
"""Families whose layers are named Block."""
OTHERS = {
    **{family: f"{family}Block" for family in BLOCK_FAMILIES},
    **{family: f"{family}Layer" for family in ("GPTNeoX", "GPTNeoXJapanese")},
    **{family: f"{family}TextDecoderLayer" for family in ("Llama4", "Gemma4", "Gemma4Unified", "Gemma3n")},
    **dict.fromkeys(("BioGpt", "OpenAIGPT", "CTRL", "AriaText", "Jamba", "OlmoHybrid", "Zamba", "Zamba2"), ""),
    **dict.fromkeys(("MiMo", "Step3p7Flash", "DeciLM", "NemotronHPuzzle"), ""),
}
"""Layer classes that are not the family's name and DecoderLayer; empty: several, or code of the model's own."""


def family_prefix(spec: ModelSpec) -> str:
    """Return what the classes of a text model start with, such as Llama; empty for other models."""
    return next((spec.hf_class.removesuffix(end) for end in HEADS if spec.hf_class.endswith(end)), "")


def layer_class(spec: ModelSpec) -> str:
    """Return the class of the layers of a text model, such as LlamaDecoderLayer; empty if it is not known."""
    prefix = family_prefix(spec)
    return OTHERS.get(prefix, f"{prefix}DecoderLayer") if prefix else ""

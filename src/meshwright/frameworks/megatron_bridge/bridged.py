"""Architectures of Hugging Face configs that AutoBridge builds, by class name."""

from __future__ import annotations

from meshwright.models import ModelSpec

BRIDGED = """
    BailingMoeV2ForCausalLM DeciLMForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM
    Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration Exaone4_5_ForConditionalGeneration
    Exaone4ForCausalLM ExaoneMoeForCausalLM FalconH1ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration GemmaForCausalLM
    Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vMoeForConditionalGeneration GlmMoeDsaForCausalLM
    GptOssForCausalLM HYV3ForCausalLM KimiK25ForConditionalGeneration KimiK2ForCausalLM
    KimiK3ForConditionalGeneration LlamaForCausalLM MiMoForCausalLM MiMoV2FlashForCausalLM MiniMaxM2ForCausalLM
    Mistral3ForConditionalGeneration MistralForCausalLM NemotronForCausalLM NemotronH_Nano_VL_V2
    NemotronHForCausalLM OlmoeForCausalLM Qwen2_5_VLForConditionalGeneration Qwen2ForCausalLM Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration Qwen3ForCausalLM
    Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    SarvamMLAForCausalLM SarvamMoEForCausalLM Step3p5ForCausalLM Step3p7ForConditionalGeneration
"""
BRIDGED_SHOWN = "Llama, Qwen2, Qwen3, Mistral, Gemma, DeepSeek, GLM, gpt-oss, Nemotron and a few others"


def is_bridged(model: ModelSpec) -> bool:
    """Return whether AutoBridge builds a model of this architecture."""
    return model.hf_class in BRIDGED.split()

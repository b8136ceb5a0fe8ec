"""Architectures of Hugging Face configs that AutoBridge builds, by class name."""

from __future__ import annotations

from meshwright.models import Attention, ModelSpec

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


READS_WINDOWS = """
    DeepseekV4ForCausalLM Exaone4_5_ForConditionalGeneration ExaoneMoeForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration MiMoV2FlashForCausalLM Step3p5ForCausalLM Step3p7ForConditionalGeneration
"""
"""Classes whose bridge reads the window of every layer from the config."""
FULL_EVERY = {
    "MistralForCausalLM": 0,
    "Gemma2ForCausalLM": 2,
    "GptOssForCausalLM": 2,
    "Gemma3ForCausalLM": 6,
    "Gemma3ForConditionalGeneration": 6,
}
"""Classes whose bridge has a pattern of its own: every how many layers one has full attention; 0 for none."""


def loses_windows(model: ModelSpec) -> bool:
    """Return whether AutoBridge builds other sliding windows than the model has; most bridges read none."""
    windows = [bool(layer.mixer.window) for layer in model.layers if isinstance(layer.mixer, Attention)]
    if not any(windows) or model.hf_class in READS_WINDOWS.split():
        return False
    every = FULL_EVERY.get(model.hf_class)
    return every is None or windows != [not every or place % every != 0 for place in range(1, len(windows) + 1)]

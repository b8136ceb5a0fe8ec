"""Which model types our engine trains: those whose loss and gradients agree with transformers' own forward pass.

`benchmarks/engine_types.py` compares every type that the reader knows; this table is its result.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import InputError
from meshwright.models import ModelSpec

TRAINED = frozenset(
    """arcee aria_text bitnet cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 exaone4 exaone_moe flex_olmo gemma
    gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm4v_moe glm4v_moe_text gpt2 gpt_oss helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 kimi_k2 llama minimax minimax_m2 ministral ministral3 mistral
    mistral3 mixtral
    nemotron nemotron_h NemotronH_Nano_VL_V2 olmo olmo2 olmoe phi3 qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905
)
UNTESTED = "a comparison of this model type with transformers"
_TYPES_BY_PART = {
    UNTESTED: "axk1 gpt-sw3 kimi_k25 mimo",
    "the multipliers of its embedding, residuals or logits": (
        "afmoe cohere cohere2 cohere2_moe granite granite_swa granitemoe granitemoe_swa granitemoeshared "
        "hyperclovax minicpm3"
    ),
    "known names for its embedding, its layers or its final norm": (
        "biogpt bloom ctrl gpt_neo gpt_neox gpt_neox_japanese mpt openai-gpt opt persimmon phi xglm"
    ),
    "the scans and short convolutions of its layers": (
        "bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2"
    ),
    "its linear attention": "kimi_linear olmo_hybrid",
    "rotary tables for each type of layer": "laguna mellum olmo3",
    "the indexer of its sparse attention": "deepseek_v32 glm_moe_dsa",
    "initial values or norms of the kind that it has": "apertus ernie4_5_moe nanochat",
    "its attention, which does not call transformers' attention interface": (
        "codegen dbrx falcon gpt_bigcode gptj phimoe"
    ),
    "chunked attention": "llama4 llama4_text",
    "parallel residual streams": "deepseek_v4 gemma3n_text hy_v4",
    "layers of different heads": "gemma4 gemma4_text gemma4_unified_text mimo_v2_flash nemotron-nas",
}
LACKS: Mapping[str, str] = {name: part for part, names in _TYPES_BY_PART.items() for name in names.split()}


def lacking(model: ModelSpec) -> str:
    """Return the part that our engine lacks to train a model; empty if it trains it."""
    if model.kind == "diffusion" or not model.model_type or model.model_type in TRAINED:
        return ""
    return LACKS.get(model.model_type, UNTESTED)


def require_trained(model: ModelSpec) -> None:
    """Raise InputError for a model that our engine does not train."""
    lacks = lacking(model)
    if not lacks:
        return
    name = model.source or model.name
    raise InputError(
        f"our engine does not train {model.model_type} models: it lacks {lacks}",
        field="model",
        value=name,
        fix=(
            f"meshwright recommend {name} --gpus 8xH100 --goal pretrain (estimate, plan and size work as well)",
            f"meshwright export {name} --to deepspeed --gpus 8xH100 (automodel for a model on the hub)",
        ),
    )

"""Which model types our engine trains, and how.

Types of the table `TRAINED` run layer by layer with the engine's own attention, experts and parallelism; their loss and
gradients agree with transformers'. Every other causal language model runs transformers' own forward pass: with data
parallelism, pipeline stages of whole blocks, recompute, compile and adapters, and with what `WHOLE_MODEL_LIMITS` leaves
out. `LACKS` is what cannot be trained at all. `benchmarks/engine_types.py` compares both kinds with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.models import TYPES_WITHOUT_CLASS, ModelSpec, is_path

TRAINED = frozenset(
    """arcee aria_text bitnet cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 exaone4 exaone_moe flex_olmo gemma
    gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm4v_moe glm4v_moe_text gpt2 gpt_oss helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 kimi_k2 llama minimax minimax_m2 ministral ministral3 mistral
    mistral3 mixtral
    gpt-sw3 nemotron nemotron_h NemotronH_Nano_VL_V2 olmo olmo2 olmoe phi3 qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905
)
NO_CLASS = "a class for it in transformers; a model's own code is never run"
_TYPES_BY_PART = {
    NO_CLASS: " ".join(TYPES_WITHOUT_CLASS),
    "a comparison of this model type with transformers": "kimi_k25",
    "causal attention in transformers' model: its first tokens see later ones": "cpmant",
    "one list of decoder layers: it has encoders and decoders of bytes and patches": "blt",
    "a main model: it drafts tokens from another model's hidden states": "gemma4_assistant gemma4_unified_assistant",
    "a text model of its own: its images and speech have adapters in every layer": "phi4_multimodal",
}
LACKS: Mapping[str, str] = {name: part for part, names in _TYPES_BY_PART.items() for name in names.split()}

# Models that run transformers' own forward pass: field -> values that work for them, what the others need.
WHOLE_MODEL_LIMITS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "layout.tp": ((1,), "tensor parallelism"),
    "layout.cp": ((1,), "context parallelism"),
    "layout.ep": ((1,), "expert parallelism"),
    "layout.etp": ((1,), "expert tensor parallelism"),
    "layout.sp": ((False,), "sequence parallelism"),
    "precision.matmul": (("same",), "8-bit matmuls"),
    "train.mtp_loss": ((0.0,), "multi-token prediction"),
    "peft.method": (("lora", "rslora", "dora"), "weights in four bits"),
    "peft.dropout": ((0.0,), "dropout keys in its adapters"),
    "kernels.attention": (("auto",), "choice of attention kernels"),
    "moe.router_z_loss": ((0.0,), "z-loss of routers"),
    "moe.capacity_factor": ((0.0,), "capacity of experts"),
    "moe.force_balance": ((False,), "forced balance of experts"),
}

# Why blocks of a type that runs transformers' own forward pass cannot be on several stages. The engine finds out by a
# trace of a small model (engine/model/block_split.py), which planning cannot run.
_UNSPLIT_TYPES = {
    "its layers receive several vectors per token": "deepseek_v4 gemma3n gemma3n_text hy_v4 qwen4_exp qwen4_exp_text",
    "its layers also receive what other modules compute": "gemma4 gemma4_text zamba zamba2 zaya",
    "its layers run several times": "hrm_text",
}
UNSPLIT: Mapping[str, str] = {name: why for why, names in _UNSPLIT_TYPES.items() for name in names.split()}


def unsplit_reason(model: ModelSpec) -> str:
    """Return why a model that runs transformers' forward pass has no pipeline stages; empty if it has."""
    return UNSPLIT.get(model.model_type, "")


def has_own_layers(model_type: str) -> bool:
    """Return whether our engine runs a type layer by layer; else it runs transformers' own forward pass."""
    return model_type in TRAINED


def lacking(model: ModelSpec) -> str:
    """Return the part that our engine lacks to train a model; empty if it trains it."""
    return "" if model.kind == "diffusion" else LACKS.get(model.model_type, "")


def is_whole(model: ModelSpec) -> bool:
    """Return whether our engine runs a model through transformers' own forward pass."""
    own = model.kind == "diffusion" or not model.model_type or has_own_layers(model.model_type)
    return not own and not lacking(model)


def _typed_name(model: ModelSpec) -> str:
    """Return how a user names a model: the path of its config, its hub id, or its catalogue name."""
    return model.source if is_path(model.source) else model.hf_id or model.name


def require_trained(model: ModelSpec) -> None:
    """Raise InputError for a model that our engine does not train."""
    lacks = lacking(model)
    if not lacks:
        return
    name = _typed_name(model)
    raise InputError(
        f"our engine does not train {model.model_type} models: it lacks {lacks}",
        field="model",
        value=name,
        fix=(
            f"meshwright recommend {name} --gpus 8xH100 --goal pretrain (estimate, plan and size work as well)",
            f"meshwright export {name} --to deepspeed --gpus 8xH100 (automodel for a model on the hub)",
        ),
    )


def require_traced(model: ModelSpec, goal: str, gpus: str) -> None:
    """Raise InputError for a model that a dry run on GPUs cannot execute."""
    require_trained(model)
    if not is_whole(model):
        return
    name = _typed_name(model)
    raise InputError(
        f"a dry run executes layers of our own engine, and {model.model_type} models run transformers' forward pass",
        field="model",
        value=name,
        fix=(
            f"meshwright estimate {name} --gpus {gpus} --goal {goal}",
            f"meshwright train {name} --goal {goal} --tiny",
        ),
    )

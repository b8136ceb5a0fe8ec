"""Further decoders with RMS norms and dense blocks; the sweep compares every row with transformers."""

from __future__ import annotations

from typing import Any

from . import derived
from .traits import ALL_ATTENTION, Traits, row

_MLA: dict[str, Any] = {"mixer": "mla", "mlp_bias": False}
_PATTERN = {"sliding_window_pattern": 4}

RMS: dict[str, Traits] = {
    "gemma": row("gemma", "GemmaForCausalLM", **ALL_ATTENTION),
    "vaultgemma": row(
        "gemma", "VaultGemmaForCausalLM", **ALL_ATTENTION, window="alternate", activation_key="hidden_activation"
    ),
    "granite_swa": row(
        "granite",
        "GraniteSWAForCausalLM",
        defaults=_PATTERN,
        **ALL_ATTENTION,
        mlp_bias="mlp_bias",
        sinks=True,
        window="pattern_first",
    ),
    "helium": row("helium", "HeliumForCausalLM", qkv_bias="attention_bias", head_dim_follows=True, mlp_bias="mlp_bias"),
    "arcee": row("arcee", "ArceeForCausalLM", **ALL_ATTENTION, mlp_bias="mlp_bias", gated=False),
    "apertus": row(
        "apertus",
        "ApertusForCausalLM",
        **ALL_ATTENTION,
        qk_norm="head",
        gated=False,
        layer_vectors=2,
        only={"hidden_act": ("xielu",)},
    ),
    "glm": row("glm", "GlmForCausalLM", qkv_bias="attention_bias"),
    "glm4": row("glm", "Glm4ForCausalLM", qkv_bias="attention_bias", layer_norms=4),
    "ernie4_5": row("ernie", "Ernie4_5ForCausalLM", qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "exaone4": row("exaone", "Exaone4ForCausalLM", qk_norm="head", window="pattern", derive=derived.exaone),
    "hyperclovax": row(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        **ALL_ATTENTION,
        mlp_bias="mlp_bias",
        layer_norms="layer_norms",
        derive=derived.post_norms,
    ),
    "hunyuan_v1_dense": row("hunyuan", "HunYuanDenseV1ForCausalLM", **ALL_ATTENTION, qk_norm="head"),
    "bitnet": row("bitnet", "BitNetForCausalLM", **ALL_ATTENTION, layer_norms=3, layer_vectors="intermediate_size"),
    "cwm": row("cwm", "CwmForCausalLM", defaults=_PATTERN, mlp_bias="mlp_bias", window="pattern_first"),
    "olmo": row("olmo", "OlmoForCausalLM", **ALL_ATTENTION, layer_norms=0, final_norms=0),
    "olmo3": row("olmo", "Olmo3ForCausalLM", defaults=_PATTERN, **ALL_ATTENTION, qk_norm="full", window="pattern"),
    "nanochat": row("nanochat", "NanoChatForCausalLM", **ALL_ATTENTION, layer_norms=0, final_norms=0, gated=False),
    "diffllama": row(
        "diffllama",
        "DiffLlamaForCausalLM",
        **ALL_ATTENTION,
        layer_vectors="lambdas",
        differential=True,
        derive=derived.lambdas,
    ),
    "youtu": row("youtu", "YoutuForCausalLM", **_MLA),
    "minicpm3": row("minicpm", "MiniCPM3ForCausalLM", mixer="mla", mlp_bias="mlp_bias"),
}

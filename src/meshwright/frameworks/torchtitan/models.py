"""The models torchtitan builds, as models of our catalogue: flavors of the 0.2 line, and presets of today."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.model_match import from_sizes, same_shape
from meshwright.models import ModelSpec, find

FAMILIES = "llama3 (1B to 405B), qwen3 (0.6B to 235B-A22B), deepseek_v3 (16B, 236B, 671B), gpt_oss (20b, 120b)"
DEBUG: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "llama",
        {
            "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 16,
            "intermediate_size": 768, "vocab_size": 2048, "max_position_embeddings": 131072,
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 3072, "vocab_size": 2048, "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 3072, "vocab_size": 2048, "num_experts": 64,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 4096,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16, "vocab_size": 2048,
            "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 2,
            "num_experts_per_tok": 3, "first_k_dense_replace": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "intermediate_size": 2880, "vocab_size": 2048, "num_local_experts": 8,
            "num_experts_per_tok": 4, "max_position_embeddings": 131072,
        },
    ),
}  # fmt: skip
"""Their test models, by sizes."""

FLAVORS: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        "debugmodel": "", "1B": "llama32_1b", "3B": "llama32_3b", "8B": "llama31_8b", "70B": "llama31_70b",
        "405B": "llama31_405b",
    },
    "qwen3": {
        "debugmodel": "", "debugmodel_moe": "", "0.6B": "qwen3_600m", "1.7B": "qwen3_1p7b", "4B": "qwen3_4b",
        "8B": "qwen3_8b", "14B": "qwen3_14b", "32B": "qwen3_32b", "30B-A3B": "qwen3_30b_a3b",
        "235B-A22B": "qwen3_235b_a22b",
    },
    "deepseek_v3": {
        "debugmodel": "", "16B": "deepseek_v2_lite", "236B": "deepseek_v2", "671B": "deepseek_v3",
    },
    "gpt_oss": {"debugmodel": "", "20b": "gpt_oss_20b", "120b": "gpt_oss_120b"},
    "llama4": {"debugmodel": "", "17bx16e": "", "17bx128e": ""},
    "flux": {"flux-debug": "", "flux-dev": "flux_12b", "flux-schnell": "flux_12b"},
}  # fmt: skip
"""Name and flavor of the 0.2 line with the model of ours; empty where we have none of that shape."""
SUFFIXES = ("_flex_flash", "_flex_attn", "_flex", "_varlen_attn", "_varlen", "_irope")
"""Flavors that differ from another only in the attention kernel."""
ELSEWHERE = ("llama3_ft", "llama3_simple_fsdp", "deepseek_v3_simple_fsdp", "vlm", "transformers_modeling_backend")
"""Models of the experiments folder, whose shapes are not known here."""
MODULES = ("llama3", "qwen3", "qwen3_5", "deepseek_v3", "gpt_oss", "kimi_k2_7", "muse_glimmer", "flux")
"""What --module takes by name today; llama4 is no longer there."""


def plain(flavor: str) -> str:
    """A flavor without the name of its attention kernel."""
    return next((flavor.removesuffix(end) for end in SUFFIXES if flavor.endswith(end)), flavor)


def flavor_model(name: str, flavor: str) -> ModelSpec | None:
    """The model of a name and flavor of the 0.2 line, or None where its shape is not known."""
    base = plain(flavor)
    found = FLAVORS.get(name, {}).get(base)
    if found is None or found:
        return find(found) if found else None
    kind = "qwen3_moe" if (name, base) == ("qwen3", "debugmodel_moe") else name
    return _debug(kind) if base.startswith("debugmodel") and kind in DEBUG else None


@cache
def _debug(kind: str) -> ModelSpec:
    model_type, sizes = DEBUG[kind]
    return from_sizes(model_type, f"{kind}_debugmodel", **sizes)


def flavor_of(model: ModelSpec) -> tuple[str, str]:
    """Their name and flavor of a model; one that they cannot build is refused."""
    for name, flavors in FLAVORS.items():
        for flavor, ours in flavors.items():
            if ours and name != "flux" and (ours == model.name or _same(ours, model)):
                return name, flavor
    for kind in DEBUG:
        if same_shape(_debug(kind), model):
            return ("qwen3", "debugmodel_moe") if kind == "qwen3_moe" else (kind, "debugmodel")
    raise InputError(
        f"torchtitan has no model of this shape; its language models are {FAMILIES}", field="model", value=model.name
    )


def _same(ours: str, model: ModelSpec) -> bool:
    return model.family == find(ours).family and same_shape(find(ours), model)


class Preset(msgspec.Struct, frozen=True):
    """A config function of today: the model, and the settings in which it differs from their defaults."""

    model: str  # of our catalogue; empty: one of the test models
    settings: Mapping[str, Any] = {}
    known: bool = True  # False: the function is there, its values are not in this table
    kernel: str = "flex"  # of attention


def _tokens(length: int, samples: int, steps: int, lr: float, **more: Any) -> dict[str, Any]:
    return {
        "training.num_tokens_per_microbatch_per_dp_rank": samples * length,
        "training.max_context_length": length,
        "training.steps": steps,
        "optimizer.param_groups.0.optimizer_kwargs.lr": lr,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def _debug_settings(**more: Any) -> dict[str, Any]:
    start = {"lr_scheduler__warmup_steps": 2, "lr_scheduler__decay_ratio": 0.8, "metrics__log_freq": 1}
    return _tokens(2048, 8, 10, 8e-4, checkpoint__interval=10, **start, **WITH_STATE, **more)


WITH_STATE = {"checkpoint__last_save_model_only": False}
"""The last checkpoint is whole, not weights alone."""


PROFILED = {"profiler__enable_profiling": True, "validator__freq": 500, "validator__steps": 1200}
FULL = {"activation_checkpoint__mode": "full"}
COSINE = {
    "lr_scheduler__decay_ratio": 0.8, "lr_scheduler__decay_type": "cosine", "lr_scheduler__min_lr_factor": 0.1,
}  # fmt: skip
LONG = {"lr_scheduler__warmup_steps": 600, **FULL}
QUICK = {"lr_scheduler__warmup_steps": 2, "metrics__log_freq": 1}
LONG_WARMUP = {"lr_scheduler__warmup_steps": 2000}
ONLY_LOSS = {"compile__enable": True, "compile__components": ["loss"], "training__disable_cuda_graphs": True}
STAGED = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "llama3": {
        "llama3_debugmodel": Preset("", _debug_settings(**STAGED)),
        "llama3_debugmodel_varlen_attn": Preset(
            "", _debug_settings(**STAGED, training__disable_cuda_graphs=True), kernel="varlen"
        ),
        "sft_debugmodel": Preset("", _debug_settings()),
        "llama3_8b": Preset("llama31_8b", _tokens(8192, 1, 1000, 3e-4, **PROFILED)),
        "llama3_70b": Preset(
            "llama31_70b",
            _tokens(8192, 8, 1000, 1.5e-4, **PROFILED, **FULL, parallelism__tensor_parallel_degree=8),
        ),
        "llama3_405b": Preset(
            "llama31_405b",
            _tokens(
                8192, 2, 3000, 8e-5, **PROFILED, **FULL,
                lr_scheduler__warmup_steps=600,
                parallelism__tensor_parallel_degree=8,
                compile__enable=True,
                compile__enable_async_tensor_parallel=True,
                model__converters=["quantize.linear.float8"],
            ),
        ),
    },
    "qwen3": {
        "qwen3_debugmodel": Preset("", _debug_settings()),
        "qwen3_moe_debug": Preset(
            "", _tokens(4096, 4, 10, 3e-4, **WITH_STATE, **QUICK, checkpoint__interval=10)
        ),
        "qwen3_0_6b": Preset("qwen3_600m", _tokens(4096, 4, 10, 3e-4, **WITH_STATE, **QUICK)),
        "qwen3_1_7b": Preset(
            "qwen3_1p7b",
            _tokens(4096, 4, 100, 8e-4, **WITH_STATE, lr_scheduler__warmup_steps=20, checkpoint__interval=50),
        ),
        "qwen3_14b": Preset("qwen3_14b", _tokens(4096, 4, 3000, 8e-4, **WITH_STATE, **LONG)),
        "qwen3_30b_a3b": Preset("qwen3_30b_a3b", _tokens(4096, 2, 3000, 8e-4, **WITH_STATE, **LONG)),
        "qwen3_32b": Preset("qwen3_32b", _tokens(4096, 2, 3000, 8e-4, **WITH_STATE, **LONG)),
    },
    "deepseek_v3": {
        "deepseek_v3_debugmodel": Preset("", _debug_settings()),
        "deepseek_v3_16b": Preset(
            "deepseek_v2_lite",
            _tokens(
                4096, 4, 1000, 2.2e-4, **COSINE, **ONLY_LOSS, **STAGED,
                parallelism__expert_parallel_degree=8, checkpoint__interval=10,
            ),
        ),
        "deepseek_v3_671b": Preset(
            "deepseek_v3",
            _tokens(
                4096, 4, 10000, 2.2e-4, **COSINE, **ONLY_LOSS, **STAGED,
                parallelism__expert_parallel_degree=2, **LONG_WARMUP,
            ),
        ),
    },
    "gpt_oss": {
        "gpt_oss_debugmodel": Preset(
            "",
            _debug_settings(activation_checkpoint__mode="none", validator__freq=5, validator__steps=10),
        ),
        "gpt_oss_20b": Preset("gpt_oss_20b", _tokens(8192, 1, 10000, 8e-4, **LONG_WARMUP, **COSINE, **FULL)),
        "gpt_oss_120b": Preset("gpt_oss_120b", _tokens(8192, 1, 10000, 8e-4, **LONG_WARMUP, **COSINE, **FULL)),
    },
    "qwen3_5": {
        f"qwen35_{size}": Preset(f"qwen35_{ours}", known=False)
        for size, ours in {
            "0_8b": "800m", "2b": "2b", "4b": "4b", "9b": "9b", "27b": "27b", "35b_a3b": "35b_a3b",
            "122b_a10b": "122b_a10b", "397b_a17b": "397b_a17b",
        }.items()
    },
}  # fmt: skip
"""By module and config, 2026-08-21 and 0.3.0."""


def preset_model(module: str, config: str) -> ModelSpec | None:
    """The model of a preset, or None where its shape is not known."""
    preset = PRESETS.get(module, {}).get(config)
    if preset is None:
        return None
    if preset.model:
        return find(preset.model)
    kind = "qwen3_moe" if config == "qwen3_moe_debug" else module
    return _debug(kind) if kind in DEBUG else None


POSITIONS = {"llama3": 131072, "qwen3": 40960, "deepseek_v3": 16384, "gpt_oss": 131072}
SHORT = {"qwen3_debugmodel": 4096, "qwen3_moe_debug": 4096}
"""Positions that the rotary table of a preset holds, by module, and of those that differ."""


def positions_of(module: str, config: str) -> int | None:
    """The longest sequence of a preset of theirs; None where that is not known."""
    return SHORT.get(config, POSITIONS.get(module)) if config in PRESETS.get(module, {}) else None


def preset_of(model: ModelSpec) -> tuple[str, str] | None:
    """Their module and config for a model, or None where today's presets have none of that shape."""
    for module, presets in PRESETS.items():
        for config, preset in presets.items():
            found = preset_model(module, config)
            if found is None or preset.kernel != "flex" or config.startswith("sft"):
                continue
            if found.name == model.name or (found.family == model.family and same_shape(found, model)):
                return module, config
    return None

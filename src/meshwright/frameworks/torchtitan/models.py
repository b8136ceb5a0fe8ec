"""torchtitan's models in our catalog: flavors of the 0.2 line, and presets of 0.3.0 and main."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from meshwright.frameworks.model_match import from_sizes, same_shape
from meshwright.models import ModelSpec, find

FAMILIES = "llama3 (8B to 405B), qwen3 (0.6B to 235B-A22B), deepseek_v3 (16B, 236B, 671B), gpt_oss (20b, 120b)"
DEBUG_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
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
"""Sizes of torchtitan's debug models."""

FLAVORS: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        "debugmodel": "", "8B": "llama31_8b", "70B": "llama31_70b",
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
"""Catalog model by name and flavor of the 0.2 line; empty if the catalog has none of that shape."""
KERNEL_SUFFIXES = ("_flex_flash", "_flex_attn", "_flex", "_varlen_attn", "_varlen", "_irope")
"""Flavor suffixes that only select the attention kernel."""
EXPERIMENT_MODELS = (
    "llama3_ft",
    "llama3_simple_fsdp",
    "deepseek_v3_simple_fsdp",
    "vlm",
    "transformers_modeling_backend",
)
"""Models of torchtitan/experiments, whose shapes are unknown here."""
MODULES = ("llama3", "qwen3", "qwen3_5", "deepseek_v3", "gpt_oss", "kimi_k2_7", "muse_glimmer", "flux")
"""Names accepted by --module; llama4 was removed."""


def base_flavor(flavor: str) -> str:
    """Return a flavor without its attention-kernel suffix."""
    return next((flavor.removesuffix(end) for end in KERNEL_SUFFIXES if flavor.endswith(end)), flavor)


def flavor_model(name: str, flavor: str) -> ModelSpec | None:
    """Return the model of a name and flavor of the 0.2 line, or None if its shape is unknown."""
    base = base_flavor(flavor)
    catalog_name = FLAVORS.get(name, {}).get(base)
    if catalog_name is None or catalog_name:
        return find(catalog_name) if catalog_name else None
    debug_name = "qwen3_moe" if (name, base) == ("qwen3", "debugmodel_moe") else name
    return _debug_model(debug_name) if base.startswith("debugmodel") and debug_name in DEBUG_MODELS else None


@cache
def _debug_model(name: str) -> ModelSpec:
    model_type, sizes = DEBUG_MODELS[name]
    return from_sizes(model_type, f"{name}_debugmodel", **sizes)


def flavor_of(model: ModelSpec) -> tuple[str, str] | None:
    """Return torchtitan's name and flavor for a model, or None if it lists none."""
    for name, flavors in FLAVORS.items():
        for flavor, catalog_name in flavors.items():
            if catalog_name and name != "flux" and _matches(catalog_name, model):
                return name, flavor
    for debug_name in DEBUG_MODELS:
        if same_shape(_debug_model(debug_name), model):
            return ("qwen3", "debugmodel_moe") if debug_name == "qwen3_moe" else (debug_name, "debugmodel")
    return None


def _matches(catalog_name: str, model: ModelSpec) -> bool:
    return model.family == find(catalog_name).family and same_shape(find(catalog_name), model)


class Preset(msgspec.Struct, frozen=True):
    """A config function: its model, and the settings that differ from torchtitan's defaults."""

    model: str  # in our catalog; empty: a debug model
    settings: Mapping[str, Any] = {}
    known: bool = True  # False: the function exists, but its values are not listed here
    kernel: str = "flex"  # attention kernel


def _settings(length: int, samples: int, steps: int, lr: float, **more: Any) -> dict[str, Any]:
    return {
        "training.num_tokens_per_microbatch_per_dp_rank": samples * length,
        "training.max_context_length": length,
        "training.steps": steps,
        "optimizer.param_groups.0.optimizer_kwargs.lr": lr,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def _debug_settings(**more: Any) -> dict[str, Any]:
    start = {"lr_scheduler__warmup_steps": 2, "lr_scheduler__decay_ratio": 0.8, "metrics__log_freq": 1}
    return _settings(2048, 8, 10, 8e-4, checkpoint__interval=10, **start, **FULL_CKPT, **more)


FULL_CKPT = {"checkpoint__last_save_model_only": False}
"""The last checkpoint includes optimizer state."""


PROFILED = {"profiler__enable_profiling": True, "validator__freq": 500, "validator__steps": 1200}
FULL_AC = {"activation_checkpoint__mode": "full"}
COSINE = {
    "lr_scheduler__decay_ratio": 0.8, "lr_scheduler__decay_type": "cosine", "lr_scheduler__min_lr_factor": 0.1,
}  # fmt: skip
LONG_RUN = {"lr_scheduler__warmup_steps": 600, **FULL_AC}
SHORT_RUN = {"lr_scheduler__warmup_steps": 2, "metrics__log_freq": 1}
LONG_WARMUP = {"lr_scheduler__warmup_steps": 2000}
COMPILE_LOSS_ONLY = {"compile__enable": True, "compile__components": ["loss"], "training__disable_cuda_graphs": True}
INTERLEAVED = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
PRESETS: Mapping[str, Mapping[str, Preset]] = {
    "llama3": {
        "llama3_debugmodel": Preset("", _debug_settings(**INTERLEAVED)),
        "llama3_debugmodel_varlen_attn": Preset(
            "", _debug_settings(**INTERLEAVED, training__disable_cuda_graphs=True), kernel="varlen"
        ),
        "sft_debugmodel": Preset("", _debug_settings()),
        "llama3_8b": Preset("llama31_8b", _settings(8192, 1, 1000, 3e-4, **PROFILED)),
        "llama3_70b": Preset(
            "llama31_70b",
            _settings(8192, 8, 1000, 1.5e-4, **PROFILED, **FULL_AC, parallelism__tensor_parallel_degree=8),
        ),
        "llama3_405b": Preset(
            "llama31_405b",
            _settings(
                8192, 2, 3000, 8e-5, **PROFILED, **FULL_AC,
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
            "", _settings(4096, 4, 10, 3e-4, **FULL_CKPT, **SHORT_RUN, checkpoint__interval=10)
        ),
        "qwen3_0_6b": Preset("qwen3_600m", _settings(4096, 4, 10, 3e-4, **FULL_CKPT, **SHORT_RUN)),
        "qwen3_1_7b": Preset(
            "qwen3_1p7b",
            _settings(4096, 4, 100, 8e-4, **FULL_CKPT, lr_scheduler__warmup_steps=20, checkpoint__interval=50),
        ),
        "qwen3_14b": Preset("qwen3_14b", _settings(4096, 4, 3000, 8e-4, **FULL_CKPT, **LONG_RUN)),
        "qwen3_30b_a3b": Preset("qwen3_30b_a3b", _settings(4096, 2, 3000, 8e-4, **FULL_CKPT, **LONG_RUN)),
        "qwen3_32b": Preset("qwen3_32b", _settings(4096, 2, 3000, 8e-4, **FULL_CKPT, **LONG_RUN)),
    },
    "deepseek_v3": {
        "deepseek_v3_debugmodel": Preset("", _debug_settings()),
        "deepseek_v3_16b": Preset(
            "deepseek_v2_lite",
            _settings(
                4096, 4, 1000, 2.2e-4, **COSINE, **COMPILE_LOSS_ONLY, **INTERLEAVED,
                parallelism__expert_parallel_degree=8, checkpoint__interval=10,
            ),
        ),
        "deepseek_v3_671b": Preset(
            "deepseek_v3",
            _settings(
                4096, 4, 10000, 2.2e-4, **COSINE, **COMPILE_LOSS_ONLY, **INTERLEAVED,
                parallelism__expert_parallel_degree=2, **LONG_WARMUP,
            ),
        ),
    },
    "gpt_oss": {
        "gpt_oss_debugmodel": Preset(
            "",
            _debug_settings(activation_checkpoint__mode="none", validator__freq=5, validator__steps=10),
        ),
        "gpt_oss_20b": Preset("gpt_oss_20b", _settings(8192, 1, 10000, 8e-4, **LONG_WARMUP, **COSINE, **FULL_AC)),
        "gpt_oss_120b": Preset("gpt_oss_120b", _settings(8192, 1, 10000, 8e-4, **LONG_WARMUP, **COSINE, **FULL_AC)),
    },
    "qwen3_5": {
        f"qwen35_{size}": Preset(f"qwen35_{catalog_size}", known=False)
        for size, catalog_size in {
            "0_8b": "800m", "2b": "2b", "4b": "4b", "9b": "9b", "27b": "27b", "35b_a3b": "35b_a3b",
            "122b_a10b": "122b_a10b", "397b_a17b": "397b_a17b",
        }.items()
    },
}  # fmt: skip
"""Presets by module and config, on main (2026-08-21) and in 0.3.0."""


def preset_model(module: str, config: str) -> ModelSpec | None:
    """Return the model of a preset, or None if its shape is unknown."""
    preset = PRESETS.get(module, {}).get(config)
    if preset is None:
        return None
    if preset.model:
        return find(preset.model)
    debug_name = "qwen3_moe" if config == "qwen3_moe_debug" else module
    return _debug_model(debug_name) if debug_name in DEBUG_MODELS else None


MODULE_POSITIONS = {"llama3": 131072, "qwen3": 40960, "deepseek_v3": 16384, "gpt_oss": 131072}
PRESET_POSITIONS = {"qwen3_debugmodel": 4096, "qwen3_moe_debug": 4096}
"""Size of the RoPE table by module, and of presets that differ."""


def max_positions(module: str, config: str) -> int | None:
    """Return the longest sequence of a preset, or None if unknown."""
    return PRESET_POSITIONS.get(config, MODULE_POSITIONS.get(module)) if config in PRESETS.get(module, {}) else None


def preset_of(model: ModelSpec) -> tuple[str, str] | None:
    """Return the module and config for a model, or None if no preset has its shape."""
    for module, presets in PRESETS.items():
        for config, preset in presets.items():
            found = preset_model(module, config)
            if found is None or preset.kernel != "flex" or config.startswith("sft"):
                continue
            if found.family == model.family and same_shape(found, model):
                return module, config
    return None

"""Choices that a front end's code checks when it starts: its schema has them as text, so the key tables have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from meshwright.frameworks.front_ends.near_values import SWIFT_TUNERS
from meshwright.frameworks.key_table import Key
from meshwright.frameworks.start_checks import CHOICES
from meshwright.frameworks.start_checks.trl import GRPO_LOSSES
from meshwright.frameworks.types import Settings

PLUGINS = ("external_plugins", "custom_register_path")  # files that register more names in ms-swift
PROJECTIONS = ("std", "reverse_std", "right", "left", "full")  # of GaLore


class _Choices(NamedTuple):
    """The values that a key takes."""

    values: tuple[str, ...]
    place: str  # upstream: file and function
    unless: tuple[str, ...] = ()  # keys with which a file of the user's adds values


_TORCHAO = _Choices(
    ("int4", "int8", "float8_e4m3fn", "fp8", "float8", "nvfp4", "mxfp4"),
    "axolotl/utils/schemas/quantization.py: validate_ao_dtype",
)
_KERNELS = "axolotl/integrations/kernels/args.py: KernelsArgs"
_SWIFT_TUNERS = _Choices(
    (*SWIFT_TUNERS, "ia3", "lora_llm", "dummy"), "swift/pipelines/train/tuner.py: prepare_model", PLUGINS
)
_AGENTS = _Choices(
    (
        *("react_en", "react_zh", "qwen_en", "qwen_zh", "qwen_en_parallel", "qwen_zh_parallel", "qwen3_coder"),
        *(
            "qwen3_5",
            "hermes",
            "hunyuan_hermes",
            "hy_v3_preview",
            "hy_v3",
            "toolbench",
            "chatglm4",
            "glm4",
            "glm4_0414",
        ),
        *("glm4_5", "glm4_7", "glm5_1", "llama3", "llama4", "deepseek_v3_1", "deepseek_v4", "minimax_m2", "minimax_m3"),
        *("seed_oss", "gemma4", "react_grpo", "mistral", "youtu", "kimi_k25", "kimi_k3", "minicpm5"),
    ),
    "swift/agent_template/mapping.py: agent_template_map",
    PLUGINS,
)
_SWIFT = {"agent_template": _AGENTS}
_GRPO = "trl/trainer/grpo_trainer.py: GRPOTrainer"
CHECKED: Mapping[str, Mapping[str, _Choices]] = {
    "axolotl": {
        "sample_packing_mp_start_method": _Choices(
            ("fork", "spawn", "forkserver"), "axolotl/core/trainers/base.py: AxolotlTrainer._create_multipack_sampler"
        ),
        "expert_backend": _Choices(("scattermoe", "sonicmoe", "eager", "builtin"), _KERNELS),
        "moe_grouped_backend": _Choices(("auto", "marlin", "cutlass", "deepgemm"), _KERNELS),
        "nonexpert_quantization": _Choices(("none", "bf16", "fp8", "fp8_blockwise", "nf4", "nvfp4"), _KERNELS),
        "dsv4_fp8_nonexpert_mode": _Choices(("float8tensor", "bf16"), _KERNELS),
        "dsv4_fp4_grouped_mode": _Choices(("nvfp4",), _KERNELS),
        "swanlab_mode": _Choices(
            ("cloud", "local", "offline", "disabled"), "axolotl/integrations/swanlab/plugins.py: SwanLabPlugin.register"
        ),
        "qgalore_proj_type": _Choices(PROJECTIONS, "q_galore_torch: GaLoreProjector.project"),
        "trl.loss_type": _Choices(GRPO_LOSSES, f"{_GRPO}._compute_loss"),
        **{
            f"{section}.{name}": _TORCHAO
            for section in ("qat", "quantization")
            for name in ("weight_dtype", "activation_dtype")
        },
    },
    "llama_factory": {
        "tool_format": _Choices(
            ("default", "gemma4", "glm4", "llama3", "lfm2", "minimax1", "minimax2", "mistral", "qwen", "qwen3_5",
                "glm4_moe", "seed_oss", "ling"), "llamafactory/data/tool_utils.py: get_tool_utils"),
        "recompute_granularity": _Choices(
            ("full", "selective"), "llamafactory/hparams/megatron_bridge_args.py: MegatronBridgeArguments.__post_init__"
        ),
    },
    "ms_swift": {
        **_SWIFT,
        "tuner_type": _SWIFT_TUNERS,
        "optimizer": _Choices(
            ("default", "galore", "lorap", "muon", "muonclip", "multimodal"),
            "swift/optimizers/mapping.py: optimizers_map", PLUGINS),
        "galore_proj_type": _Choices(PROJECTIONS, "swift/optimizers/galore: GaLoreProjector.project"),
        "eval_metric": _Choices(
            ("acc", "nlg", "infonce", "paired", "reranker"), "swift/metrics/mapping.py: eval_metrics_map", PLUGINS
        ),
    },
    "ms_swift_megatron": _SWIFT,
    "trl": {
        "vllm_mode": _Choices(("server", "colocate"), "trl/generation/vllm_generation.py: VLLMGeneration"),
        "importance_sampling_level": _Choices(("token", "sequence"), f"{_GRPO}._compute_loss"),
        "multi_objective_aggregation": _Choices(("sum_then_normalize", "normalize_then_sum"), _GRPO),
        "scale_rewards": _Choices(("group", "batch", "none", "true", "false"), _GRPO),
        "vllm_importance_sampling_mode": _Choices(
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"), _GRPO
        ),
        "f_divergence_type": _Choices(
            ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
            "trl/trainer/dpo_trainer.py: DPOTrainer._compute_loss"),
        "packing_strategy": _Choices(
            ("bfd", "bfd_split", "bfd-requeue", "wrapped"), "trl/data_utils.py: pack_dataset"
        ),
    },
}  # fmt: skip
"""Choices by table and key. `bfd-requeue` is what TRL called bfd_split before 1.0, and takes still."""


def with_checked(table: str, owner: str, key: Key, settings: Settings) -> Key:
    """Return a key with the choices that the front end's code checks; the Trainer's are those of start_checks."""
    if not owner and key.name in CHOICES:
        return msgspec.structs.replace(key, choices=())
    found = CHECKED.get(table, {}).get(f"{owner}.{key.name}".lstrip("."))
    if found is None or any(name == one.partition("[")[0] for one in settings for name in found.unless):
        return key
    return msgspec.structs.replace(key, types=key.types or ("str",), choices=found.values)

"""Tiny mixture-of-experts blocks of transformers' families, with transformers' loop or with our function."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from meshwright.engine import experts as moe
from meshwright.engine.experts.dispatch import ExpertAxis

H, I, E, K = 16, 8, 8, 2  # noqa: E741 - the width's usual letter
WIDTHS = {"hidden_size": H, "moe_intermediate_size": I, "intermediate_size": I, "num_experts_per_tok": K}
WIDTHS |= {"num_attention_heads": 2, "num_key_value_heads": 2}  # blocks have none, configs check them
SHARED = {"n_shared_experts": 1, "n_group": 2, "topk_group": 1}
QWEN = {"num_experts": E, "norm_topk_prob": True, "shared_expert_intermediate_size": I}
# family: (config class, block class, settings of its config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", QWEN),
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock", {"num_local_experts": E}),
    "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock", {"num_experts": E}),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2Moe",
        {"n_routed_experts": E, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5} | SHARED,
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE", {"n_routed_experts": E} | SHARED),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeMoE", {"n_routed_experts": E} | SHARED),
    "gpt_oss": ("GptOssConfig", "GptOssMLP", {"num_local_experts": E}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextSparseMoeBlock", QWEN),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeSparseMoeBlock", QWEN),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHMoE",
        {"n_routed_experts": E, "moe_shared_expert_intermediate_size": I, "moe_latent_size": 12} | SHARED,
    ),
}
for _family in FAMILIES:  # before the ranks are forked: an import in each of them costs seconds
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")


def block_of(family: str, device: str = "cpu") -> Any:
    """Return a family's tiny block with random parameters, running transformers' own loop."""
    config_name, block_name, settings = FAMILIES[family]
    package = f"transformers.models.{family}"
    config = getattr(importlib.import_module(f"{package}.configuration_{family}"), config_name)(**WIDTHS | settings)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(device):
        block = getattr(importlib.import_module(f"{package}.modeling_{family}"), block_name)(config)
    for tensor in (*block.parameters(), *block.buffers()):
        nn.init.normal_(tensor, std=0.3)
    return block.train()


def ours(family: str, axis: ExpertAxis | None = None) -> Any:
    """Return the same block with our function, sharded for this rank of an axis."""
    moe.register()
    block = block_of(family)
    block.experts.config._experts_implementation = moe.IMPLEMENTATION
    moe.reshape_experts(block.experts)
    if axis is not None:
        block.experts.axis = axis
        for name, spec in moe.shard_specs(block.experts).items():
            part = slice_of(getattr(block.experts, name).data, spec, axis)
            setattr(block.experts, name, nn.Parameter(part.contiguous()))
    return block


def slice_of(full: torch.Tensor, spec: moe.ExpertShardSpec, axis: ExpertAxis) -> torch.Tensor:
    part = full.chunk(axis.ep, spec.ep_dim)[axis.rank // axis.etp]
    return part if spec.etp_dim is None else part.chunk(axis.etp, spec.etp_dim)[axis.etp_rank]


def forward(block: Any, x: torch.Tensor) -> torch.Tensor:
    out = block(x)
    return out[0] if isinstance(out, tuple) else out


def differ(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    assert found is not None
    assert wanted is not None
    if not wanted.numel():
        return 0.0
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def inputs(tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, tokens // 2, H), torch.randn(2, tokens // 2, H)

"""GPT-OSS, GPT-3 and vanilla GPT."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

GPT_PRETRAIN: dict[str, Any] = {
    "global_batch_size": 512,
    "warmup_steps": 2000,
    "steps": 1_000_000,
    "per_token_loss": True,
}
OSS_20B_LAYOUT: dict[str, Any] = {"tp": 2, "pp": 4, "ep": 4}


@recipe(family="gpt", published=Published(measured="megatron_bridge_verification_cards"))
def gpt_oss_20b_pretrain_config() -> Recipe:
    return pretrain("gpt_oss_20b", 16, **GPT_PRETRAIN, **OSS_20B_LAYOUT)


@recipe(family="gpt")
def gpt_oss_20b_sft_config() -> Recipe:
    return sft("gpt_oss_20b", 8, ep=8, overlap_grad_reduce=False)


@recipe(family="gpt")
def gpt_oss_20b_peft_config() -> Recipe:
    return peft("gpt_oss_20b", 1, overlap_grad_reduce=False)


@recipe(family="gpt")
def gpt_oss_20b_pretrain_fp8_current_scaling_config() -> Recipe:
    return pretrain("gpt_oss_20b", 16, matmul="fp8_tensor", **GPT_PRETRAIN, **OSS_20B_LAYOUT)


@recipe(family="gpt")
def gpt_oss_20b_sft_fp8_current_scaling_config() -> Recipe:
    return sft("gpt_oss_20b", 8, ep=8, matmul="fp8_tensor", overlap_grad_reduce=False)


@recipe(family="gpt")
def gpt_oss_20b_peft_fp8_current_scaling_config() -> Recipe:
    return peft("gpt_oss_20b", 1, matmul="fp8_tensor", overlap_grad_reduce=False)


@recipe(family="gpt")
def gpt_oss_20b_pretrain_mxfp8_config() -> Recipe:
    """MXFP8 needs block-scaled tensor cores, which Hopper has not."""
    return pretrain("gpt_oss_20b", "16xB200", matmul="mxfp8", fp8_gather=True, **GPT_PRETRAIN, **OSS_20B_LAYOUT)


@recipe(family="gpt")
def gpt_oss_20b_sft_mxfp8_config() -> Recipe:
    """MXFP8 needs block-scaled tensor cores, which Hopper has not."""
    return sft("gpt_oss_20b", "8xB200", ep=8, matmul="mxfp8", overlap_grad_reduce=False)


@recipe(family="gpt")
def gpt_oss_20b_peft_mxfp8_config() -> Recipe:
    """MXFP8 needs block-scaled tensor cores, which Hopper has not."""
    return peft("gpt_oss_20b", "1xB200", matmul="mxfp8", fp8_gather=True, overlap_grad_reduce=False)


@recipe(family="gpt")
def gpt_oss_120b_pretrain_config() -> Recipe:
    return pretrain("gpt_oss_120b", 64, tp=2, pp=4, ep=16, **GPT_PRETRAIN)


@recipe(family="gpt", published=Published(start={"recompute": "none"}))
def gpt_oss_120b_sft_config() -> Recipe:
    return sft("gpt_oss_120b", 32, pp=4, ep=8, overlap_grad_reduce=False, recompute="full")


@recipe(family="gpt")
def gpt_oss_120b_peft_config() -> Recipe:
    return peft("gpt_oss_120b", 8, ep=8, overlap_grad_reduce=False)


@recipe(family="gpt")
def vanilla_gpt_pretrain_config() -> Recipe:
    return pretrain("vanilla_gpt", 1, micro_batch_size=2, seq_length=1024)


@recipe(family="gpt", published=Published(tp=4, pp=8, start={"recompute": "none", "offload": "none"}))
def gpt3_175b_pretrain_config() -> Recipe:
    return pretrain(
        "gpt3_175b",
        32,
        tp=4,
        pp=8,
        vp=6,
        micro_batch_size=2,
        global_batch_size=2048,
        seq_length=2048,
        lr=9e-5,
        min_lr=9e-6,
        warmup_steps=2000,
        steps=1_168_251,
        reduce="bf16",
        grads="bf16",
        tp_comm_overlap=True,
        offload="optimizer",
        recompute="selective",
    )

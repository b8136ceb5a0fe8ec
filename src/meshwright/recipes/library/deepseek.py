"""DeepSeek."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import pretrain
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

DEEPSEEK_PRETRAIN: dict[str, Any] = {"warmup_steps": 2000, "steps": 1_000_000}


@recipe(family="deepseek", published=Published(tp=1, pp=1, ep=8, gpus=8))
def deepseek_v2_lite_pretrain_config() -> Recipe:
    return pretrain(
        "deepseek_v2_lite",
        8,
        ep=8,
        global_batch_size=512,
        recompute="full",
        shared_expert_overlap=True,
        **DEEPSEEK_PRETRAIN,
    )


@recipe(family="deepseek", published=Published(tp=1, pp=4, ep=32, gpus=128))
def deepseek_v2_pretrain_config() -> Recipe:
    return pretrain(
        "deepseek_v2",
        128,
        pp=4,
        ep=32,
        global_batch_size=512,
        recompute="full",
        shared_expert_overlap=True,
        **DEEPSEEK_PRETRAIN,
    )


@recipe(family="deepseek", published=Published(tp=2, pp=16, ep=64, gpus=2048, start={"recompute": "none"}))
def deepseek_v3_pretrain_config() -> Recipe:
    return pretrain(
        "deepseek_v3",
        2048,
        tp=2,
        pp=16,
        ep=64,
        global_batch_size=4096,
        reduce="bf16",
        grads="bf16",
        dispatcher="hybridep",
        stage_layers=(4,) * 15 + (1,),
        mtp_loss=0.1,
        moments="bf16",
        recompute="selective",
        **DEEPSEEK_PRETRAIN,
    )


@recipe(family="deepseek", published=Published(tp=2, pp=8, ep=32, gpus=256))
def deepseek_v3_pretrain_config_32nodes() -> Recipe:
    return pretrain(
        "deepseek_v3",
        256,
        tp=2,
        pp=8,
        ep=32,
        global_batch_size=4096,
        recompute="full",
        reduce="bf16",
        grads="bf16",
        dispatcher="hybridep",
        stage_layers=(8,) * 7 + (5,),
        mtp_loss=0.1,
        moments="bf16",
        **DEEPSEEK_PRETRAIN,
    )

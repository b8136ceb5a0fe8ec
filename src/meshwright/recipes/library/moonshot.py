"""Moonlight and Kimi K2."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

MOONLIGHT: dict[str, Any] = {
    "ep": 8,
    "steps": 100,
    "reduce": "bf16",
    "grads": "bf16",
    "dispatcher": "hybridep",
    "ep_overlap": True,
    "moments": "bf16",
}


@recipe(family="moonshot", published=Published(measured="megatron_bridge_verification_cards", ep=8))
def moonlight_16b_pretrain_config() -> Recipe:
    return pretrain("moonlight_16b", 16, micro_batch_size=2, global_batch_size=1024, warmup_steps=40, **MOONLIGHT)


@recipe(family="moonshot")
def moonlight_16b_sft_config() -> Recipe:
    return sft("moonlight_16b", 8, global_batch_size=8, seq_length=8192, warmup_steps=10, beta2=0.95, **MOONLIGHT)


@recipe(family="moonshot", published=Published(ep=8))
def moonlight_16b_peft_config() -> Recipe:
    return peft(
        "moonlight_16b",
        8,
        ep=8,
        global_batch_size=32,
        warmup_steps=10,
        steps=100,
        beta2=0.95,
        rank=8,
        alpha=16.0,
        targets=("qkv", "proj"),
        shared_expert_overlap=True,
    )


@recipe(family="moonshot", published=Published(tp=2, pp=16, ep=32, start={"recompute_modules": ()}))
def kimi_k2_pretrain_config() -> Recipe:
    return pretrain(
        "kimi_k2",
        512,
        tp=2,
        pp=16,
        ep=32,
        global_batch_size=4096,
        warmup_steps=2000,
        steps=1_000_000,
        beta2=0.999,
        optimizer_name="muon",
        recompute="selective",
        stage_layers=(4,) * 15 + (1,),
        shared_expert_overlap=True,
        recompute_modules=("moe",),
    )

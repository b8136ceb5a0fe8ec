"""Qwen3 MoE and Qwen3-Next."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

FINETUNE: dict[str, Any] = {"global_batch_size": 32, "warmup_steps": 10, "steps": 100, "beta2": 0.95}


@recipe(
    family="qwen_moe",
    published=Published(
        tp=1, pp=1, ep=8, gpus=8, start={"recompute": "none", "recompute_modules": (), "loss": "vocab_parallel"}
    ),
)
def qwen3_30b_a3b_pretrain_config() -> Recipe:
    return pretrain(
        "qwen3_30b_a3b",
        8,
        ep=8,
        global_batch_size=1024,
        warmup_steps=40,
        steps=100,
        reduce="bf16",
        dispatcher="hybridep",
        loss="chunked",
        recompute="selective",
        recompute_modules=("moe",),
    )


@recipe(
    family="qwen_moe",
    published=Published(tp=1, pp=1, ep=8, gpus=8, start={"recompute": "none", "defer_grad_sync": True}),
)
def qwen3_30b_a3b_sft_config() -> Recipe:
    return sft("qwen3_30b_a3b", 8, ep=8, defer_grad_sync=False, recompute="selective", **FINETUNE)


@recipe(family="qwen_moe", published=Published(tp=1, pp=1, ep=1, gpus=1))
def qwen3_30b_a3b_peft_config() -> Recipe:
    return peft("qwen3_30b_a3b", 1, rank=8, alpha=16.0, targets=("qkv", "proj"), dispatcher="deepep", **FINETUNE)


@recipe(family="qwen_moe", published=Published(tp=4, pp=16, cp=2, ep=8, gpus=512))
def qwen3_235b_a22b_pretrain_config() -> Recipe:
    return pretrain(
        "qwen3_235b_a22b",
        256,
        tp=4,
        pp=16,
        cp=2,
        ep=8,
        dispatcher="deepep",
        embedding_as_layer=True,
        head_as_layer=True,
    )


@recipe(
    family="qwen_moe",
    published=Published(tp=4, pp=8, ep=8, gpus=256, start={"recompute": "none", "loss": "vocab_parallel"}),
)
def qwen3_235b_a22b_sft_config() -> Recipe:
    return sft(
        "qwen3_235b_a22b",
        64,
        tp=4,
        pp=16,
        ep=4,
        dispatcher="deepep",
        embedding_as_layer=True,
        head_as_layer=True,
        loss="chunked",
        recompute="full",
        **FINETUNE,
    )


@recipe(family="qwen_moe", published=Published(tp=1, pp=4, ep=4, gpus=16, start={"sp": False}))
def qwen3_235b_a22b_peft_config() -> Recipe:
    return peft(
        "qwen3_235b_a22b",
        16,
        tp=4,
        pp=4,
        ep=4,
        rank=8,
        alpha=16.0,
        targets=("qkv", "proj"),
        dispatcher="deepep",
        embedding_as_layer=True,
        head_as_layer=True,
        **FINETUNE,
    )


@recipe(family="qwen_moe", published=Published(tp=1, pp=4, ep=8, start={"micro_batch_size": 2}))
def qwen3_next_80b_a3b_pretrain_config() -> Recipe:
    return pretrain(
        "qwen3_next_80b_a3b",
        32,
        pp=4,
        ep=8,
        recompute="selective",
        recompute_modules=("layernorm", "moe", "moe_act"),
        dispatcher="deepep",
        mtp_loss=0.1,
    )


@recipe(
    family="qwen_moe",
    published=Published(
        tp=1, pp=2, ep=8, start={"recompute_modules": ("layernorm", "moe", "moe_act"), "offload": "none"}
    ),
)
def qwen3_next_80b_a3b_sft_config() -> Recipe:
    return sft(
        "qwen3_next_80b_a3b",
        16,
        pp=2,
        ep=8,
        global_batch_size=64,
        min_lr=5e-6,
        recompute="selective",
        dispatcher="deepep",
        packing=False,
        offload="optimizer",
    )


@recipe(family="qwen_moe", published=Published(tp=1, pp=1, ep=4))
def qwen3_next_80b_a3b_peft_config() -> Recipe:
    return peft(
        "qwen3_next_80b_a3b",
        16,
        ep=4,
        global_batch_size=64,
        min_lr=5e-6,
        recompute="selective",
        recompute_modules=("layernorm", "moe", "moe_act"),
        dispatcher="deepep",
        packing=False,
    )

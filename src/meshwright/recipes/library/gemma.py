"""Gemma 2, Gemma 3 and Gemma 3 VL."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import SHORT_FINETUNE, peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

GEMMA3_FINETUNE: dict[str, Any] = {"global_batch_size": 32, "warmup_steps": 10, "beta2": 0.95}
VL_FINETUNE: dict[str, Any] = {"micro_batch_size": 2, "seq_length": 4096, "steps": 50, "images": True}


@recipe(family="gemma")
def gemma2_2b_pretrain_config() -> Recipe:
    return pretrain("gemma2_2b", 2, tp=2, micro_batch_size=2)


@recipe(family="gemma")
def gemma2_2b_sft_config() -> Recipe:
    return sft("gemma2_2b", 1, **SHORT_FINETUNE)


@recipe(family="gemma")
def gemma2_2b_peft_config() -> Recipe:
    return peft("gemma2_2b", 1, **SHORT_FINETUNE)


@recipe(family="gemma")
def gemma2_9b_pretrain_config() -> Recipe:
    return pretrain("gemma2_9b", 8, tp=8, micro_batch_size=2)


@recipe(family="gemma")
def gemma2_9b_sft_config() -> Recipe:
    return sft("gemma2_9b", 4, tp=4, **SHORT_FINETUNE)


@recipe(family="gemma")
def gemma2_9b_peft_config() -> Recipe:
    return peft("gemma2_9b", 1, **SHORT_FINETUNE)


@recipe(family="gemma")
def gemma2_27b_pretrain_config() -> Recipe:
    return pretrain("gemma2_27b", 16, tp=8, pp=2, micro_batch_size=2)


@recipe(family="gemma")
def gemma2_27b_sft_config() -> Recipe:
    return sft("gemma2_27b", 16, tp=8, pp=2, **SHORT_FINETUNE)


@recipe(family="gemma")
def gemma2_27b_peft_config() -> Recipe:
    return peft("gemma2_27b", 4, tp=4, **SHORT_FINETUNE)


@recipe(
    family="gemma", published=Published(tp=1, pp=1, seq=32768, start={"recompute": "none", "loss": "vocab_parallel"})
)
def gemma3_1b_pretrain_config() -> Recipe:
    return pretrain(
        "gemma3_1b",
        1,
        global_batch_size=512,
        seq_length=32768,
        warmup_steps=2000,
        steps=1_168_251,
        loss="chunked",
        recompute="selective",
    )


@recipe(
    family="gemma", published=Published(tp=1, pp=1, seq=32768, start={"recompute": "none", "loss": "vocab_parallel"})
)
def gemma3_1b_sft_config() -> Recipe:
    return sft("gemma3_1b", 1, seq_length=32768, steps=100, loss="chunked", recompute="selective", **GEMMA3_FINETUNE)


@recipe(
    family="gemma", published=Published(tp=1, pp=1, seq=32768, start={"recompute": "none", "loss": "vocab_parallel"})
)
def gemma3_1b_peft_config() -> Recipe:
    return peft(
        "gemma3_1b",
        1,
        seq_length=32768,
        steps=100,
        rank=8,
        alpha=16.0,
        loss="chunked",
        recompute="selective",
        **GEMMA3_FINETUNE,
    )


@recipe(
    family="gemma", published=Published(start={"micro_batch_size": 2, "recompute": "none", "loss": "vocab_parallel"})
)
def gemma3_vl_4b_sft_config() -> Recipe:
    return sft(
        "gemma3_vl_4b",
        1,
        seq_length=4096,
        lr=5e-5,
        min_lr=5e-6,
        steps=50,
        images=True,
        loss="fused_linear",
        recompute="full",
        **GEMMA3_FINETUNE,
    )


@recipe(family="gemma")
def gemma3_vl_4b_peft_config() -> Recipe:
    return peft("gemma3_vl_4b", 1, lr=0.0002, min_lr=2e-5, **GEMMA3_FINETUNE, **VL_FINETUNE)


@recipe(family="gemma", published=Published(start={"recompute": "none"}))
def gemma3_vl_12b_sft_config() -> Recipe:
    return sft("gemma3_vl_12b", 4, tp=4, lr=5e-5, min_lr=5e-6, recompute="full", **GEMMA3_FINETUNE, **VL_FINETUNE)


@recipe(family="gemma", published=Published(start={"recompute": "none"}))
def gemma3_vl_12b_peft_config() -> Recipe:
    return peft("gemma3_vl_12b", 1, lr=0.0002, min_lr=2e-5, recompute="full", **GEMMA3_FINETUNE, **VL_FINETUNE)


@recipe(family="gemma")
def gemma3_vl_27b_sft_config() -> Recipe:
    return sft("gemma3_vl_27b", 16, tp=8, pp=2, lr=5e-5, min_lr=5e-6, **GEMMA3_FINETUNE, **VL_FINETUNE)


@recipe(family="gemma")
def gemma3_vl_27b_peft_config() -> Recipe:
    return peft("gemma3_vl_27b", 4, tp=4, lr=0.0002, min_lr=2e-5, **GEMMA3_FINETUNE, **VL_FINETUNE)

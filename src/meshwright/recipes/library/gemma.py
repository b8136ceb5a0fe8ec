"""Gemma 2, Gemma 3 and Gemma 3 VL."""

from __future__ import annotations

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Mission, recipe
from meshwright.recipes.types import Recipe


@recipe(family="gemma")
def gemma2_2b_pretrain_config() -> Recipe:
    return pretrain("gemma2_2b", 2, tp=2, micro_batch_size=2)


@recipe(family="gemma")
def gemma2_2b_sft_config() -> Recipe:
    return sft("gemma2_2b", 1, warmup_steps=10, steps=100, beta2=0.95)


@recipe(family="gemma")
def gemma2_2b_peft_config() -> Recipe:
    return peft("gemma2_2b", 1, warmup_steps=10, steps=100, beta2=0.95)


@recipe(family="gemma")
def gemma2_9b_pretrain_config() -> Recipe:
    return pretrain("gemma2_9b", 8, tp=8, micro_batch_size=2)


@recipe(family="gemma")
def gemma2_9b_sft_config() -> Recipe:
    return sft("gemma2_9b", 4, tp=4, warmup_steps=10, steps=100, beta2=0.95)


@recipe(family="gemma")
def gemma2_9b_peft_config() -> Recipe:
    return peft("gemma2_9b", 1, warmup_steps=10, steps=100, beta2=0.95)


@recipe(family="gemma")
def gemma2_27b_pretrain_config() -> Recipe:
    return pretrain("gemma2_27b", 16, tp=8, pp=2, micro_batch_size=2)


@recipe(family="gemma")
def gemma2_27b_sft_config() -> Recipe:
    return sft("gemma2_27b", 16, tp=8, pp=2, warmup_steps=10, steps=100, beta2=0.95)


@recipe(family="gemma")
def gemma2_27b_peft_config() -> Recipe:
    return peft("gemma2_27b", 4, tp=4, warmup_steps=10, steps=100, beta2=0.95)


@recipe(family="gemma", mission=Mission(tp=1, pp=1, seq=32768, start={"recompute": "none", "loss": "vocab_parallel"}))
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


@recipe(family="gemma", mission=Mission(tp=1, pp=1, seq=32768, start={"recompute": "none", "loss": "vocab_parallel"}))
def gemma3_1b_sft_config() -> Recipe:
    return sft(
        "gemma3_1b",
        1,
        global_batch_size=32,
        seq_length=32768,
        warmup_steps=10,
        steps=100,
        beta2=0.95,
        loss="chunked",
        recompute="selective",
    )


@recipe(family="gemma", mission=Mission(tp=1, pp=1, seq=32768, start={"recompute": "none", "loss": "vocab_parallel"}))
def gemma3_1b_peft_config() -> Recipe:
    return peft(
        "gemma3_1b",
        1,
        global_batch_size=32,
        seq_length=32768,
        warmup_steps=10,
        steps=100,
        beta2=0.95,
        rank=8,
        alpha=16.0,
        loss="chunked",
        recompute="selective",
    )


@recipe(family="gemma", mission=Mission(start={"micro_batch_size": 2, "recompute": "none", "loss": "vocab_parallel"}))
def gemma3_vl_4b_sft_config() -> Recipe:
    return sft(
        "gemma3_vl_4b",
        1,
        global_batch_size=32,
        seq_length=4096,
        lr=5e-5,
        min_lr=5e-6,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="gemma", mission=Mission(start={"recompute": "none"}))
def gemma3_vl_4b_peft_config() -> Recipe:
    return peft(
        "gemma3_vl_4b",
        1,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-4,
        min_lr=2e-5,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        images=True,
        recompute="full",
    )


@recipe(family="gemma", mission=Mission(start={"recompute": "none"}))
def gemma3_vl_12b_sft_config() -> Recipe:
    return sft(
        "gemma3_vl_12b",
        4,
        tp=4,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=5e-5,
        min_lr=5e-6,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        images=True,
        recompute="full",
    )


@recipe(family="gemma", mission=Mission(start={"recompute": "none"}))
def gemma3_vl_12b_peft_config() -> Recipe:
    return peft(
        "gemma3_vl_12b",
        1,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-4,
        min_lr=2e-5,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        images=True,
        recompute="full",
    )


@recipe(family="gemma", mission=Mission(start={"recompute": "none"}))
def gemma3_vl_27b_sft_config() -> Recipe:
    return sft(
        "gemma3_vl_27b",
        16,
        tp=8,
        pp=2,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=5e-5,
        min_lr=5e-6,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        images=True,
        recompute="full",
    )


@recipe(family="gemma", mission=Mission(start={"recompute": "none"}))
def gemma3_vl_27b_peft_config() -> Recipe:
    return peft(
        "gemma3_vl_27b",
        4,
        tp=4,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-4,
        min_lr=2e-5,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        images=True,
        recompute="selective",
    )

"""Qwen2.5-VL, Qwen3-VL and Qwen3.5-VL."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

IMAGE_CHAT: dict[str, Any] = {"seq_length": 4096, "beta2": 0.95, "images": True}
QWEN3_SFT: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 32, **IMAGE_CHAT, "packing": True}
QWEN25_SFT: dict[str, Any] = {**QWEN3_SFT, "min_lr": 1e-6, "warmup_steps": 500, "steps": 300_000}
QWEN25_PEFT = QWEN3_PEFT = {**QWEN25_SFT, "min_lr": 1e-5}
QWEN35_SFT: dict[str, Any] = {**IMAGE_CHAT, "warmup_steps": 200, "steps": 300_000, "mtp_loss": 0.1}
QWEN35_BATCH: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 32, "loss": "chunked", "recompute": "full"}
QWEN35_PEFT = {**QWEN35_SFT, "min_lr": 3e-5}


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen25_vl_3b_sft_config() -> Recipe:
    return sft("qwen25_vl_3b", 1, loss="chunked", recompute="full", **QWEN25_SFT)


@recipe(family="qwen_vl")
def qwen25_vl_3b_peft_config() -> Recipe:
    return peft("qwen25_vl_3b", 1, **QWEN25_PEFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen25_vl_7b_sft_config() -> Recipe:
    return sft("qwen25_vl_7b", 2, tp=2, loss="chunked", recompute="full", **QWEN25_SFT)


@recipe(family="qwen_vl")
def qwen25_vl_7b_peft_config() -> Recipe:
    return peft("qwen25_vl_7b", 1, **QWEN25_PEFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen25_vl_32b_sft_config() -> Recipe:
    return sft("qwen25_vl_32b", 16, tp=8, pp=2, recompute="full", **QWEN25_SFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "gpus": 1}))
def qwen25_vl_32b_peft_config() -> Recipe:
    return peft("qwen25_vl_32b", 2, recompute="full", **QWEN25_PEFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen25_vl_72b_sft_config() -> Recipe:
    return sft("qwen25_vl_72b", 32, tp=8, pp=4, recompute="full", **QWEN25_SFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "gpus": 1}))
def qwen25_vl_72b_peft_config() -> Recipe:
    return peft("qwen25_vl_72b", 4, recompute="full", **QWEN25_PEFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel", "offload": "none"}))
def qwen3_vl_8b_sft_config() -> Recipe:
    return sft(
        "qwen3_vl_8b",
        2,
        tp=2,
        lr=5e-5,
        min_lr=5e-6,
        warmup_steps=10,
        steps=50,
        loss="chunked",
        recompute="full",
        offload="optimizer",
        **QWEN3_SFT,
    )


@recipe(family="qwen_vl")
def qwen3_vl_8b_peft_config() -> Recipe:
    return peft("qwen3_vl_8b", 1, **QWEN3_PEFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen3_vl_30b_a3b_sft_config() -> Recipe:
    return sft(
        "qwen3_vl_30b_a3b",
        8,
        ep=8,
        lr=5e-5,
        min_lr=5e-6,
        warmup_steps=10,
        steps=50,
        overlap_grad_reduce=False,
        loss="chunked",
        recompute="full",
        **QWEN3_SFT,
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen3_vl_30b_a3b_peft_config() -> Recipe:
    return peft(
        "qwen3_vl_30b_a3b", 4, ep=4, overlap_grad_reduce=False, loss="chunked", recompute="selective", **QWEN3_PEFT
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "offload": "none"}))
def qwen3_vl_235b_a22b_sft_config() -> Recipe:
    return sft(
        "qwen3_vl_235b_a22b",
        32,
        tp=4,
        ep=32,
        min_lr=1e-6,
        warmup_steps=500,
        steps=300_000,
        overlap_grad_reduce=False,
        offload="optimizer",
        recompute="full",
        **QWEN3_SFT,
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen3_vl_235b_a22b_peft_config() -> Recipe:
    return peft("qwen3_vl_235b_a22b", 16, ep=16, overlap_grad_reduce=False, recompute="full", **QWEN3_PEFT)


@recipe(family="qwen_vl", published=Published(start={"loss": "vocab_parallel"}))
def qwen35_vl_800m_sft_config() -> Recipe:
    return sft("qwen35_800m", 1, micro_batch_size=4, global_batch_size=32, min_lr=5e-7, loss="chunked", **QWEN35_SFT)


@recipe(family="qwen_vl")
def qwen35_vl_800m_peft_config() -> Recipe:
    return peft("qwen35_800m", 1, micro_batch_size=4, global_batch_size=32, **QWEN35_PEFT)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_2b_sft_config() -> Recipe:
    return sft("qwen35_2b", 1, min_lr=5e-7, **QWEN35_SFT, **QWEN35_BATCH)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_2b_peft_config() -> Recipe:
    return peft("qwen35_2b", 1, **QWEN35_PEFT, **QWEN35_BATCH)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_4b_sft_config() -> Recipe:
    return sft("qwen35_4b", 2, tp=2, min_lr=5e-7, **QWEN35_SFT, **QWEN35_BATCH)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_4b_peft_config() -> Recipe:
    return peft("qwen35_4b", 1, **QWEN35_PEFT, **QWEN35_BATCH)


@recipe(
    family="qwen_vl", published=Published(start={"micro_batch_size": 4, "recompute": "none", "loss": "vocab_parallel"})
)
def qwen35_vl_9b_sft_config() -> Recipe:
    return sft(
        "qwen35_9b",
        4,
        tp=4,
        micro_batch_size=2,
        global_batch_size=32,
        min_lr=5e-7,
        loss="chunked",
        recompute="selective",
        **QWEN35_SFT,
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_9b_peft_config() -> Recipe:
    return peft("qwen35_9b", 1, **QWEN35_PEFT, **QWEN35_BATCH)


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_27b_sft_config() -> Recipe:
    return sft(
        "qwen35_27b",
        16,
        tp=4,
        pp=4,
        micro_batch_size=4,
        global_batch_size=32,
        min_lr=5e-7,
        recompute="full",
        **QWEN35_SFT,
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_27b_peft_config() -> Recipe:
    return peft("qwen35_27b", 2, tp=2, **QWEN35_PEFT, **QWEN35_BATCH)


@recipe(family="qwen_vl", published=Published(measured="megatron_bridge_verification_cards"))
def qwen35_vl_35b_a3b_sft_config() -> Recipe:
    return sft(
        "qwen35_35b_a3b",
        16,
        pp=2,
        ep=8,
        global_batch_size=32,
        lr=2e-5,
        min_lr=2e-6,
        recompute="full",
        dispatcher="hybridep",
        stage_layers=(17, 23),
        overlap_grad_reduce=False,
        **QWEN35_SFT,
    )


@recipe(family="qwen_vl")
def qwen35_vl_35b_a3b_peft_config() -> Recipe:
    return peft(
        "qwen35_35b_a3b",
        4,
        tp=2,
        ep=4,
        global_batch_size=32,
        lr=2e-4,
        recompute="full",
        overlap_grad_reduce=False,
        **QWEN35_PEFT,
    )


@recipe(family="qwen_vl", published=Published(start={"micro_batch_size": 4}))
def qwen35_vl_122b_a10b_sft_config() -> Recipe:
    return sft(
        "qwen35_122b_a10b",
        48,
        tp=2,
        pp=6,
        ep=8,
        global_batch_size=36,
        lr=2e-5,
        min_lr=2e-6,
        recompute="full",
        overlap_grad_reduce=False,
        **QWEN35_SFT,
    )


@recipe(
    family="qwen_vl", published=Published(start={"micro_batch_size": 4, "recompute": "none", "loss": "vocab_parallel"})
)
def qwen35_vl_122b_a10b_peft_config() -> Recipe:
    return peft(
        "qwen35_122b_a10b",
        8,
        tp=2,
        ep=8,
        micro_batch_size=3,
        global_batch_size=36,
        lr=2e-4,
        overlap_grad_reduce=False,
        loss="chunked",
        recompute="full",
        **QWEN35_PEFT,
    )


@recipe(family="qwen_vl", published=Published(start={"cp": 1, "micro_batch_size": 4}))
def qwen35_vl_397b_a17b_sft_config() -> Recipe:
    return sft(
        "qwen35_397b_a17b",
        128,
        tp=2,
        pp=4,
        cp=2,
        ep=32,
        global_batch_size=32,
        lr=2e-5,
        min_lr=2e-6,
        recompute="full",
        overlap_grad_reduce=False,
        **QWEN35_SFT,
    )


@recipe(family="qwen_vl", published=Published(start={"micro_batch_size": 4, "recompute": "none"}))
def qwen35_vl_397b_a17b_peft_config() -> Recipe:
    return peft(
        "qwen35_397b_a17b",
        32,
        tp=2,
        ep=32,
        micro_batch_size=2,
        global_batch_size=32,
        lr=2e-4,
        overlap_grad_reduce=False,
        recompute="full",
        **QWEN35_PEFT,
    )

"""Qwen2.5-VL, Qwen3-VL and Qwen3.5-VL."""

from __future__ import annotations

from meshwright.recipes.build import peft, sft
from meshwright.recipes.registry import Mission, recipe
from meshwright.recipes.types import Recipe


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen25_vl_3b_sft_config() -> Recipe:
    return sft(
        "qwen25_vl_3b",
        1,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-6,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl")
def qwen25_vl_3b_peft_config() -> Recipe:
    return peft(
        "qwen25_vl_3b",
        1,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-5,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen25_vl_7b_sft_config() -> Recipe:
    return sft(
        "qwen25_vl_7b",
        2,
        tp=2,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-6,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none"}))
def qwen25_vl_7b_peft_config() -> Recipe:
    return peft(
        "qwen25_vl_7b",
        1,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-5,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
        recompute="selective",
    )


@recipe(family="qwen_vl")
def qwen25_vl_32b_sft_config() -> Recipe:
    return sft(
        "qwen25_vl_32b",
        16,
        tp=8,
        pp=2,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-6,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "gpus": 1}))
def qwen25_vl_32b_peft_config() -> Recipe:
    return peft(
        "qwen25_vl_32b",
        2,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-5,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none"}))
def qwen25_vl_72b_sft_config() -> Recipe:
    return sft(
        "qwen25_vl_72b",
        32,
        tp=8,
        pp=4,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-6,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "gpus": 1}))
def qwen25_vl_72b_peft_config() -> Recipe:
    return peft(
        "qwen25_vl_72b",
        4,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-5,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen3_vl_8b_sft_config() -> Recipe:
    return sft(
        "qwen3_vl_8b",
        2,
        tp=2,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=5e-5,
        min_lr=5e-6,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        images=True,
        packing=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none"}))
def qwen3_vl_8b_peft_config() -> Recipe:
    return peft(
        "qwen3_vl_8b",
        1,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-5,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        images=True,
        packing=True,
        recompute="selective",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen3_vl_30b_a3b_sft_config() -> Recipe:
    return sft(
        "qwen3_vl_30b_a3b",
        8,
        ep=8,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=5e-5,
        min_lr=5e-6,
        warmup_steps=10,
        steps=50,
        beta2=0.95,
        overlap_grad_reduce=False,
        images=True,
        packing=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen3_vl_30b_a3b_peft_config() -> Recipe:
    return peft(
        "qwen3_vl_30b_a3b",
        4,
        ep=4,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-5,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        overlap_grad_reduce=False,
        images=True,
        packing=True,
        loss="chunked",
        recompute="selective",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "offload": "none"}))
def qwen3_vl_235b_a22b_sft_config() -> Recipe:
    return sft(
        "qwen3_vl_235b_a22b",
        32,
        tp=4,
        ep=32,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-6,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        overlap_grad_reduce=False,
        images=True,
        packing=True,
        offload="optimizer",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none"}))
def qwen3_vl_235b_a22b_peft_config() -> Recipe:
    return peft(
        "qwen3_vl_235b_a22b",
        16,
        ep=16,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        min_lr=1e-5,
        warmup_steps=500,
        steps=300_000,
        beta2=0.95,
        overlap_grad_reduce=False,
        images=True,
        packing=True,
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"loss": "vocab_parallel"}))
def qwen35_vl_800m_sft_config() -> Recipe:
    return sft(
        "qwen35_800m",
        1,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=5e-7,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
    )


@recipe(family="qwen_vl", mission=Mission(start={"loss": "vocab_parallel"}))
def qwen35_vl_800m_peft_config() -> Recipe:
    return peft(
        "qwen35_800m",
        1,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_2b_sft_config() -> Recipe:
    return sft(
        "qwen35_2b",
        1,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=5e-7,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_2b_peft_config() -> Recipe:
    return peft(
        "qwen35_2b",
        1,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_4b_sft_config() -> Recipe:
    return sft(
        "qwen35_4b",
        2,
        tp=2,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=5e-7,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_4b_peft_config() -> Recipe:
    return peft(
        "qwen35_4b",
        1,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_9b_sft_config() -> Recipe:
    return sft(
        "qwen35_9b",
        4,
        tp=4,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=5e-7,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
        recompute="selective",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_9b_peft_config() -> Recipe:
    return peft(
        "qwen35_9b",
        1,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none"}))
def qwen35_vl_27b_sft_config() -> Recipe:
    return sft(
        "qwen35_27b",
        16,
        tp=4,
        pp=4,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=5e-7,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_27b_peft_config() -> Recipe:
    return peft(
        "qwen35_27b",
        2,
        tp=2,
        micro_batch_size=4,
        global_batch_size=32,
        seq_length=4096,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"loss": "vocab_parallel"}))
def qwen35_vl_35b_a3b_sft_config() -> Recipe:
    return sft(
        "qwen35_35b_a3b",
        16,
        pp=2,
        ep=8,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-5,
        min_lr=2e-6,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        recompute="full",
        dispatcher="hybridep",
        stage_layers=(17, 23),
        mtp_loss=0.1,
        overlap_grad_reduce=False,
        images=True,
        loss="chunked",
    )


@recipe(family="qwen_vl")
def qwen35_vl_35b_a3b_peft_config() -> Recipe:
    return peft(
        "qwen35_35b_a3b",
        4,
        tp=2,
        ep=4,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-4,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        recompute="full",
        mtp_loss=0.1,
        overlap_grad_reduce=False,
        images=True,
    )


@recipe(family="qwen_vl", mission=Mission(start={"micro_batch_size": 4}))
def qwen35_vl_122b_a10b_sft_config() -> Recipe:
    return sft(
        "qwen35_122b_a10b",
        48,
        tp=2,
        pp=6,
        ep=8,
        global_batch_size=36,
        seq_length=4096,
        lr=2e-5,
        min_lr=2e-6,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        recompute="full",
        mtp_loss=0.1,
        overlap_grad_reduce=False,
        images=True,
    )


@recipe(family="qwen_vl", mission=Mission(start={"micro_batch_size": 4, "recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_122b_a10b_peft_config() -> Recipe:
    return peft(
        "qwen35_122b_a10b",
        8,
        tp=2,
        ep=8,
        micro_batch_size=3,
        global_batch_size=36,
        seq_length=4096,
        lr=2e-4,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        overlap_grad_reduce=False,
        images=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="qwen_vl", mission=Mission(start={"cp": 1, "micro_batch_size": 4}))
def qwen35_vl_397b_a17b_sft_config() -> Recipe:
    return sft(
        "qwen35_397b_a17b",
        128,
        tp=2,
        pp=4,
        cp=2,
        ep=32,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-5,
        min_lr=2e-6,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        recompute="full",
        mtp_loss=0.1,
        overlap_grad_reduce=False,
        images=True,
    )


@recipe(family="qwen_vl", mission=Mission(start={"micro_batch_size": 4, "recompute": "none"}))
def qwen35_vl_397b_a17b_peft_config() -> Recipe:
    return peft(
        "qwen35_397b_a17b",
        32,
        tp=2,
        ep=32,
        micro_batch_size=2,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-4,
        min_lr=3e-5,
        warmup_steps=200,
        steps=300_000,
        beta2=0.95,
        mtp_loss=0.1,
        overlap_grad_reduce=False,
        images=True,
        recompute="full",
    )

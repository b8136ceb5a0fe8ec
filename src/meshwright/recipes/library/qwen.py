"""Qwen2, Qwen2.5 and Qwen3 (dense)."""

from __future__ import annotations

from meshwright.recipes.build import SHORT_FINETUNE, peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="qwen")
def qwen2_500m_pretrain_config() -> Recipe:
    return pretrain("qwen2_500m", 1, micro_batch_size=2)


@recipe(family="qwen")
def qwen2_500m_sft_config() -> Recipe:
    return sft("qwen2_500m", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_500m_peft_config() -> Recipe:
    return peft("qwen2_500m", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_1p5b_pretrain_config() -> Recipe:
    return pretrain("qwen2_1p5b", 1, micro_batch_size=2)


@recipe(family="qwen")
def qwen2_1p5b_sft_config() -> Recipe:
    return sft("qwen2_1p5b", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_1p5b_peft_config() -> Recipe:
    return peft("qwen2_1p5b", 1, **SHORT_FINETUNE)


@recipe(family="qwen", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen2_7b_pretrain_config() -> Recipe:
    return pretrain("qwen2_7b", 2, tp=2, micro_batch_size=2, loss="chunked", recompute="selective")


@recipe(family="qwen")
def qwen2_7b_sft_config() -> Recipe:
    return sft("qwen2_7b", 2, tp=2, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_7b_peft_config() -> Recipe:
    return peft("qwen2_7b", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_14b_pretrain_config() -> Recipe:
    return pretrain("qwen2_14b", 4, tp=4, micro_batch_size=2)


@recipe(family="qwen")
def qwen2_14b_sft_config() -> Recipe:
    return sft("qwen2_14b", 4, tp=4, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_14b_peft_config() -> Recipe:
    return peft("qwen2_14b", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_32b_pretrain_config() -> Recipe:
    return pretrain("qwen2_32b", 16, tp=8, pp=2, micro_batch_size=2)


@recipe(family="qwen")
def qwen2_32b_sft_config() -> Recipe:
    return sft("qwen2_32b", 16, tp=8, pp=2, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_32b_peft_config() -> Recipe:
    return peft("qwen2_32b", 8, tp=8, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_72b_pretrain_config() -> Recipe:
    return pretrain("qwen2_72b", 32, tp=8, pp=4, micro_batch_size=2)


@recipe(family="qwen")
def qwen2_72b_sft_config() -> Recipe:
    return sft("qwen2_72b", 32, tp=8, pp=4, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen2_72b_peft_config() -> Recipe:
    return peft("qwen2_72b", 8, tp=8, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_500m_pretrain_config() -> Recipe:
    return pretrain("qwen25_500m", 1, micro_batch_size=2)


@recipe(family="qwen")
def qwen25_500m_sft_config() -> Recipe:
    return sft("qwen25_500m", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_500m_peft_config() -> Recipe:
    return peft("qwen25_500m", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_1p5b_pretrain_config() -> Recipe:
    return pretrain("qwen25_1p5b", 1, micro_batch_size=2)


@recipe(family="qwen")
def qwen25_1p5b_sft_config() -> Recipe:
    return sft("qwen25_1p5b", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_1p5b_peft_config() -> Recipe:
    return peft("qwen25_1p5b", 1, **SHORT_FINETUNE)


@recipe(family="qwen", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen25_3b_pretrain_config() -> Recipe:
    return pretrain("qwen25_3b", 1, micro_batch_size=2, loss="chunked", recompute="selective")


@recipe(family="qwen")
def qwen25_3b_sft_config() -> Recipe:
    return sft("qwen25_3b", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_3b_peft_config() -> Recipe:
    return peft("qwen25_3b", 1, **SHORT_FINETUNE)


@recipe(family="qwen", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen25_7b_pretrain_config() -> Recipe:
    return pretrain("qwen25_7b", 2, tp=2, micro_batch_size=2, loss="chunked", recompute="selective")


@recipe(family="qwen")
def qwen25_7b_sft_config() -> Recipe:
    return sft("qwen25_7b", 2, tp=2, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_7b_peft_config() -> Recipe:
    return peft("qwen25_7b", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_14b_pretrain_config() -> Recipe:
    return pretrain("qwen25_14b", 4, tp=4, micro_batch_size=2)


@recipe(family="qwen")
def qwen25_14b_sft_config() -> Recipe:
    return sft("qwen25_14b", 4, tp=4, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_14b_peft_config() -> Recipe:
    return peft("qwen25_14b", 1, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_32b_pretrain_config() -> Recipe:
    return pretrain("qwen25_32b", 16, tp=8, pp=2, micro_batch_size=2)


@recipe(family="qwen")
def qwen25_32b_sft_config() -> Recipe:
    return sft("qwen25_32b", 16, tp=8, pp=2, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_32b_peft_config() -> Recipe:
    return peft("qwen25_32b", 8, tp=8, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_72b_pretrain_config() -> Recipe:
    return pretrain("qwen25_72b", 32, tp=8, pp=4, micro_batch_size=2)


@recipe(family="qwen")
def qwen25_72b_sft_config() -> Recipe:
    return sft("qwen25_72b", 32, tp=8, pp=4, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen25_72b_peft_config() -> Recipe:
    return peft("qwen25_72b", 8, tp=8, **SHORT_FINETUNE)


@recipe(family="qwen")
def qwen3_600m_pretrain_config() -> Recipe:
    return pretrain("qwen3_600m", 1, micro_batch_size=2)


@recipe(family="qwen")
def qwen3_600m_sft_config() -> Recipe:
    return sft("qwen3_600m", 1, global_batch_size=8)


@recipe(family="qwen", published=Published(tp=1, pp=1))
def qwen3_600m_peft_config() -> Recipe:
    return peft("qwen3_600m", 1, global_batch_size=8)


@recipe(family="qwen")
def qwen3_1p7b_pretrain_config() -> Recipe:
    return pretrain("qwen3_1p7b", 1, micro_batch_size=2)


@recipe(family="qwen")
def qwen3_1p7b_sft_config() -> Recipe:
    return sft("qwen3_1p7b", 1, global_batch_size=8)


@recipe(family="qwen", published=Published(tp=1, pp=1))
def qwen3_1p7b_peft_config() -> Recipe:
    return peft("qwen3_1p7b", 1, global_batch_size=8)


@recipe(family="qwen")
def qwen3_4b_pretrain_config() -> Recipe:
    return pretrain("qwen3_4b", 2, tp=2, micro_batch_size=2)


@recipe(family="qwen")
def qwen3_4b_sft_config() -> Recipe:
    return sft("qwen3_4b", 2, tp=2, global_batch_size=8)


@recipe(family="qwen", published=Published(tp=1, pp=1))
def qwen3_4b_peft_config() -> Recipe:
    return peft("qwen3_4b", 1, global_batch_size=8)


@recipe(family="qwen")
def qwen3_8b_pretrain_config() -> Recipe:
    return pretrain("qwen3_8b", 16, global_batch_size=1024, warmup_steps=40, steps=100, reduce="bf16")


@recipe(family="qwen", published=Published(measured="megatron_bridge_verification_cards"))
def qwen3_8b_sft_config() -> Recipe:
    return sft("qwen3_8b", 4, tp=4, global_batch_size=32, warmup_steps=10, steps=100, beta2=0.95)


@recipe(family="qwen", published=Published(measured="megatron_bridge_verification_cards", tp=1, pp=1))
def qwen3_8b_peft_config() -> Recipe:
    return peft(
        "qwen3_8b",
        1,
        global_batch_size=32,
        warmup_steps=10,
        steps=100,
        beta2=0.95,
        rank=8,
        alpha=16.0,
        targets=("qkv", "proj"),
    )


@recipe(family="qwen")
def qwen3_14b_pretrain_config() -> Recipe:
    return pretrain("qwen3_14b", 8, tp=8, micro_batch_size=2)


@recipe(family="qwen")
def qwen3_14b_sft_config() -> Recipe:
    return sft("qwen3_14b", 8, tp=8, global_batch_size=8)


@recipe(family="qwen", published=Published(tp=1, pp=1))
def qwen3_14b_peft_config() -> Recipe:
    return peft("qwen3_14b", 1, global_batch_size=8)


@recipe(family="qwen")
def qwen3_32b_pretrain_config() -> Recipe:
    return pretrain("qwen3_32b", 16, tp=8, pp=2, micro_batch_size=2, recompute="full")


@recipe(family="qwen")
def qwen3_32b_sft_config() -> Recipe:
    return sft("qwen3_32b", 16, tp=8, pp=2, global_batch_size=8, recompute="full")


@recipe(family="qwen", published=Published(tp=1, pp=1))
def qwen3_32b_peft_config() -> Recipe:
    return peft("qwen3_32b", 1, global_batch_size=8, recompute="full")


@recipe(family="qwen", published=Published(tp=1, pp=1, cp=8, seq=131072))
def qwen3_600m_sft_128k_config() -> Recipe:
    return sft(
        "qwen3_600m",
        8,
        cp=8,
        global_batch_size=2,
        seq_length=131_072,
        lr=1e-6,
        min_lr=1e-6,
        warmup_steps=10,
        cp_comm="a2a",
        per_token_loss=True,
    )

"""The five common sizes of GPT-style models as Megatron trains them."""

from __future__ import annotations

from meshwright.recipes.build import pretrain
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="sizes", published=Published(tp=1, pp=1, seq=2048))
def megatron_1p3b_pretrain_config() -> Recipe:
    return pretrain(
        "megatron_1p3b",
        8,
        micro_batch_size=4,
        global_batch_size=256,
        seq_length=2048,
        lr=2e-4,
        min_lr=2e-5,
        warmup_steps=2000,
    )


@recipe(family="sizes", published=Published(tp=1, pp=1, seq=4096))
def megatron_7b_pretrain_config() -> Recipe:
    return pretrain("megatron_7b", 8, micro_batch_size=2, global_batch_size=512, warmup_steps=2000)


@recipe(family="sizes", published=Published(tp=2, pp=1, seq=4096))
def megatron_13b_pretrain_config() -> Recipe:
    return pretrain("megatron_13b", 16, tp=2, global_batch_size=512, warmup_steps=2000)


@recipe(family="sizes", published=Published(tp=8, pp=4, seq=4096))
def megatron_70b_pretrain_config() -> Recipe:
    return pretrain("megatron_70b", 64, tp=8, pp=4, global_batch_size=1024, lr=1.5e-4, min_lr=1.5e-5, warmup_steps=2000)


@recipe(family="sizes", published=Published(tp=8, pp=8, seq=2048))
def megatron_175b_pretrain_config() -> Recipe:
    return pretrain(
        "megatron_175b",
        128,
        tp=8,
        pp=8,
        global_batch_size=1536,
        seq_length=2048,
        lr=6e-5,
        min_lr=6e-6,
        warmup_steps=2000,
    )

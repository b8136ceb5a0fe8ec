"""Llama 2, 3 and 3.1."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

LLAMA3_PRETRAIN: dict[str, Any] = {"global_batch_size": 512, "warmup_steps": 2000, "steps": 1_168_251}


@recipe(family="llama", published=Published(tp=2, pp=1, gpus=2, seq=4096))
def llama2_7b_pretrain_config() -> Recipe:
    return pretrain("llama2_7b", 2, tp=2, global_batch_size=512, warmup_steps=2000, steps=1_168_251)


@recipe(
    family="llama",
    published=Published(tp=2, pp=1, gpus=2, seq=8192, start={"recompute": "none", "loss": "vocab_parallel"}),
)
def llama3_8b_pretrain_config() -> Recipe:
    return pretrain("llama3_8b", 2, tp=2, seq_length=8192, loss="chunked", recompute="selective", **LLAMA3_PRETRAIN)


@recipe(family="llama", published=Published(tp=2, pp=1, cp=2, gpus=4, seq=16384))
def llama3_8b_16k_pretrain_config() -> Recipe:
    return pretrain("llama3_8b", 4, tp=2, cp=2, seq_length=16384, **LLAMA3_PRETRAIN)


@recipe(family="llama", published=Published(tp=2, pp=1, cp=4, gpus=8, seq=65536))
def llama3_8b_64k_pretrain_config() -> Recipe:
    return pretrain("llama3_8b", 8, tp=2, cp=4, seq_length=65536, **LLAMA3_PRETRAIN)


@recipe(family="llama", published=Published(tp=2, pp=1, cp=8, gpus=16, seq=131072))
def llama3_8b_128k_pretrain_config() -> Recipe:
    return pretrain("llama3_8b", 16, tp=2, cp=8, seq_length=131_072, **LLAMA3_PRETRAIN)


@recipe(family="llama", published=Published(tp=8, pp=4, gpus=32, seq=8192))
def llama3_70b_pretrain_config() -> Recipe:
    return pretrain("llama3_70b", 32, tp=8, pp=4, seq_length=8192, tp_comm_overlap=True, **LLAMA3_PRETRAIN)


@recipe(family="llama", published=Published(tp=8, pp=4, cp=2, gpus=64, seq=16384))
def llama3_70b_16k_pretrain_config() -> Recipe:
    return pretrain("llama3_70b", 64, tp=8, pp=4, cp=2, seq_length=16384, tp_comm_overlap=True, **LLAMA3_PRETRAIN)


@recipe(family="llama", published=Published(tp=8, pp=4, cp=4, gpus=128, seq=65536))
def llama3_70b_64k_pretrain_config() -> Recipe:
    return pretrain("llama3_70b", 128, tp=8, pp=4, cp=4, seq_length=65536, tp_comm_overlap=True, **LLAMA3_PRETRAIN)


@recipe(family="llama", published=Published(tp=8, pp=16, gpus=128, seq=8192, start={"recompute": "none"}))
def llama31_405b_pretrain_config() -> Recipe:
    return pretrain(
        "llama31_405b",
        128,
        tp=8,
        pp=16,
        global_batch_size=512,
        seq_length=8192,
        warmup_steps=2000,
        steps=1_168_251,
        embedding_as_layer=True,
        head_as_layer=True,
        tp_comm_overlap=True,
        recompute="full",
    )


@recipe(
    family="llama",
    published=Published(tp=2, pp=1, gpus=2, seq=8192, start={"recompute": "none", "loss": "vocab_parallel"}),
)
def llama3_8b_sft_config() -> Recipe:
    return sft("llama3_8b", 2, tp=2, global_batch_size=8, seq_length=8192, loss="chunked", recompute="selective")


@recipe(family="llama", published=Published(tp=4, pp=4, gpus=16, seq=8192))
def llama3_70b_sft_config() -> Recipe:
    return sft("llama3_70b", 32, tp=8, pp=4, global_batch_size=8, seq_length=8192)


@recipe(family="llama", published=Published(tp=8, pp=8, gpus=64, seq=8192, start={"recompute": "none"}))
def llama31_405b_sft_config() -> Recipe:
    return sft(
        "llama31_405b",
        128,
        tp=8,
        pp=16,
        global_batch_size=16,
        seq_length=8192,
        reduce="bf16",
        grads="bf16",
        embedding_as_layer=True,
        head_as_layer=True,
        tp_comm_overlap=True,
        recompute="full",
    )


@recipe(family="llama", published=Published(tp=1, pp=1, gpus=1, seq=8192))
def llama3_8b_peft_config() -> Recipe:
    return peft("llama3_8b", 1, global_batch_size=8, seq_length=8192, rank=8, alpha=16.0)


@recipe(family="llama", published=Published(tp=2, pp=4, gpus=8, seq=8192))
def llama3_70b_peft_config() -> Recipe:
    return peft("llama3_70b", 8, tp=8, global_batch_size=8, seq_length=8192, rank=16)


@recipe(family="llama", published=Published(tp=4, pp=8, gpus=32, seq=8192, start={"recompute": "none"}))
def llama31_405b_peft_config() -> Recipe:
    return peft(
        "llama31_405b",
        32,
        tp=4,
        pp=8,
        vp=8,
        global_batch_size=32,
        seq_length=8192,
        reduce="bf16",
        grads="bf16",
        rank=16,
        targets=("qkv",),
        embedding_as_layer=True,
        head_as_layer=True,
        recompute="full",
    )

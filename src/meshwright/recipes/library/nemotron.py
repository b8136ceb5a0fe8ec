"""Nemotron-H, Nemotron Nano v2 and Nemotron 3."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

NEMOTRONH_PRETRAIN: dict[str, Any] = {
    "global_batch_size": 768,
    "seq_length": 8192,
    "warmup_steps": 2000,
    "steps": 1_168_251,
    "shared_expert_overlap": True,
}
NEMOTRONH_SFT: dict[str, Any] = {"seq_length": 8192, "min_lr": 1e-6, "beta2": 0.95, "shared_expert_overlap": True}
NEMOTRONH_PEFT: dict[str, Any] = {
    "seq_length": 8192,
    "min_lr": 1e-5,
    "beta2": 0.95,
    "targets": ("qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out"),
    "shared_expert_overlap": True,
}
SUPER3: dict[str, Any] = {
    "tp": 4,
    "ep": 8,
    "steps": 100,
    "recompute": "selective",
    "reduce": "bf16",
    "mtp_loss": 0.1,
    "overlap_grad_reduce": False,
    "moments": "bf16",
    "per_token_loss": True,
}


@recipe(family="nemotron", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def nemotronh_4b_pretrain_config() -> Recipe:
    return pretrain("nemotronh_4b", 1, loss="chunked", recompute="full", **NEMOTRONH_PRETRAIN)


@recipe(family="nemotron", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def nemotronh_4b_sft_config() -> Recipe:
    return sft("nemotronh_4b", 1, loss="chunked", recompute="full", **NEMOTRONH_SFT)


@recipe(family="nemotron")
def nemotronh_4b_peft_config() -> Recipe:
    return peft("nemotronh_4b", 1, **NEMOTRONH_PEFT)


@recipe(family="nemotron", published=Published(start={"recompute": "none"}))
def nemotronh_8b_pretrain_config() -> Recipe:
    return pretrain("nemotronh_8b", 2, tp=2, tp_comm_overlap=True, recompute="full", **NEMOTRONH_PRETRAIN)


@recipe(family="nemotron", published=Published(start={"recompute": "none"}))
def nemotronh_8b_sft_config() -> Recipe:
    return sft("nemotronh_8b", 2, tp=2, recompute="full", **NEMOTRONH_SFT)


@recipe(family="nemotron")
def nemotronh_8b_peft_config() -> Recipe:
    return peft("nemotronh_8b", 1, **NEMOTRONH_PEFT)


@recipe(family="nemotron", published=Published(start={"offload": "none"}))
def nemotronh_47b_pretrain_config() -> Recipe:
    return pretrain(
        "nemotronh_47b", 8, tp=8, matmul="fp8_tensor", tp_comm_overlap=True, offload="optimizer", **NEMOTRONH_PRETRAIN
    )


@recipe(family="nemotron", published=Published(start={"recompute": "none"}))
def nemotronh_47b_sft_config() -> Recipe:
    return sft("nemotronh_47b", 16, tp=8, pp=2, recompute="selective", **NEMOTRONH_SFT)


@recipe(family="nemotron", published=Published(start={"recompute": "none"}))
def nemotronh_47b_peft_config() -> Recipe:
    return peft("nemotronh_47b", 4, tp=4, recompute="selective", **NEMOTRONH_PEFT)


@recipe(family="nemotron", published=Published(start={"recompute": "none", "offload": "none"}))
def nemotronh_56b_pretrain_config() -> Recipe:
    return pretrain(
        "nemotronh_56b",
        8,
        tp=8,
        matmul="fp8_tensor",
        tp_comm_overlap=True,
        offload="optimizer",
        recompute="selective",
        **NEMOTRONH_PRETRAIN,
    )


@recipe(family="nemotron", published=Published(start={"recompute": "none", "offload": "none"}))
def nemotronh_56b_sft_config() -> Recipe:
    return sft("nemotronh_56b", 8, tp=8, offload="optimizer", recompute="selective", **NEMOTRONH_SFT)


@recipe(family="nemotron", published=Published(start={"recompute": "none"}))
def nemotronh_56b_peft_config() -> Recipe:
    return peft("nemotronh_56b", 4, tp=4, recompute="selective", **NEMOTRONH_PEFT)


@recipe(family="nemotron", published=Published(pp=1, ep=8, start={"loss": "vocab_parallel"}))
def nemotron_3_nano_pretrain_config() -> Recipe:
    return pretrain(
        "nemotron_3_nano",
        8,
        ep=8,
        global_batch_size=1024,
        seq_length=8192,
        lr=0.0016,
        min_lr=1.6e-5,
        warmup_steps=333,
        steps=39735,
        recompute="selective",
        recompute_modules=("moe", "layernorm"),
        reduce="bf16",
        grads="bf16",
        dispatcher="hybridep",
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "mamba"),
        loss="fused_linear",
    )


@recipe(family="nemotron", published=Published(pp=1, ep=8, start={"defer_grad_sync": True, "loss": "vocab_parallel"}))
def nemotron_3_nano_sft_config() -> Recipe:
    return sft(
        "nemotron_3_nano",
        8,
        ep=8,
        beta2=0.95,
        dispatcher="deepep",
        per_token_loss=True,
        loss="chunked",
        defer_grad_sync=False,
    )


@recipe(family="nemotron", published=Published(pp=1, ep=8))
def nemotron_3_nano_peft_config() -> Recipe:
    return peft(
        "nemotron_3_nano",
        8,
        ep=8,
        beta2=0.95,
        targets=("qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out"),
        dispatcher="deepep",
        per_token_loss=True,
    )


@recipe(family="nemotron", published=Published(tp=4, pp=1, ep=8))
def nemotron_3_super_pretrain_config() -> Recipe:
    return pretrain(
        "nemotron_3_super",
        64,
        global_batch_size=1280,
        lr=0.00045,
        min_lr=4.5e-6,
        warmup_steps=40,
        schedule_name="wsd",
        recompute_modules=("layernorm", "moe_act", "moe", "core_attn"),
        grads="bf16",
        dispatcher="hybridep",
        **SUPER3,
    )


@recipe(family="nemotron", published=Published(tp=4, pp=1, ep=8, start={"recompute": "none", "offload": "none"}))
def nemotron_3_super_sft_config() -> Recipe:
    return sft("nemotron_3_super", 16, global_batch_size=32, beta2=0.95, offload="optimizer", **SUPER3)


@recipe(family="nemotron", published=Published(tp=4, pp=1, ep=8))
def nemotron_3_super_peft_config() -> Recipe:
    return peft(
        "nemotron_3_super",
        8,
        tp=4,
        ep=8,
        beta2=0.95,
        targets=("qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out"),
        mtp_loss=0.1,
        per_token_loss=True,
    )


@recipe(
    family="nemotron",
    published=Published(pp=1, start={"cp": 1, "recompute": "none", "loss": "vocab_parallel", "gpus": 2}),
)
def nemotron_nano_9b_v2_pretrain_config() -> Recipe:
    return pretrain(
        "nemotron_nano_9b_v2",
        4,
        tp=2,
        cp=2,
        global_batch_size=768,
        seq_length=131_072,
        warmup_steps=2000,
        steps=1_168_251,
        tp_comm_overlap=True,
        shared_expert_overlap=True,
        loss="chunked",
        recompute="full",
    )


@recipe(family="nemotron", published=Published(pp=1, start={"recompute": "none"}))
def nemotron_nano_9b_v2_sft_config() -> Recipe:
    return sft("nemotron_nano_9b_v2", 2, tp=2, min_lr=1e-6, beta2=0.95, recompute="full", shared_expert_overlap=True)


@recipe(family="nemotron", published=Published(pp=1))
def nemotron_nano_9b_v2_peft_config() -> Recipe:
    return peft(
        "nemotron_nano_9b_v2",
        1,
        min_lr=1e-5,
        beta2=0.95,
        targets=("qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out"),
        shared_expert_overlap=True,
    )


@recipe(
    family="nemotron",
    published=Published(pp=1, start={"recompute": "none", "offload": "none", "loss": "vocab_parallel"}),
)
def nemotron_nano_12b_v2_pretrain_config() -> Recipe:
    return pretrain(
        "nemotron_nano_12b_v2",
        4,
        tp=4,
        global_batch_size=768,
        seq_length=131_072,
        warmup_steps=2000,
        steps=1_168_251,
        matmul="fp8_tensor",
        shared_expert_overlap=True,
        offload="optimizer",
        loss="chunked",
        recompute="full",
    )


@recipe(family="nemotron", published=Published(pp=1))
def nemotron_nano_12b_v2_sft_config() -> Recipe:
    return sft("nemotron_nano_12b_v2", 4, tp=4, beta2=0.95, shared_expert_overlap=True)


@recipe(family="nemotron", published=Published(pp=1))
def nemotron_nano_12b_v2_peft_config() -> Recipe:
    return peft(
        "nemotron_nano_12b_v2",
        1,
        min_lr=1e-5,
        beta2=0.95,
        targets=("qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out"),
        shared_expert_overlap=True,
    )


@recipe(family="nemotron", published=Published(pp=1, gpus=8))
def nemotron_nano_v2_vl_12b_sft_config() -> Recipe:
    return sft(
        "nemotron_nano_v2_vl_12b",
        8,
        tp=4,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-5,
        min_lr=2e-6,
        warmup_steps=5,
        steps=2000,
        beta2=0.95,
        images=True,
    )


@recipe(family="nemotron", published=Published(pp=1, gpus=8))
def nemotron_nano_v2_vl_12b_peft_config() -> Recipe:
    return peft(
        "nemotron_nano_v2_vl_12b",
        8,
        tp=2,
        global_batch_size=32,
        seq_length=4096,
        lr=2e-5,
        min_lr=2e-6,
        warmup_steps=5,
        steps=2000,
        beta2=0.95,
        rank=16,
        images=True,
    )

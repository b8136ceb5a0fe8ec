"""Benchmarks of Qwen3-Next 80B-A3B: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.qwen_moe import qwen3_next_80b_a3b_pretrain_config
from meshwright.recipes.registry import recipe
from meshwright.recipes.types import Recipe


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_next_80b_a3b_pretrain_config(), "64xB200", "bf16", ep=64, global_batch_size=1024, dispatcher="deepep"
    )


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_next_80b_a3b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8mx")


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_b300_bf16_config() -> Recipe:
    return benchmark(qwen3_next_80b_a3b_pretrain_64gpu_b200_bf16_config(), "64xB300", "bf16")


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(qwen3_next_80b_a3b_pretrain_64gpu_b200_bf16_config(), "64xB300", "fp8mx", micro_batch_size=2)


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_next_80b_a3b_pretrain_64gpu_b300_fp8mx_config(),
        "64xGB200",
        "bf16",
        dispatcher="alltoall",
        pp=2,
        vp=4,
        ep=32,
        stage_layers=(4, 7, 7, 7, 7, 7, 8, 1),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_next_80b_a3b_pretrain_64gpu_gb200_bf16_config(), "64xGB200", "fp8mx")


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_gb300_bf16_config() -> Recipe:
    return benchmark(qwen3_next_80b_a3b_pretrain_64gpu_gb200_bf16_config(), "64xGB300", "bf16", micro_batch_size=4)


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_64gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(qwen3_next_80b_a3b_pretrain_64gpu_gb200_bf16_config(), "64xGB300", "fp8mx", micro_batch_size=4)


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_128gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        qwen3_next_80b_a3b_pretrain_64gpu_b200_bf16_config(), "128xH100", "bf16", ep=128, dispatcher="alltoall"
    )


@recipe(family="qwen_moe")
def qwen3_next_80b_a3b_pretrain_128gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(qwen3_next_80b_a3b_pretrain_128gpu_h100_bf16_config(), "128xH100", "fp8cs")

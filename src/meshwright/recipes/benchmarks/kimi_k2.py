"""Benchmarks of Kimi K2: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.moonshot import kimi_k2_pretrain_config
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="moonshot")
def kimi_k2_pretrain_256gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        kimi_k2_pretrain_config(),
        "256xB200",
        "bf16",
        pp=16,
        ep=16,
        global_batch_size=2048,
        recompute="selective",
        recompute_modules=("mla_up_proj",),
        stage_layers=(4,) * 15 + (1,),
    )


@recipe(family="moonshot")
def kimi_k2_pretrain_256gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_b200_bf16_config(), "256xB200", "fp8cs")


@recipe(family="moonshot")
def kimi_k2_pretrain_256gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_b200_bf16_config(), "256xB200", "fp8mx", fp8_gather=False)


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        kimi_k2_pretrain_256gpu_b200_bf16_config(),
        "256xB300",
        "bf16",
        micro_batch_size=2,
        global_batch_size=4096,
        recompute_modules=("mla_up_proj", "layernorm", "moe_act"),
    )


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_b300_bf16_config(), "256xB300", "fp8cs")


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_b300_bf16_config(), "256xB300", "fp8mx", fp8_gather=False)


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        kimi_k2_pretrain_256gpu_b200_bf16_config(),
        "256xGB200",
        "bf16",
        pp=4,
        vp=4,
        ep=64,
        dispatcher="hybridep",
        recompute_modules=("mla_up_proj", "layernorm", "moe_act"),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("moe_router", "moe_preprocess"),
    )


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_gb200_bf16_config(), "256xGB200", "fp8cs")


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_gb200_bf16_config(), "256xGB200", "fp8mx", fp8_gather=False)


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_gb300_bf16_config() -> Recipe:
    return benchmark(
        kimi_k2_pretrain_256gpu_gb200_bf16_config(),
        "256xGB300",
        "bf16",
        global_batch_size=4096,
        micro_batch_size=2,
        recompute_modules=("moe",),
        cuda_graphs="none",
        cuda_graph_scope=(),
    )


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_gb300_bf16_config(), "256xGB300", "fp8cs")


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_gb300_bf16_config(), "256xGB300", "fp8mx", fp8_gather=False)


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_gb300_bf16_config(), "256xGB300", "nvfp4")


@recipe(family="moonshot")
def kimi_k2_pretrain_1024gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        kimi_k2_pretrain_256gpu_b200_bf16_config(),
        "1024xH100",
        "bf16",
        tp=8,
        vp=2,
        ep=64,
        global_batch_size=8192,
        recompute_modules=("mla_up_proj", "mlp"),
        stage_layers=(1,) + (2,) * 30 + (0,),
    )


@recipe(family="moonshot")
def kimi_k2_pretrain_1024gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_1024gpu_h100_bf16_config(), "1024xH100", "fp8cs")


@recipe(family="moonshot")
def kimi_k2_pretrain_1024gpu_h100_fp8sc_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_1024gpu_h100_bf16_config(), "1024xH100", "fp8sc")


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_vr200_bf16_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_gb300_bf16_config(), "256xVR200", "bf16")


@recipe(family="moonshot", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def kimi_k2_pretrain_256gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(kimi_k2_pretrain_256gpu_gb300_bf16_config(), "256xVR200", "fp8mx", fp8_gather=False)

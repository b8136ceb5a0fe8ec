"""Benchmarks of GPT-OSS: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.gpt import gpt_oss_20b_pretrain_config, gpt_oss_120b_pretrain_config
from meshwright.recipes.registry import recipe
from meshwright.recipes.types import Recipe


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        gpt_oss_120b_pretrain_config(),
        "64xB200",
        "bf16",
        ep=8,
        micro_batch_size=4,
        global_batch_size=1280,
        recompute="selective",
        recompute_modules=("layernorm", "moe_act"),
    )


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8mx")


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        gpt_oss_120b_pretrain_64gpu_b200_bf16_config(),
        "64xB300",
        "bf16",
        dispatcher="hybridep",
        recompute="none",
        recompute_modules=(),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_b300_bf16_config(), "64xB300", "fp8mx")


@recipe(family="gpt")
def gpt_oss_20b_pretrain_64gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_config(),
        "64xB300",
        "fp8mx",
        cp=2,
        ep=4,
        global_batch_size=32,
        seq_length=8192,
        cuda_graphs="local",
        cuda_graph_scope=("full_iteration",),
        dispatcher="hybridep",
        fp8_gather=False,
        cp_comm="a2a",
        force_balance=False,
        per_token_loss=False,
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_64gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_64gpu_b300_fp8mx_config(),
        "64xB300",
        "nvfp4",
        first_last_bf16=True,
        force_balance=False,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_8gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_64gpu_b300_fp8mx_config(),
        "8xB300",
        "fp8mx",
        global_batch_size=4,
        fp8_gather=False,
        force_balance=False,
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_8gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_64gpu_b300_nvfp4_config(), "8xB300", "nvfp4", global_batch_size=4, force_balance=False
    )


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_gb200_bf16_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_b200_bf16_config(), "64xGB200", "bf16", ep=64, ep_overlap=True)


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(
        gpt_oss_120b_pretrain_64gpu_gb200_bf16_config(),
        "64xGB200",
        "fp8mx",
        dispatcher="hybridep",
        recompute_modules=(),
        cuda_graphs="full_iteration",
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_512gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_64gpu_b300_fp8mx_config(),
        "512xGB200",
        "fp8mx",
        tp=2,
        cp=4,
        ep=8,
        global_batch_size=64,
        fp8_gather=False,
        force_balance=False,
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_72gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_64gpu_b300_nvfp4_config(), "72xGB200", "nvfp4", global_batch_size=36, force_balance=False
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_8gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(gpt_oss_20b_pretrain_8gpu_b300_nvfp4_config(), "8xGB200", "nvfp4", force_balance=False)


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_gb300_bf16_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_b300_bf16_config(), "64xGB300", "bf16", ep=64, dispatcher="alltoall")


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_gb200_fp8mx_config(), "64xGB300", "fp8mx", ep=16, recompute="none")


@recipe(family="gpt")
def gpt_oss_20b_pretrain_512gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_512gpu_gb200_fp8mx_config(), "512xGB300", "fp8mx", fp8_gather=False, force_balance=False
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_72gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(gpt_oss_20b_pretrain_72gpu_gb200_nvfp4_config(), "72xGB300", "nvfp4", force_balance=False)


@recipe(family="gpt")
def gpt_oss_20b_pretrain_8gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(gpt_oss_20b_pretrain_8gpu_b300_nvfp4_config(), "8xGB300", "nvfp4", force_balance=False)


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_h100_bf16_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_b200_bf16_config(), "64xH100", "bf16", pp=4, micro_batch_size=1)


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_h100_bf16_config(), "64xH100", "fp8cs")


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_vr200_bf16_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_gb300_bf16_config(), "64xVR200", "bf16")


@recipe(family="gpt")
def gpt_oss_120b_pretrain_64gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(gpt_oss_120b_pretrain_64gpu_gb200_fp8mx_config(), "64xVR200", "fp8mx", ep=16, recompute="none")


@recipe(family="gpt")
def gpt_oss_20b_pretrain_64gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(gpt_oss_20b_pretrain_64gpu_b300_nvfp4_config(), "64xVR200", "nvfp4", force_balance=False)


@recipe(family="gpt")
def gpt_oss_20b_pretrain_8gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(
        gpt_oss_20b_pretrain_64gpu_b300_nvfp4_config(),
        "8xVR200",
        "fp8mx",
        global_batch_size=24,
        fp8_gather=False,
        first_last_bf16=False,
        cp=1,
        ep=1,
        micro_batch_size=3,
        cp_comm="ring",
    )


@recipe(family="gpt")
def gpt_oss_20b_pretrain_8gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(gpt_oss_20b_pretrain_8gpu_b300_nvfp4_config(), "8xVR200", "nvfp4", force_balance=False)

"""Benchmarks of Qwen3 30B-A3B: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.qwen_moe import qwen3_30b_a3b_pretrain_config
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_config(),
        "64xB200",
        "bf16",
        ep=8,
        micro_batch_size=4,
        global_batch_size=4096,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
        dispatcher="hybridep",
    )


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_64gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8cs")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_64gpu_b200_bf16_config(), "8xB200", "bf16", global_batch_size=512, recompute="selective"
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8cs")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8mx", ep_overlap=True)


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xB200", "nvfp4")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config(),
        "8xB300",
        "bf16",
        micro_batch_size=8,
        recompute_modules=("moe",),
        cuda_graph_scope=("moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_30b_a3b_pretrain_8gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "8xB300", "fp8cs")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_30b_a3b_pretrain_8gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(),
        "8xB300",
        "fp8mx",
        ep_overlap=True,
        cuda_graphs="full_iteration",
        cuda_graph_scope=(),
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_30b_a3b_pretrain_8gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "8xB300", "nvfp4")


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_16gpu_gb200_bf16_dev_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_config(),
        "16xGB200",
        "bf16",
        ep=16,
        micro_batch_size=4,
        global_batch_size=512,
        dispatcher="hybridep",
        overlap_grad_reduce=False,
    )


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_16gpu_gb200_fp8mx_paged_stash_dev_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_16gpu_gb200_bf16_dev_config(),
        "16xGB200",
        "fp8mx",
        fp8_gather=False,
        cuda_graphs="local",
        cuda_graph_scope=("full_iteration",),
    )


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_16gpu_gb200_fp8mx_partial_cg_dev_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_16gpu_gb200_bf16_dev_config(), "16xGB200", "fp8mx", fp8_gather=False)


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_32gpu_gb200_bf16_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_64gpu_b200_bf16_config(), "32xGB200", "bf16", global_batch_size=2048)


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_32gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_32gpu_gb200_bf16_config(), "32xGB200", "fp8cs")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xGB200", "bf16")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xGB200", "fp8cs")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_8gpu_b300_fp8mx_config(), "8xGB200", "fp8mx", micro_batch_size=4, recompute_modules=()
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xGB200", "nvfp4", grads="fp32")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_32gpu_gb300_bf16_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "32xGB300", "bf16", global_batch_size=2048, recompute_modules=()
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_32gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(),
        "32xGB300",
        "fp8cs",
        global_batch_size=2048,
        recompute_modules=(),
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb300_bf16_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "bf16", recompute_modules=())


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "fp8cs", recompute_modules=())


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_fp8mx_config(), "8xGB300", "fp8mx", recompute_modules=())


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_30b_a3b_pretrain_8gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "nvfp4", recompute_modules=())


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_config(),
        "16xH100",
        "bf16",
        ep=16,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("moe_router", "moe_preprocess"),
        dispatcher="hybridep",
        grads="fp32",
        ep_overlap=True,
    )


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config(),
        "16xH100",
        "fp8cs",
        grads="bf16",
        ep_overlap=False,
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_16gpu_h100_fp8ds_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config(), "16xH100", "fp8ds")


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_32gpu_h100_bf16_dev_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_config(), "32xH100", "bf16", ep=8, global_batch_size=256, dispatcher="hybridep"
    )


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_32gpu_h100_fp8sc_dev_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_64gpu_b200_bf16_config(),
        "32xH100",
        "fp8sc",
        micro_batch_size=1,
        global_batch_size=256,
        moments="bf16",
        grads="fp32",
        fp8_gather=True,
    )


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_64gpu_h100_bf16_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config(), "64xH100", "bf16", global_batch_size=4096)


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_64gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config(), "64xH100", "fp8cs", global_batch_size=4096)


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_30b_a3b_pretrain_8gpu_vr200_bf16_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "bf16")


@recipe(family="qwen_moe")
def qwen3_30b_a3b_pretrain_8gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_30b_a3b_pretrain_8gpu_b300_fp8mx_config(),
        "8xVR200",
        "fp8mx",
        micro_batch_size=4,
        recompute="none",
        recompute_modules=(),
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_30b_a3b_pretrain_8gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(qwen3_30b_a3b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "nvfp4")

"""Benchmarks of Llama 3 8B: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.llama import llama3_8b_pretrain_config, llama3_8b_sft_config
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="llama")
def llama3_8b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        llama3_8b_pretrain_config(),
        "64xB200",
        "bf16",
        micro_batch_size=2,
        global_batch_size=1024,
        cuda_graphs="local",
        cuda_graph_scope=("full_iteration",),
    )


@recipe(family="llama")
def llama3_8b_pretrain_64gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_b200_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_64gpu_b200_bf16_config(), "8xB200", "bf16", global_batch_size=128)


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8mx")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_8b_pretrain_8gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(
        llama3_8b_pretrain_config(), "8xB200", "nvfp4", micro_batch_size=4, global_batch_size=128, recompute="selective"
    )


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_b300_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_bf16_config(), "8xB300", "bf16", micro_batch_size=4)


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xB300", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xB300", "fp8mx")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_nvfp4_config(), "8xB300", "nvfp4", recompute="none")


@recipe(family="llama")
def llama3_8b_pretrain_32gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_64gpu_b200_bf16_config(), "32xGB200", "bf16", global_batch_size=512)


@recipe(family="llama")
def llama3_8b_pretrain_32gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_32gpu_gb200_bf16_config(), "32xGB200", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_bf16_config(), "8xGB200", "bf16")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_bf16_config(), "8xGB200", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_bf16_config(), "8xGB200", "fp8mx")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_8b_pretrain_8gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b200_nvfp4_config(), "8xGB200", "nvfp4")


@recipe(family="llama")
def llama3_8b_sft_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama3_8b_sft_config(), "8xGB200", "bf16", seq_length=16384, overlap_grad_reduce=False)


@recipe(family="llama")
def llama3_8b_sft_8gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_sft_8gpu_gb200_bf16_config(), "8xGB200", "fp8cs")


@recipe(family="llama")
def llama3_8b_sft_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_sft_8gpu_gb200_bf16_config(), "8xGB200", "fp8mx")


@recipe(family="llama")
def llama3_8b_pretrain_32gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_32gpu_gb200_bf16_config(), "32xGB300", "bf16", micro_batch_size=4)


@recipe(family="llama")
def llama3_8b_pretrain_32gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_32gpu_gb300_bf16_config(), "32xGB300", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_32gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_32gpu_gb300_bf16_config(), "32xGB300", "fp8mx")


@recipe(family="llama")
def llama3_8b_pretrain_32gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_32gpu_gb300_bf16_config(), "32xGB300", "nvfp4")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "bf16")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "fp8mx")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "nvfp4")


@recipe(family="llama")
def llama3_8b_pretrain_64gpu_h100_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_config(), "64xH100", "bf16", cp=2, global_batch_size=1024)


@recipe(family="llama")
def llama3_8b_pretrain_64gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        llama3_8b_pretrain_config(), "64xH100", "fp8cs", global_batch_size=1024, recompute="full", recompute_layers=5
    )


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_h100_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_64gpu_h100_bf16_config(), "8xH100", "bf16", global_batch_size=128)


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_64gpu_h100_fp8cs_config(), "8xH100", "fp8cs", global_batch_size=128)


@recipe(family="llama")
def llama3_8b_sft_8gpu_h100_bf16_config() -> Recipe:
    return benchmark(llama3_8b_sft_8gpu_gb200_bf16_config(), "8xH100", "bf16", global_batch_size=32, seq_length=4096)


@recipe(family="llama")
def llama3_8b_sft_8gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_sft_8gpu_h100_bf16_config(), "8xH100", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_r100_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_h100_bf16_config(), "8xR100", "bf16", cp=1)


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_r100_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_r100_bf16_config(), "8xR100", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_r100_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_r100_bf16_config(), "8xR100", "fp8mx")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_r100_nvfp4_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_r100_bf16_config(), "8xR100", "nvfp4")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_vr200_bf16_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "bf16")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_vr200_fp8cs_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "fp8cs")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "fp8mx")


@recipe(family="llama")
def llama3_8b_pretrain_8gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(llama3_8b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "nvfp4")

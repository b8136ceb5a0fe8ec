"""Benchmarks of Llama 3.1 405B: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.llama import llama31_405b_pretrain_config
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        llama31_405b_pretrain_config(),
        "128xB200",
        "bf16",
        tp=4,
        pp=16,
        vp=8,
        global_batch_size=768,
        embedding_as_layer=True,
        head_as_layer=True,
        tp_comm_overlap=True,
        recompute="selective",
    )


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_bf16_config(), "128xB200", "fp8cs", vp=4)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_bf16_config(), "128xB200", "fp8mx")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_bf16_config(), "128xB200", "nvfp4", tp_comm_overlap=False)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_256gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_nvfp4_config(), "256xB200", "nvfp4", global_batch_size=1536)


@recipe(family="llama", published=Published(start={"sp": True, "recompute": "none", "offload": "activations"}))
def llama31_405b_pretrain_128gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        llama31_405b_pretrain_config(),
        "128xB300",
        "bf16",
        tp=2,
        strategy="megatron_fsdp",
        global_batch_size=768,
        tp_comm_overlap=True,
        recompute="full",
    )


@recipe(family="llama")
def llama31_405b_pretrain_128gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_fp8cs_config(), "128xB300", "fp8cs", pp=8, recompute="none")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_fp8cs_config(), "128xB300", "fp8mx", tp=2, pp=8, cp=2)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_nvfp4_config(), "128xB300", "nvfp4", pp=8, vp=4)


@recipe(family="llama", published=Published(start={"sp": True, "recompute": "none", "offload": "activations"}))
def llama31_405b_pretrain_256gpu_b300_bf16_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_bf16_config(), "256xB300", "bf16", global_batch_size=1536)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_bf16_config(), "128xGB200", "bf16")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_fp8cs_config(), "128xGB200", "fp8cs")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_bf16_config(), "128xGB200", "fp8mx")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_nvfp4_config(), "128xGB200", "nvfp4")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_256gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b200_bf16_config(), "256xGB200", "bf16", global_batch_size=1536)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_256gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_256gpu_gb200_bf16_config(), "256xGB200", "fp8cs", vp=4)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_256gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_256gpu_gb200_bf16_config(), "256xGB200", "fp8mx")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_256gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_256gpu_b200_nvfp4_config(), "256xGB200", "nvfp4")


@recipe(family="llama", published=Published(start={"sp": True, "recompute": "none", "offload": "activations"}))
def llama31_405b_pretrain_128gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_bf16_config(), "128xGB300", "bf16")


@recipe(family="llama")
def llama31_405b_pretrain_128gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_fp8cs_config(), "128xGB300", "fp8cs")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_128gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_fp8mx_config(), "128xGB300", "fp8mx")


@recipe(family="llama")
def llama31_405b_pretrain_128gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_nvfp4_config(), "128xGB300", "nvfp4", recompute="none")


@recipe(family="llama", published=Published(start={"sp": True, "recompute": "none", "offload": "activations"}))
def llama31_405b_pretrain_256gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_256gpu_b300_bf16_config(), "256xGB300", "bf16")


@recipe(family="llama")
def llama31_405b_pretrain_256gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_fp8cs_config(), "256xGB300", "fp8cs", global_batch_size=1536)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_256gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_fp8mx_config(), "256xGB300", "fp8mx", global_batch_size=1536)


@recipe(family="llama")
def llama31_405b_pretrain_256gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(
        llama31_405b_pretrain_128gpu_b300_nvfp4_config(), "256xGB300", "nvfp4", global_batch_size=1536, recompute="none"
    )


@recipe(family="llama")
def llama31_405b_pretrain_1024gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        llama31_405b_pretrain_256gpu_gb300_nvfp4_config(), "1024xH100", "bf16", tp=8, vp=8, cp=2, tp_comm_overlap=True
    )


@recipe(family="llama")
def llama31_405b_pretrain_1024gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        llama31_405b_pretrain_256gpu_gb300_nvfp4_config(), "1024xH100", "fp8cs", tp=8, vp=8, cp=2, tp_comm_overlap=True
    )


@recipe(family="llama")
def llama31_405b_pretrain_512gpu_h100_bf16_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_fp8mx_config(), "512xH100", "bf16", tp=8, vp=8, recompute="none")


@recipe(family="llama")
def llama31_405b_pretrain_512gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        llama31_405b_pretrain_128gpu_b300_fp8mx_config(), "512xH100", "fp8cs", tp=8, vp=8, recompute="none"
    )


@recipe(family="llama", published=Published(start={"sp": True}))
def llama31_405b_pretrain_256gpu_vr200_bf16_config() -> Recipe:
    return benchmark(
        llama31_405b_pretrain_256gpu_b300_bf16_config(), "256xVR200", "bf16", recompute="none", offload="activations"
    )


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama31_405b_pretrain_256gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_128gpu_b300_fp8mx_config(), "256xVR200", "fp8mx", global_batch_size=1536)


@recipe(family="llama")
def llama31_405b_pretrain_256gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(llama31_405b_pretrain_256gpu_gb300_nvfp4_config(), "256xVR200", "nvfp4")

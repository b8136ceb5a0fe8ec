"""Benchmarks of Llama 3 70B: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.llama import llama3_70b_peft_config, llama3_70b_pretrain_config, llama3_70b_sft_config
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="llama")
def llama3_70b_peft_8gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        llama3_70b_peft_config(),
        "8xB200",
        "bf16",
        pp=2,
        global_batch_size=32,
        seq_length=4096,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("mlp",),
        overlap_grad_reduce=False,
        targets=("qkv",),
        pad_to_max_length=True,
    )


@recipe(family="llama")
def llama3_70b_peft_8gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_bf16_config(), "8xB200", "fp8cs", vp=20)


@recipe(family="llama")
def llama3_70b_peft_8gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_bf16_config(), "8xB200", "fp8mx")


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        llama3_70b_pretrain_config(),
        "64xB200",
        "bf16",
        tp=2,
        pp=4,
        vp=5,
        cp=2,
        global_batch_size=256,
        cuda_graphs="local",
        cuda_graph_scope=("full_iteration",),
        tp_comm_overlap=True,
    )


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(
        llama3_70b_pretrain_config(),
        "64xB200",
        "fp8cs",
        strategy="megatron_fsdp",
        global_batch_size=256,
        offload="activations",
    )


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(
        llama3_70b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8mx", cp=1, cuda_graphs="none", cuda_graph_scope=()
    )


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_fp8mx_config(), "64xB200", "nvfp4", tp_comm_overlap=False)


@recipe(family="llama")
def llama3_70b_peft_8gpu_b300_bf16_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_bf16_config(), "8xB300", "bf16", pp=1)


@recipe(family="llama")
def llama3_70b_peft_8gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_bf16_config(), "8xB300", "fp8cs")


@recipe(family="llama")
def llama3_70b_peft_8gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_bf16_config(), "8xB300", "fp8mx")


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_b300_bf16_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_fp8cs_config(), "64xB300", "bf16", offload="none")


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b300_bf16_config(), "64xB300", "fp8cs")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_70b_pretrain_64gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_nvfp4_config(), "64xB300", "fp8mx", tp=1, recompute="selective")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_70b_pretrain_64gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_nvfp4_config(), "64xB300", "nvfp4", tp=1, recompute="selective")


@recipe(family="llama")
def llama3_70b_peft_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_fp8cs_config(), "8xGB200", "bf16", seq_length=2048, global_batch_size=64)


@recipe(family="llama")
def llama3_70b_peft_8gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_fp8cs_config(), "8xGB200", "fp8cs")


@recipe(family="llama")
def llama3_70b_peft_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_fp8cs_config(), "8xGB200", "fp8mx", pp=4)


@recipe(family="llama")
def llama3_70b_pretrain_32gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_fp8cs_config(), "32xGB200", "bf16", global_batch_size=128)


@recipe(family="llama", published=Published(start={"recompute": "none", "offload": "activations"}))
def llama3_70b_pretrain_32gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(
        llama3_70b_pretrain_32gpu_gb200_bf16_config(),
        "32xGB200",
        "fp8cs",
        micro_batch_size=2,
        recompute="full",
        offload="none",
    )


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_gb200_bf16_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_fp8cs_config(), "64xGB200", "bf16")


@recipe(family="llama", published=Published(start={"recompute": "none", "offload": "activations"}))
def llama3_70b_pretrain_64gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_32gpu_gb200_fp8cs_config(), "64xGB200", "fp8cs", global_batch_size=256)


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_fp8mx_config(), "64xGB200", "fp8mx")


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(
        llama3_70b_pretrain_64gpu_b200_nvfp4_config(), "64xGB200", "nvfp4", cuda_graphs="transformer_engine"
    )


@recipe(family="llama")
def llama3_70b_sft_32gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        llama3_70b_sft_config(),
        "32xGB200",
        "bf16",
        pp=8,
        vp=10,
        global_batch_size=32,
        seq_length=4096,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("mlp",),
        overlap_grad_reduce=False,
        pad_to_max_length=True,
    )


@recipe(family="llama")
def llama3_70b_sft_32gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_sft_32gpu_gb200_bf16_config(), "32xGB200", "fp8cs")


@recipe(family="llama")
def llama3_70b_sft_32gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_sft_32gpu_gb200_bf16_config(), "32xGB200", "fp8mx")


@recipe(family="llama")
def llama3_70b_peft_8gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b300_bf16_config(), "8xGB300", "bf16")


@recipe(family="llama")
def llama3_70b_peft_8gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_fp8cs_config(), "8xGB300", "fp8cs")


@recipe(family="llama")
def llama3_70b_peft_8gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_peft_8gpu_b200_fp8cs_config(), "8xGB300", "fp8mx")


@recipe(family="llama", published=Published(start={"recompute": "none", "offload": "activations"}))
def llama3_70b_pretrain_32gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_32gpu_gb200_fp8cs_config(), "32xGB300", "bf16")


@recipe(family="llama", published=Published(start={"recompute": "none", "offload": "activations"}))
def llama3_70b_pretrain_32gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_32gpu_gb200_fp8cs_config(), "32xGB300", "fp8cs")


@recipe(family="llama", published=Published(start={"recompute": "none", "offload": "activations"}))
def llama3_70b_pretrain_64gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_32gpu_gb200_fp8cs_config(), "64xGB300", "bf16", global_batch_size=256)


@recipe(family="llama", published=Published(start={"recompute": "none", "offload": "activations"}))
def llama3_70b_pretrain_64gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_32gpu_gb200_fp8cs_config(), "64xGB300", "fp8cs", global_batch_size=256)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_70b_pretrain_64gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_nvfp4_config(), "64xGB300", "fp8mx", tp=1, recompute="selective")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_70b_pretrain_64gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_nvfp4_config(), "64xGB300", "nvfp4", tp=1, recompute="selective")


@recipe(family="llama")
def llama3_70b_sft_32gpu_gb300_bf16_config() -> Recipe:
    return benchmark(llama3_70b_sft_32gpu_gb200_bf16_config(), "32xGB300", "bf16", pp=2, vp=20)


@recipe(family="llama")
def llama3_70b_sft_32gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(llama3_70b_sft_32gpu_gb300_bf16_config(), "32xGB300", "fp8cs")


@recipe(family="llama")
def llama3_70b_sft_32gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_sft_32gpu_gb300_bf16_config(), "32xGB300", "fp8mx")


@recipe(family="llama", published=Published(start={"recompute_layers": 1}))
def llama3_70b_peft_8gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        llama3_70b_peft_8gpu_gb200_fp8mx_config(),
        "8xH100",
        "bf16",
        pad_to_max_length=False,
        recompute="full",
        cuda_graphs="none",
        cuda_graph_scope=(),
    )


@recipe(family="llama")
def llama3_70b_peft_8gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        llama3_70b_peft_8gpu_h100_bf16_config(), "8xH100", "fp8cs", tp=2, recompute="none", tp_comm_overlap=True
    )


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_h100_bf16_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_fp8mx_config(), "64xH100", "bf16", tp=4, cp=2)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_70b_pretrain_64gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        llama3_70b_pretrain_64gpu_b200_fp8mx_config(),
        "64xH100",
        "fp8cs",
        tp=4,
        pp=8,
        recompute="selective",
        stage_layers=(
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            2,
            3,
            2,
            2,
            2,
            1,
        ),
    )


@recipe(family="llama")
def llama3_70b_sft_32gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        llama3_70b_sft_config(),
        "32xH100",
        "bf16",
        tp=4,
        pp=4,
        vp=5,
        global_batch_size=32,
        seq_length=4096,
        tp_comm_overlap=True,
        overlap_grad_reduce=False,
    )


@recipe(family="llama")
def llama3_70b_sft_32gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        llama3_70b_sft_32gpu_h100_bf16_config(),
        "32xH100",
        "fp8cs",
        pad_to_max_length=True,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("mlp",),
    )


@recipe(family="llama")
def llama3_70b_pretrain_64gpu_vr200_bf16_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_fp8cs_config(), "64xVR200", "bf16", micro_batch_size=2)


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_70b_pretrain_64gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_nvfp4_config(), "64xVR200", "fp8mx", tp=1, recompute="selective")


@recipe(family="llama", published=Published(start={"recompute": "none"}))
def llama3_70b_pretrain_64gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(llama3_70b_pretrain_64gpu_b200_nvfp4_config(), "64xVR200", "nvfp4", tp=1, recompute="selective")

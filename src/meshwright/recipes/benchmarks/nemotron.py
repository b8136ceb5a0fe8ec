"""Benchmarks of Nemotron-H, Nemotron Nano v2 and Nemotron 3: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark, pretrain
from meshwright.recipes.library.nemotron import (
    nemotron_3_nano_pretrain_config,
    nemotron_3_super_pretrain_config,
    nemotronh_56b_pretrain_config,
)
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        nemotron_3_nano_pretrain_config(),
        "8xB200",
        "bf16",
        ep=8,
        micro_batch_size=2,
        global_batch_size=512,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "mamba", "moe_router", "moe_preprocess"),
        dispatcher="hybridep",
    )


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8mx")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b200_bf16_config(), "8xB200", "nvfp4")


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        nemotron_3_super_pretrain_config(),
        "64xB200",
        "bf16",
        ep=64,
        global_batch_size=512,
        seq_length=8192,
        recompute="selective",
        recompute_modules=("moe_act", "moe", "layernorm", "core_attn"),
        dispatcher="hybridep",
    )


@recipe(
    family="nemotron",
    published=Published(start={"loss": "vocab_parallel", "recompute_modules": ("moe_act", "layernorm")}),
)
def nemotron_3_super_pretrain_64gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(
        nemotron_3_super_pretrain_64gpu_b200_bf16_config(),
        "64xB200",
        "fp8mx",
        recompute_modules=("moe_act", "layernorm", "shared_experts"),
        loss="fused_linear",
    )


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(
        nemotron_3_super_pretrain_64gpu_b200_bf16_config(),
        "64xB200",
        "nvfp4",
        tp=2,
        first_last_bf16=True,
        recompute="none",
        recompute_modules=(),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("mamba", "attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="nemotron", published=Published(start={"cp": 1}))
def nemotronh_56b_pretrain_256gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        nemotronh_56b_pretrain_config(),
        "256xB200",
        "bf16",
        tp=2,
        cp=2,
        global_batch_size=192,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("mamba", "attn"),
        tp_comm_overlap=True,
        shared_expert_overlap=True,
    )


@recipe(family="nemotron")
def nemotronh_56b_pretrain_256gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(nemotronh_56b_pretrain_256gpu_b200_bf16_config(), "256xB200", "fp8cs", cp=1, global_batch_size=768)


@recipe(family="nemotron")
def nemotronh_56b_pretrain_64gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(nemotronh_56b_pretrain_256gpu_b200_bf16_config(), "64xB200", "fp8cs", cp=1)


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_b300_bf16_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b200_bf16_config(), "8xB300", "bf16", micro_batch_size=4)


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xB300", "fp8mx")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xB300", "nvfp4")


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        nemotron_3_super_pretrain_64gpu_b200_bf16_config(),
        "64xB300",
        "bf16",
        ep=8,
        recompute_modules=("moe_act", "layernorm"),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "mamba", "moe_router", "moe_preprocess"),
    )


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(
        nemotron_3_super_pretrain_64gpu_b300_bf16_config(), "64xB300", "fp8mx", recompute="none", recompute_modules=()
    )


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_b300_bf16_config(), "64xB300", "nvfp4", first_last_bf16=True)


@recipe(family="nemotron")
def nemotronh_56b_pretrain_64gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(nemotronh_56b_pretrain_64gpu_b200_fp8cs_config(), "64xB300", "fp8cs")


@recipe(family="nemotron")
def nemotron_3_5_lightning_pretrain_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        pretrain("nemotron_3_5_lightning", 1),
        "8xGB200",
        "bf16",
        ep=8,
        micro_batch_size=2,
        global_batch_size=512,
        seq_length=8192,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "mamba", "moe_router", "moe_preprocess"),
        dispatcher="hybridep",
        mtp_loss=0.1,
    )


@recipe(family="nemotron")
def nemotron_3_5_lightning_pretrain_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_5_lightning_pretrain_8gpu_gb200_bf16_config(), "8xGB200", "fp8mx")


@recipe(
    family="nemotron",
    published=Published(
        start={"strategy": "megatron_fsdp", "recompute": "none", "recompute_modules": (), "loss": "vocab_parallel"}
    ),
)
def nemotron_3_5_lightning_pretrain_8gpu_gb200_fp8mx_fsdp_config() -> Recipe:
    return benchmark(
        nemotron_3_5_lightning_pretrain_8gpu_gb200_bf16_config(),
        "8xGB200",
        "fp8mx",
        micro_batch_size=3,
        global_batch_size=384,
        recompute="selective",
        cuda_graphs="none",
        cuda_graph_scope=(),
        recompute_modules=("moe",),
        loss="chunked",
    )


@recipe(family="nemotron")
def nemotron_3_5_lightning_pretrain_8gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_5_lightning_pretrain_8gpu_gb200_bf16_config(), "8xGB200", "nvfp4")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b200_bf16_config(), "8xGB200", "bf16")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b200_bf16_config(), "8xGB200", "fp8mx")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b200_bf16_config(), "8xGB200", "nvfp4")


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_gb200_bf16_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_b300_fp8mx_config(), "64xGB200", "bf16", tp=2, ep=64)


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_b300_fp8mx_config(), "64xGB200", "fp8mx", tp=2, ep=64)


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(
        nemotron_3_super_pretrain_64gpu_b200_nvfp4_config(),
        "64xGB200",
        "nvfp4",
        cuda_graph_scope=("attn", "mamba", "moe_router", "moe_preprocess"),
    )


@recipe(family="nemotron", published=Published(start={"strategy": "megatron_fsdp"}))
def nemotron_3_ultra_pretrain_256gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(
        pretrain("nemotron_3_ultra", 1),
        "256xGB200",
        "fp8mx",
        tp=2,
        ep=64,
        global_batch_size=256,
        seq_length=8192,
        recompute="selective",
        recompute_modules=("moe_act",),
        dispatcher="hybridep",
        mtp_loss=0.1,
        per_token_loss=True,
        offload="activations",
    )


@recipe(family="nemotron")
def nemotronh_56b_pretrain_64gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(nemotronh_56b_pretrain_64gpu_b200_fp8cs_config(), "64xGB200", "fp8cs")


@recipe(family="nemotron")
def nemotron_3_5_lightning_pretrain_8gpu_gb300_bf16_config() -> Recipe:
    return benchmark(nemotron_3_5_lightning_pretrain_8gpu_gb200_bf16_config(), "8xGB300", "bf16", micro_batch_size=4)


@recipe(family="nemotron")
def nemotron_3_5_lightning_pretrain_8gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_5_lightning_pretrain_8gpu_gb300_bf16_config(), "8xGB300", "fp8mx")


@recipe(family="nemotron", published=Published(start={"strategy": "megatron_fsdp", "loss": "vocab_parallel"}))
def nemotron_3_5_lightning_pretrain_8gpu_gb300_fp8mx_fsdp_config() -> Recipe:
    return benchmark(
        nemotron_3_5_lightning_pretrain_8gpu_gb200_fp8mx_fsdp_config(),
        "8xGB300",
        "fp8mx",
        recompute="none",
        recompute_modules=(),
    )


@recipe(family="nemotron")
def nemotron_3_5_lightning_pretrain_8gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_5_lightning_pretrain_8gpu_gb300_bf16_config(), "8xGB300", "nvfp4")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_gb300_bf16_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xGB300", "bf16")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xGB300", "fp8mx")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xGB300", "nvfp4")


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_gb300_bf16_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_b300_fp8mx_config(), "64xGB300", "bf16", ep=64)


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_b300_fp8mx_config(), "64xGB300", "fp8mx", ep=64)


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_gb200_nvfp4_config(), "64xGB300", "nvfp4", tp=1)


@recipe(
    family="nemotron",
    published=Published(
        start={
            "strategy": "megatron_fsdp",
            "recompute": "selective",
            "recompute_modules": ("moe_act",),
            "offload": "activations",
        }
    ),
)
def nemotron_3_ultra_pretrain_256gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(
        nemotron_3_ultra_pretrain_256gpu_gb200_fp8mx_config(),
        "256xGB300",
        "fp8mx",
        tp=1,
        recompute="full",
        recompute_modules=(),
        offload="none",
    )


@recipe(family="nemotron", published=Published(start={"cp": 1}))
def nemotronh_56b_pretrain_256gpu_gb300_bf16_config() -> Recipe:
    return benchmark(nemotronh_56b_pretrain_256gpu_b200_bf16_config(), "256xGB300", "bf16")


@recipe(family="nemotron")
def nemotronh_56b_pretrain_256gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(nemotronh_56b_pretrain_256gpu_b200_fp8cs_config(), "256xGB300", "fp8cs")


@recipe(family="nemotron")
def nemotronh_56b_pretrain_64gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(nemotronh_56b_pretrain_64gpu_b200_fp8cs_config(), "64xGB300", "fp8cs")


@recipe(family="nemotron")
def nemotron_3_5_lightning_pretrain_16gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        nemotron_3_5_lightning_pretrain_8gpu_gb200_bf16_config(),
        "16xH100",
        "bf16",
        moments="bf16",
        grads="fp32",
        micro_batch_size=1,
        recompute="selective",
        recompute_modules=("moe_act", "layernorm"),
        offload="activations",
        cuda_graph_scope=("attn", "mamba"),
    )


@recipe(
    family="nemotron",
    published=Published(start={"recompute_modules": ("layernorm",), "defer_grad_sync": True, "loss": "vocab_parallel"}),
)
def nemotron_3_5_lightning_pretrain_16gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        nemotron_3_5_lightning_pretrain_8gpu_gb200_fp8mx_fsdp_config(),
        "16xH100",
        "fp8cs",
        global_batch_size=1024,
        micro_batch_size=1,
        recompute_modules=("layernorm", "moe_act", "shared_experts"),
        defer_grad_sync=False,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "mamba"),
    )


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_16gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        nemotron_3_nano_pretrain_8gpu_b200_bf16_config(),
        "16xH100",
        "bf16",
        global_batch_size=1024,
        micro_batch_size=1,
        recompute="selective",
        recompute_modules=("moe", "layernorm"),
        cuda_graph_scope=("attn", "mamba"),
    )


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_16gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        nemotron_3_nano_pretrain_16gpu_h100_bf16_config(), "16xH100", "fp8cs", ep=16, recompute_modules=("layernorm",)
    )


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        nemotron_3_super_pretrain_config(),
        "64xH100",
        "bf16",
        pp=2,
        ep=32,
        recompute="selective",
        recompute_modules=("layernorm", "moe_act", "moe", "core_attn"),
        dispatcher="hybridep",
        overlap_grad_reduce=False,
        moments="bf16",
    )


@recipe(family="nemotron")
def nemotronh_56b_pretrain_64gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        nemotronh_56b_pretrain_64gpu_b200_fp8cs_config(), "64xH100", "fp8cs", tp=8, cuda_graph_scope=("mamba",)
    )


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_vr200_bf16_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xVR200", "bf16")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xVR200", "fp8mx")


@recipe(family="nemotron")
def nemotron_3_nano_pretrain_8gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_nano_pretrain_8gpu_b300_bf16_config(), "8xVR200", "nvfp4")


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_vr200_bf16_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_b300_fp8mx_config(), "64xVR200", "bf16", ep=64)


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_b300_fp8mx_config(), "64xVR200", "fp8mx", ep=64)


@recipe(family="nemotron")
def nemotron_3_super_pretrain_64gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(nemotron_3_super_pretrain_64gpu_gb200_nvfp4_config(), "64xVR200", "nvfp4", tp=1)

"""Benchmarks of Qwen3.5-VL: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark, pretrain
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none"}))
def qwen35_vl_122b_a10b_pretrain_32gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        pretrain("qwen35_122b_a10b", 1, images=True),
        "32xB200",
        "bf16",
        pp=4,
        vp=4,
        ep=8,
        global_batch_size=1024,
        overlap_grad_reduce=False,
        per_token_loss=True,
        recompute="full",
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_122b_a10b_pretrain_32gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(
        qwen35_vl_122b_a10b_pretrain_32gpu_b200_bf16_config(),
        "32xB200",
        "fp8cs",
        ep_overlap=True,
        recompute="selective",
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_122b_a10b_pretrain_32gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b200_fp8cs_config(), "32xB200", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_35b_a3b_pretrain_8gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        pretrain("qwen35_35b_a3b", 1, images=True),
        "8xB200",
        "bf16",
        ep=8,
        global_batch_size=512,
        overlap_grad_reduce=False,
    )


@recipe(family="qwen_vl")
def qwen35_vl_35b_a3b_pretrain_8gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_35b_a3b_pretrain_8gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8mx")


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        pretrain("qwen35_397b_a17b", 1, images=True),
        "64xB200",
        "bf16",
        pp=8,
        vp=4,
        ep=8,
        global_batch_size=1024,
        overlap_grad_reduce=False,
        per_token_loss=True,
        stage_layers=(1,) * 2 + (2,) * 28 + (1,) * 2,
        recompute="full",
    )


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_64gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8cs")


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_64gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        pretrain("qwen35_122b_a10b", 1, images=True),
        "32xB300",
        "bf16",
        ep=32,
        micro_batch_size=2,
        global_batch_size=1024,
        dispatcher="hybridep",
        overlap_grad_reduce=False,
        per_token_loss=True,
    )


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xB300", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xB300", "fp8mx")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        qwen35_vl_35b_a3b_pretrain_8gpu_b200_bf16_config(),
        "8xB300",
        "bf16",
        micro_batch_size=8,
        dispatcher="hybridep",
        recompute="full",
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xB300", "fp8cs")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xB300", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        pretrain("qwen35_397b_a17b", 1, images=True),
        "64xB300",
        "bf16",
        ep=64,
        global_batch_size=1024,
        dispatcher="hybridep",
        overlap_grad_reduce=False,
        per_token_loss=True,
    )


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xB300", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xB300", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        qwen35_vl_122b_a10b_pretrain_32gpu_b200_bf16_config(),
        "32xGB200",
        "bf16",
        vp=1,
        dispatcher="hybridep",
        recompute="none",
    )


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_gb200_bf16_config(), "32xGB200", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_gb200_bf16_config(), "32xGB200", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_35b_a3b_pretrain_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        qwen35_vl_35b_a3b_pretrain_8gpu_b200_bf16_config(),
        "8xGB200",
        "bf16",
        micro_batch_size=2,
        global_batch_size=480,
        dispatcher="hybridep",
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(
        qwen35_vl_35b_a3b_pretrain_8gpu_gb200_bf16_config(),
        "8xGB200",
        "fp8cs",
        micro_batch_size=3,
        recompute="selective",
        loss="chunked",
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "loss": "vocab_parallel"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(
        qwen35_vl_35b_a3b_pretrain_8gpu_gb200_fp8cs_config(),
        "8xGB200",
        "fp8mx",
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_64gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        qwen35_vl_397b_a17b_pretrain_64gpu_b200_bf16_config(),
        "64xGB200",
        "bf16",
        vp=1,
        dispatcher="hybridep",
        stage_layers=(7,) * 2 + (8,) * 4 + (7,) * 2,
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_64gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_gb200_bf16_config(), "64xGB200", "fp8cs")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_64gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_gb200_bf16_config(), "64xGB200", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_gb300_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xGB300", "bf16")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xGB300", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xGB300", "fp8mx")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_gb300_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "bf16")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "fp8cs")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xGB300", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_gb300_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xGB300", "bf16")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xGB300", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xGB300", "fp8mx")


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none"}))
def qwen35_vl_122b_a10b_pretrain_128gpu_h100_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b200_bf16_config(), "128xH100", "bf16", tp=2, pp=8, vp=2, ep=16)


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none"}))
def qwen35_vl_122b_a10b_pretrain_128gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_128gpu_h100_bf16_config(), "128xH100", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_35b_a3b_pretrain_16gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        qwen35_vl_35b_a3b_pretrain_8gpu_b200_bf16_config(),
        "16xH100",
        "bf16",
        pp=2,
        moments="bf16",
        grads="fp32",
        dispatcher="hybridep",
        stage_layers=(17, 23),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none", "stage_layers": ()}))
def qwen35_vl_35b_a3b_pretrain_16gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(
        qwen35_vl_35b_a3b_pretrain_8gpu_b200_bf16_config(),
        "16xH100",
        "fp8cs",
        pp=2,
        vp=12,
        recompute="full",
        stage_layers=(1,) * 4 + (2,) * 16 + (1,) * 4,
    )


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_256gpu_h100_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b200_bf16_config(), "256xH100", "bf16", tp=2, ep=32)


@recipe(family="qwen_vl", published=Published(start={"ep_overlap": True, "recompute": "none", "stage_layers": ()}))
def qwen35_vl_397b_a17b_pretrain_256gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_256gpu_h100_bf16_config(), "256xH100", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_vr200_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xVR200", "bf16")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_vr200_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xVR200", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_122b_a10b_pretrain_32gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_122b_a10b_pretrain_32gpu_b300_bf16_config(), "32xVR200", "fp8mx")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_vr200_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "bf16")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_vr200_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "fp8cs")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none"}))
def qwen35_vl_35b_a3b_pretrain_8gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_35b_a3b_pretrain_8gpu_b300_bf16_config(), "8xVR200", "fp8mx")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_vr200_bf16_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xVR200", "bf16")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_vr200_fp8cs_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xVR200", "fp8cs")


@recipe(family="qwen_vl")
def qwen35_vl_397b_a17b_pretrain_64gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(qwen35_vl_397b_a17b_pretrain_64gpu_b300_bf16_config(), "64xVR200", "fp8mx")

"""Benchmarks of DeepSeek-V3: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.deepseek import deepseek_v3_pretrain_config
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_config(),
        "256xB200",
        "bf16",
        pp=16,
        ep=8,
        recompute="selective",
        recompute_modules=("mla_up_proj", "moe_act"),
        dispatcher="hybridep",
        stage_layers=(4,) * 15 + (1,),
        moments="bf16",
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_bf16_config(),
        "256xB200",
        "fp8cs",
        recompute_modules=("mla_up_proj", "moe_act"),
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj", "mlp")}))
def deepseek_v3_pretrain_256gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_bf16_config(),
        "256xB200",
        "fp8mx",
        pp=8,
        vp=2,
        ep=32,
        dispatcher="deepep",
        ep_overlap=True,
        recompute_modules=("mla_up_proj", "mlp", "layernorm", "moe"),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_b200_fp8mx_large_scale_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_256gpu_b200_fp8cs_config(), "256xB200", "fp8mx", global_batch_size=256)


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj", "layernorm", "moe_act")}))
def deepseek_v3_pretrain_256gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_fp8mx_config(),
        "256xB200",
        "nvfp4",
        recompute_modules=("mla_up_proj", "layernorm", "moe"),
        cuda_graphs="none",
        cuda_graph_scope=(),
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_fp8mx_config(),
        "256xB300",
        "bf16",
        dispatcher="hybridep",
        ep_overlap=False,
        ep=8,
        recompute_modules=("mla_up_proj",),
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_256gpu_b300_bf16_config(), "256xB300", "fp8cs")


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b300_bf16_config(),
        "256xB300",
        "fp8mx",
        ep_overlap=True,
        cuda_graphs="full_iteration",
        cuda_graph_scope=(),
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_b300_fp8mx_large_scale_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b300_bf16_config(),
        "256xB300",
        "fp8mx",
        global_batch_size=256,
        ep_overlap=True,
        cuda_graphs="full_iteration",
        cuda_graph_scope=(),
    )


@recipe(
    family="deepseek",
    published=Published(
        start={
            "recompute": "selective",
            "recompute_modules": ("mla_up_proj",),
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("attn", "moe_router", "moe_preprocess"),
            "te_rng_tracker": True,
        }
    ),
)
def deepseek_v3_pretrain_256gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_bf16_config(),
        "256xB300",
        "nvfp4",
        pp=8,
        vp=2,
        micro_batch_size=2,
        recompute="full",
        recompute_modules=(),
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b300_bf16_config(),
        "256xGB200",
        "bf16",
        pp=4,
        vp=4,
        ep=64,
        recompute_modules=("mla_up_proj", "layernorm", "moe_act"),
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mlp",)}))
def deepseek_v3_pretrain_256gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b300_bf16_config(), "256xGB200", "fp8cs", pp=4, vp=4, ep=64, recompute_modules=()
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_bf16_config(),
        "256xGB200",
        "fp8mx",
        ep_overlap=True,
        pp=4,
        vp=4,
        ep=64,
        cuda_graphs="full_iteration",
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_gb200_fp8mx_large_scale_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_fp8mx_config(),
        "256xGB200",
        "fp8mx",
        global_batch_size=256,
        recompute_modules=("mla_up_proj", "moe_act"),
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_gb200_fp8mx_partial_cg_dev_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_fp8mx_large_scale_config(),
        "256xGB200",
        "fp8mx",
        global_batch_size=8192,
        recompute_modules=("mla_up_proj",),
        grads="fp32",
        offload="activations",
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mlp",)}))
def deepseek_v3_pretrain_256gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_fp8mx_config(),
        "256xGB200",
        "nvfp4",
        ep_overlap=False,
        recompute_modules=(),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(
    family="deepseek",
    published=Published(
        start={
            "strategy": "megatron_fsdp",
            "recompute": "selective",
            "recompute_modules": ("layernorm", "mla_up_proj", "moe_act"),
        }
    ),
)
def deepseek_v3_pretrain_128gpu_gb300_fp8mx_hsdp_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_config(),
        "128xGB300",
        "fp8mx",
        ep=32,
        dp_replicate=2,
        global_batch_size=256,
        cuda_graphs="full_iteration",
        dispatcher="hybridep",
        moments="bf16",
        offload="activations",
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_gb300_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_nvfp4_config(), "256xGB300", "bf16", recompute_modules=("moe_act",)
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_bf16_config(),
        "256xGB300",
        "fp8cs",
        pp=2,
        vp=8,
        ep=32,
        micro_batch_size=2,
        recompute_modules=("moe",),
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb300_fp8cs_config(),
        "256xGB300",
        "fp8mx",
        ep_overlap=True,
        micro_batch_size=1,
        recompute_modules=(),
        cuda_graphs="full_iteration",
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_gb300_fp8mx_large_scale_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_fp8mx_large_scale_config(), "256xGB300", "fp8mx", recompute_modules=()
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_gb300_fp8mx_partial_cg_dev_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_nvfp4_config(),
        "256xGB300",
        "fp8mx",
        global_batch_size=8192,
        grads="fp32",
        ep_overlap=True,
        recompute="none",
    )


@recipe(family="deepseek", published=Published(start={"recompute": "selective", "recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb300_fp8cs_config(), "256xGB300", "nvfp4", recompute="full", recompute_modules=()
    )


@recipe(family="deepseek", published=Published(start={"strategy": "megatron_fsdp"}))
def deepseek_v3_pretrain_64gpu_gb300_bf16_fsdp_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_128gpu_gb300_fp8mx_hsdp_config(),
        "64xGB300",
        "bf16",
        ep=64,
        dp_replicate=1,
        micro_batch_size=2,
        recompute="selective",
        recompute_modules=("layernorm", "mla_up_proj", "moe_act"),
        cuda_graphs="none",
    )


@recipe(family="deepseek", published=Published(start={"strategy": "megatron_fsdp"}))
def deepseek_v3_pretrain_64gpu_gb300_fp8mx_fsdp_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_64gpu_gb300_bf16_fsdp_config(), "64xGB300", "fp8mx")


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj", "mlp")}))
def deepseek_v3_pretrain_1024gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_b200_bf16_config(),
        "1024xH100",
        "bf16",
        tp=2,
        pp=8,
        vp=4,
        ep=64,
        global_batch_size=16384,
        recompute_modules=("mla_up_proj", "mlp", "layernorm", "moe_act"),
        stage_layers=(1,) + (2,) * 30 + (0,),
        overlap_grad_reduce=False,
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj", "mlp")}))
def deepseek_v3_pretrain_1024gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_1024gpu_h100_bf16_config(), "1024xH100", "fp8cs")


@recipe(family="deepseek", published=Published(start={"tp": 2, "recompute_modules": ("mla_up_proj", "mlp")}))
def deepseek_v3_pretrain_1024gpu_h100_fp8sc_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_1024gpu_h100_bf16_config(),
        "1024xH100",
        "fp8sc",
        tp=4,
        vp=2,
        recompute_modules=(),
        stage_layers=(4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1),
    )


@recipe(family="deepseek", published=Published(start={"tp": 2, "recompute_modules": ("mla_up_proj", "mlp")}))
def deepseek_v3_pretrain_1024gpu_h100_fp8sc_large_scale_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_1024gpu_h100_fp8sc_config(), "1024xH100", "fp8sc", global_batch_size=1024)


@recipe(
    family="deepseek",
    published=Published(
        start={
            "tp": 2,
            "pp": 8,
            "vp": 4,
            "recompute": "selective",
            "recompute_modules": ("mla_up_proj", "mlp"),
            "pp_schedule": "interleaved_1f1b",
            "stage_layers": (1,) + (2,) * 30 + (0,),
            "offload": "none",
        }
    ),
)
def deepseek_v3_pretrain_64gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_64gpu_gb300_bf16_fsdp_config(),
        "64xH100",
        "bf16",
        global_batch_size=1024,
        tp=8,
        micro_batch_size=1,
        recompute="full",
        recompute_modules=(),
        offload="optimizer",
        overlap_grad_reduce=False,
    )


@recipe(
    family="deepseek",
    published=Published(
        start={
            "tp": 2,
            "pp": 8,
            "vp": 4,
            "recompute": "selective",
            "recompute_modules": ("mla_up_proj", "mlp"),
            "pp_schedule": "interleaved_1f1b",
            "stage_layers": (1,) + (2,) * 30 + (0,),
            "offload": "none",
        }
    ),
)
def deepseek_v3_pretrain_64gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_64gpu_h100_bf16_config(), "64xH100", "fp8cs")


@recipe(
    family="deepseek",
    published=Published(start={"pp": 4, "vp": 4, "pp_schedule": "interleaved_1f1b", "stage_layers": (4,) * 15 + (1,)}),
)
def deepseek_v3_pretrain_128gpu_vr200_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_nvfp4_config(),
        "128xVR200",
        "bf16",
        global_batch_size=2048,
        pp=2,
        vp=1,
        recompute_modules=("mla_up_proj",),
        stage_layers=(31, 30),
    )


@recipe(
    family="deepseek",
    published=Published(start={"pp": 4, "vp": 4, "pp_schedule": "interleaved_1f1b", "stage_layers": (4,) * 15 + (1,)}),
)
def deepseek_v3_pretrain_128gpu_vr200_fp8cs_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_nvfp4_config(),
        "128xVR200",
        "fp8cs",
        global_batch_size=2048,
        pp=2,
        vp=1,
        recompute_modules=("mlp",),
        stage_layers=(31, 30),
    )


@recipe(
    family="deepseek",
    published=Published(start={"pp": 4, "vp": 4, "pp_schedule": "interleaved_1f1b", "stage_layers": (4,) * 15 + (1,)}),
)
def deepseek_v3_pretrain_128gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_fp8mx_large_scale_config(),
        "128xVR200",
        "fp8mx",
        global_batch_size=2048,
        pp=2,
        vp=1,
        stage_layers=(31, 30),
        recompute_modules=("mla_up_proj",),
    )


@recipe(
    family="deepseek",
    published=Published(start={"vp": 4, "ep": 64, "pp_schedule": "interleaved_1f1b", "stage_layers": (4,) * 15 + (1,)}),
)
def deepseek_v3_pretrain_128gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_nvfp4_config(),
        "128xVR200",
        "nvfp4",
        global_batch_size=2048,
        vp=1,
        ep=32,
        recompute_modules=("mlp",),
        stage_layers=(15, 15, 16, 15),
    )


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_vr200_bf16_config() -> Recipe:
    return benchmark(
        deepseek_v3_pretrain_256gpu_gb200_nvfp4_config(), "256xVR200", "bf16", recompute_modules=("moe_act",)
    )


@recipe(family="deepseek", published=Published(start={"recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_vr200_fp8cs_config() -> Recipe:
    base = deepseek_v3_pretrain_256gpu_gb300_fp8cs_config()
    return benchmark(base, "256xVR200", "fp8cs", recompute_modules=("moe", "mla_up_proj"))


@recipe(family="deepseek")
def deepseek_v3_pretrain_256gpu_vr200_fp8mx_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_256gpu_gb300_fp8mx_config(), "256xVR200", "fp8mx")


@recipe(family="deepseek", published=Published(start={"recompute": "selective", "recompute_modules": ("mla_up_proj",)}))
def deepseek_v3_pretrain_256gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(deepseek_v3_pretrain_256gpu_gb300_nvfp4_config(), "256xVR200", "nvfp4")

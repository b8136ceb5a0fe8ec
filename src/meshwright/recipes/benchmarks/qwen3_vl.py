"""Benchmarks of Qwen3-VL: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark, pretrain
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_vl_235b_a22b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        pretrain("qwen3_vl_235b_a22b", 1, images=True),
        "64xB200",
        "bf16",
        pp=8,
        ep=8,
        global_batch_size=1024,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("moe_router", "moe_preprocess"),
        stage_layers=(10,) + (12,) * 7,
        overlap_grad_reduce=False,
        per_token_loss=True,
        recompute="selective",
        recompute_modules=("moe",),
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_vl_235b_a22b_pretrain_64gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_235b_a22b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8cs")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_vl_235b_a22b_pretrain_64gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_vl_235b_a22b_pretrain_64gpu_b200_bf16_config(), "64xB200", "fp8mx")


@recipe(family="qwen_vl")
def qwen3_vl_30b_a3b_pretrain_8gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        pretrain("qwen3_vl_30b_a3b", 1, images=True),
        "8xB200",
        "bf16",
        ep=8,
        global_batch_size=512,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("moe_router", "moe_preprocess"),
        overlap_grad_reduce=False,
    )


@recipe(family="qwen_vl")
def qwen3_vl_30b_a3b_pretrain_8gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8cs")


@recipe(family="qwen_vl")
def qwen3_vl_30b_a3b_pretrain_8gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_8gpu_b200_bf16_config(), "8xB200", "fp8mx")


@recipe(
    family="qwen_vl",
    published=Published(
        start={
            "recompute": "none",
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe_router", "moe_preprocess"),
            "te_rng_tracker": True,
        }
    ),
)
def qwen3_vl_235b_a22b_pretrain_64gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_vl_235b_a22b_pretrain_64gpu_b200_bf16_config(),
        "64xGB200",
        "bf16",
        micro_batch_size=2,
        dispatcher="hybridep",
        recompute="full",
        cuda_graphs="none",
        cuda_graph_scope=(),
        recompute_modules=(),
    )


@recipe(
    family="qwen_vl",
    published=Published(
        start={
            "recompute": "none",
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe_router", "moe_preprocess"),
            "te_rng_tracker": True,
        }
    ),
)
def qwen3_vl_235b_a22b_pretrain_64gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_235b_a22b_pretrain_64gpu_gb200_bf16_config(), "64xGB200", "fp8cs")


@recipe(
    family="qwen_vl",
    published=Published(
        start={
            "recompute": "none",
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe_router", "moe_preprocess"),
            "te_rng_tracker": True,
        }
    ),
)
def qwen3_vl_235b_a22b_pretrain_64gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_vl_235b_a22b_pretrain_64gpu_gb200_bf16_config(), "64xGB200", "fp8mx")


@recipe(
    family="qwen_vl",
    published=Published(start={"recompute": "none", "recompute_modules": (), "loss": "vocab_parallel"}),
)
def qwen3_vl_30b_a3b_pretrain_8gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_vl_30b_a3b_pretrain_8gpu_b200_bf16_config(),
        "8xGB200",
        "bf16",
        micro_batch_size=4,
        dispatcher="hybridep",
        recompute="selective",
        loss="chunked",
        recompute_modules=("moe",),
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_vl_30b_a3b_pretrain_8gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_8gpu_gb200_bf16_config(), "8xGB200", "fp8cs", loss="vocab_parallel")


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_vl_30b_a3b_pretrain_8gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_8gpu_gb200_fp8cs_config(), "8xGB200", "fp8mx")


@recipe(family="qwen_vl")
def qwen3_vl_235b_a22b_pretrain_64gpu_gb300_bf16_config() -> Recipe:
    return benchmark(
        qwen3_vl_235b_a22b_pretrain_64gpu_b200_bf16_config(),
        "64xGB300",
        "bf16",
        pp=1,
        ep=64,
        dispatcher="hybridep",
        recompute="none",
        stage_layers=(),
        recompute_modules=(),
    )


@recipe(family="qwen_vl")
def qwen3_vl_235b_a22b_pretrain_64gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_235b_a22b_pretrain_64gpu_gb300_bf16_config(), "64xGB300", "fp8cs")


@recipe(family="qwen_vl")
def qwen3_vl_235b_a22b_pretrain_64gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(qwen3_vl_235b_a22b_pretrain_64gpu_gb300_bf16_config(), "64xGB300", "fp8mx")


@recipe(
    family="qwen_vl",
    published=Published(start={"recompute": "none", "recompute_modules": (), "loss": "vocab_parallel"}),
)
def qwen3_vl_30b_a3b_pretrain_8gpu_gb300_bf16_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_8gpu_gb200_bf16_config(), "8xGB300", "bf16", micro_batch_size=8)


@recipe(
    family="qwen_vl",
    published=Published(start={"recompute": "none", "recompute_modules": (), "loss": "vocab_parallel"}),
)
def qwen3_vl_30b_a3b_pretrain_8gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_8gpu_gb300_bf16_config(), "8xGB300", "fp8cs")


@recipe(
    family="qwen_vl",
    published=Published(start={"recompute": "none", "recompute_modules": (), "loss": "vocab_parallel"}),
)
def qwen3_vl_30b_a3b_pretrain_8gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_8gpu_gb300_bf16_config(), "8xGB300", "fp8mx")


@recipe(
    family="qwen_vl",
    published=Published(
        start={
            "ep_overlap": True,
            "recompute": "none",
            "stage_layers": (),
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe_router", "moe_preprocess"),
            "te_rng_tracker": True,
        }
    ),
)
def qwen3_vl_235b_a22b_pretrain_256gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        qwen3_vl_235b_a22b_pretrain_64gpu_gb200_bf16_config(),
        "256xH100",
        "bf16",
        dispatcher="alltoall",
        tp=2,
        vp=4,
        ep=32,
        micro_batch_size=1,
        stage_layers=(3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1),
    )


@recipe(
    family="qwen_vl",
    published=Published(
        start={
            "ep_overlap": True,
            "recompute": "none",
            "stage_layers": (),
            "cuda_graphs": "transformer_engine",
            "cuda_graph_scope": ("moe_router", "moe_preprocess"),
            "te_rng_tracker": True,
        }
    ),
)
def qwen3_vl_235b_a22b_pretrain_256gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_235b_a22b_pretrain_256gpu_h100_bf16_config(), "256xH100", "fp8cs")


@recipe(family="qwen_vl", published=Published(start={"vp": 12, "recompute": "none", "recompute_modules": ()}))
def qwen3_vl_30b_a3b_pretrain_16gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        qwen3_vl_30b_a3b_pretrain_8gpu_b200_bf16_config(),
        "16xH100",
        "bf16",
        pp=2,
        vp=8,
        ep_overlap=True,
        recompute="selective",
        recompute_modules=("moe",),
    )


@recipe(family="qwen_vl", published=Published(start={"recompute": "none", "vp": 12}))
def qwen3_vl_30b_a3b_pretrain_16gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(qwen3_vl_30b_a3b_pretrain_16gpu_h100_bf16_config(), "16xH100", "fp8cs", recompute_modules=())

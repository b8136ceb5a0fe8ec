"""Benchmarks of Qwen3 235B-A22B: upper bounds of throughput, never production settings."""

from __future__ import annotations

from meshwright.recipes.build import benchmark
from meshwright.recipes.library.qwen_moe import qwen3_235b_a22b_pretrain_config
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_235b_a22b_pretrain_128gpu_b200_fp8mx_deepep_dev_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_config(),
        "128xB200",
        "fp8mx",
        tp=2,
        pp=4,
        vp=2,
        ep=16,
        micro_batch_size=3,
        global_batch_size=3072,
        dispatcher="deepep",
        grads="fp32",
        embedding_as_layer=True,
        head_as_layer=True,
        ep_overlap=True,
        moments="bf16",
        recompute="selective",
        recompute_modules=("moe",),
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_config(),
        "256xB200",
        "bf16",
        pp=8,
        vp=4,
        ep=8,
        global_batch_size=8192,
        embedding_as_layer=True,
        head_as_layer=True,
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config(), "256xB200", "fp8cs", vp=1)


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_235b_a22b_pretrain_256gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config(),
        "256xB200",
        "fp8mx",
        vp=3,
        recompute="selective",
        recompute_modules=("moe_act",),
        dispatcher="hybridep",
        ep_overlap=True,
        cuda_graphs="full_iteration",
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_235b_a22b_pretrain_256gpu_b200_fp8mx_large_scale_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_b200_fp8mx_config(), "256xB200", "fp8mx", global_batch_size=512)


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_b200_fp8cs_config(), "256xB200", "nvfp4")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_64gpu_b200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config(),
        "64xB200",
        "bf16",
        global_batch_size=2048,
        recompute="selective",
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_64gpu_b200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_b200_fp8cs_config(), "64xB200", "fp8cs", global_batch_size=2048)


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_64gpu_b200_fp8mx_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_64gpu_b200_fp8cs_config(), "64xB200", "fp8mx")


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_64gpu_b200_nvfp4_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_64gpu_b200_fp8cs_config(), "64xB200", "nvfp4")


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_128gpu_b300_fp8mx_hybridep_dev_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_config(),
        "128xB300",
        "fp8mx",
        tp=2,
        ep=16,
        micro_batch_size=3,
        global_batch_size=9216,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router"),
        dispatcher="hybridep",
        grads="fp32",
        ep_overlap=True,
        moments="bf16",
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b200_fp8cs_config(),
        "256xB300",
        "bf16",
        dispatcher="hybridep",
        micro_batch_size=2,
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config(), "256xB300", "fp8cs")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_235b_a22b_pretrain_256gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b200_fp8mx_config(),
        "256xB300",
        "fp8mx",
        micro_batch_size=2,
        recompute="selective",
        recompute_modules=("moe",),
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_256gpu_b300_fp8mx_large_scale_config() -> Recipe:
    base = qwen3_235b_a22b_pretrain_256gpu_b300_fp8mx_config()
    return benchmark(base, "256xB300", "fp8mx", global_batch_size=512, recompute_modules=())


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config(), "256xB300", "nvfp4")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_64gpu_b300_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config(),
        "64xB300",
        "bf16",
        global_batch_size=2048,
        recompute="selective",
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_64gpu_b300_fp8cs_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config(),
        "64xB300",
        "fp8cs",
        global_batch_size=2048,
        recompute="selective",
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_64gpu_b300_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config(),
        "64xB300",
        "fp8mx",
        global_batch_size=2048,
        recompute="selective",
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_64gpu_b300_nvfp4_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b300_bf16_config(),
        "64xB300",
        "nvfp4",
        global_batch_size=2048,
        recompute="selective",
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_128gpu_gb200_fp8mx_paged_stash_dev_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_128gpu_b300_fp8mx_hybridep_dev_config(),
        "128xGB200",
        "fp8mx",
        tp=1,
        ep=64,
        micro_batch_size=1,
        global_batch_size=8192,
        cuda_graphs="local",
        cuda_graph_scope=("full_iteration",),
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_128gpu_gb200_fp8mx_partial_cg_dev_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_128gpu_gb200_fp8mx_paged_stash_dev_config(),
        "128xGB200",
        "fp8mx",
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b200_fp8cs_config(),
        "256xGB200",
        "bf16",
        dispatcher="hybridep",
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "256xGB200", "fp8cs", ep=32)


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb200_fp8mx_config() -> Recipe:
    base = qwen3_235b_a22b_pretrain_256gpu_b200_fp8mx_config()
    return benchmark(base, "256xGB200", "fp8mx", ep=32, recompute="none", recompute_modules=())


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb200_fp8mx_large_scale_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_gb200_fp8mx_config(), "256xGB200", "fp8mx", global_batch_size=512)


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "256xGB200", "nvfp4", ep=32)


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_64gpu_gb200_bf16_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "64xGB200", "bf16", global_batch_size=2048)


@recipe(
    family="qwen_moe",
    published=Published(start={"ep": 32, "stage_layers": (), "embedding_as_layer": True, "head_as_layer": True}),
)
def qwen3_235b_a22b_pretrain_64gpu_gb200_fp8cs_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(),
        "64xGB200",
        "fp8cs",
        global_batch_size=2048,
        stage_layers=(11, 12, 12, 12, 12, 12, 12, 11),
        embedding_as_layer=False,
        head_as_layer=False,
    )


@recipe(
    family="qwen_moe",
    published=Published(
        start={
            "vp": 3,
            "ep": 32,
            "pp_schedule": "interleaved_1f1b",
            "stage_layers": (),
            "embedding_as_layer": True,
            "head_as_layer": True,
        }
    ),
)
def qwen3_235b_a22b_pretrain_64gpu_gb200_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_64gpu_gb200_fp8cs_config(),
        "64xGB200",
        "fp8mx",
        ep_overlap=True,
        cuda_graphs="full_iteration",
        cuda_graph_scope=(),
    )


@recipe(
    family="qwen_moe",
    published=Published(start={"ep": 32, "stage_layers": (), "embedding_as_layer": True, "head_as_layer": True}),
)
def qwen3_235b_a22b_pretrain_64gpu_gb200_nvfp4_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_64gpu_gb200_fp8cs_config(), "64xGB200", "nvfp4")


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_128gpu_gb300_fp8mx_paged_stash_dev_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_128gpu_gb200_fp8mx_paged_stash_dev_config(), "128xGB300", "fp8mx")


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb300_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "256xGB300", "bf16", pp=4, ep=32, micro_batch_size=2
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "256xGB300", "fp8cs", pp=4, ep=32, micro_batch_size=2
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none", "recompute_modules": ()}))
def qwen3_235b_a22b_pretrain_256gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_fp8mx_config(),
        "256xGB300",
        "fp8mx",
        pp=4,
        vp=12,
        micro_batch_size=2,
        recompute="selective",
        recompute_modules=("moe_act",),
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb300_fp8mx_large_scale_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_fp8mx_config(),
        "256xGB300",
        "fp8mx",
        global_batch_size=512,
        pp=4,
        vp=12,
        micro_batch_size=2,
    )


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "256xGB300", "nvfp4", pp=4, ep=32, micro_batch_size=2
    )


@recipe(
    family="qwen_moe",
    published=Published(start={"pp": 4, "recompute": "none", "embedding_as_layer": True, "head_as_layer": True}),
)
def qwen3_235b_a22b_pretrain_64gpu_gb300_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_64gpu_gb200_fp8cs_config(),
        "64xGB300",
        "bf16",
        pp=2,
        ep=32,
        micro_batch_size=2,
        recompute="selective",
        stage_layers=(),
    )


@recipe(
    family="qwen_moe",
    published=Published(start={"pp": 4, "recompute": "none", "embedding_as_layer": True, "head_as_layer": True}),
)
def qwen3_235b_a22b_pretrain_64gpu_gb300_fp8cs_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_64gpu_gb200_fp8cs_config(),
        "64xGB300",
        "fp8cs",
        pp=2,
        ep=32,
        micro_batch_size=2,
        recompute="selective",
        stage_layers=(),
    )


@recipe(
    family="qwen_moe",
    published=Published(
        start={
            "pp": 4,
            "vp": 12,
            "recompute": "none",
            "pp_schedule": "interleaved_1f1b",
            "embedding_as_layer": True,
            "head_as_layer": True,
        }
    ),
)
def qwen3_235b_a22b_pretrain_64gpu_gb300_fp8mx_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b300_fp8mx_config(),
        "64xGB300",
        "fp8mx",
        global_batch_size=2048,
        pp=2,
        vp=1,
        ep=32,
        embedding_as_layer=False,
        head_as_layer=False,
        recompute_modules=(),
    )


@recipe(
    family="qwen_moe",
    published=Published(start={"pp": 4, "recompute": "none", "embedding_as_layer": True, "head_as_layer": True}),
)
def qwen3_235b_a22b_pretrain_64gpu_gb300_nvfp4_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_64gpu_gb300_fp8mx_config(),
        "64xGB300",
        "nvfp4",
        ep_overlap=False,
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("attn", "moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_b200_bf16_config(),
        "256xH100",
        "bf16",
        tp=2,
        ep=32,
        ep_overlap=True,
        recompute="selective",
    )


@recipe(family="qwen_moe", published=Published(start={"vp": 3, "pp_schedule": "interleaved_1f1b"}))
def qwen3_235b_a22b_pretrain_256gpu_h100_bf16_hybridep_dev_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config(),
        "256xH100",
        "bf16",
        global_batch_size=2048,
        dispatcher="hybridep",
        vp=1,
        recompute_modules=("moe_act", "layernorm"),
        cuda_graphs="transformer_engine",
        cuda_graph_scope=("moe_router", "moe_preprocess"),
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_256gpu_h100_fp8cs_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config(), "256xH100", "fp8cs")


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_256gpu_h100_fp8cs_large_scale_config() -> Recipe:
    return benchmark(qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config(), "256xH100", "fp8cs", global_batch_size=512)


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_vr200_bf16_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "256xVR200", "bf16", pp=4, ep=32, micro_batch_size=2
    )


@recipe(family="qwen_moe", published=Published(start={"recompute": "none"}))
def qwen3_235b_a22b_pretrain_256gpu_vr200_fp8mx_config() -> Recipe:
    base = qwen3_235b_a22b_pretrain_256gpu_b300_fp8mx_config()
    return benchmark(base, "256xVR200", "fp8mx", pp=4, vp=12, ep=32, recompute_modules=())


@recipe(family="qwen_moe")
def qwen3_235b_a22b_pretrain_256gpu_vr200_nvfp4_config() -> Recipe:
    return benchmark(
        qwen3_235b_a22b_pretrain_256gpu_gb200_bf16_config(), "256xVR200", "nvfp4", pp=4, ep=32, micro_batch_size=2
    )

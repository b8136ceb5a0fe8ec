"""Number formats, recompute, offload, graphs and experts as Megatron-LM combines them."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_lm.accessors import is_open, number_of, on, text_of
from meshwright.frameworks.megatron_lm.arguments import spell

OFFLOAD_V1 = "NVTE_CPU_OFFLOAD_V1"


def two_formats(ctx: RuleContext) -> Iterator[Problem]:
    for one, other in (("bf16", "fp16"), ("fp8_format", "fp4_format")):
        if ctx.is_set(one) and ctx.is_set(other) and "None" not in (text_of(ctx, one), text_of(ctx, other)):
            yield Problem(
                f"{spell(one, True)} and {spell(other, True)} exclude each other", (spell(other, None),), key=other
            )


def fp8_head(ctx: RuleContext) -> Problem | None:
    if not on(ctx, "fp8_output_proj") or text_of(ctx, "fp8_recipe") == "mxfp8":
        return None
    return Problem("--fp8-output-proj needs --fp8-recipe mxfp8", ("--fp8-recipe mxfp8",))


def recipe_unread(ctx: RuleContext) -> Problem | None:
    if not ctx.is_set("fp8_recipe") or ctx.is_set("fp8_format") or ctx.is_set("fp4_format") or is_open(ctx):
        return None
    return Problem("--fp8-recipe does nothing without --fp8-format: matrices stay in bf16", ("--fp8-format hybrid",))


def recompute(ctx: RuleContext) -> Iterator[Problem]:
    kind = text_of(ctx, "recompute_granularity") or ("selective" if on(ctx, "recompute_activations") else "")
    method, layers = text_of(ctx, "recompute_method"), text_of(ctx, "recompute_num_layers")
    if ctx.is_set("recompute_granularity") and not kind:
        return
    if (
        kind == "full"
        and not (ctx.is_set("recompute_method") and ctx.is_set("recompute_num_layers"))
        and not is_open(ctx)
    ):
        fix = ("--recompute-method uniform", "--recompute-num-layers 1")
        yield Problem("full recompute needs a method and a number of layers", fix, key="recompute_granularity")
    elif kind == "selective" and (method or layers):
        keys = [key for key in ("recompute_method", "recompute_num_layers") if ctx.is_set(key)]
        yield Problem(
            "selective recompute takes modules, no method and no number",
            tuple(spell(k, None) for k in keys),
            key=keys[0],
        )


def one_layer(ctx: RuleContext) -> Problem | None:
    full = text_of(ctx, "recompute_granularity") == "full"
    if not full or text_of(ctx, "recompute_method") != "block" or number_of(ctx, "recompute_num_layers") != 1:
        return None
    return Problem(
        "--recompute-method block with 1 layer recomputes one layer of each stage; every layer is uniform with 1",
        ("--recompute-method uniform",),
        key="recompute_method",
    )


def recompute_unread(ctx: RuleContext) -> Problem | None:
    said = next((key for key in ("recompute_method", "recompute_num_layers") if ctx.is_set(key)), "")
    if not said or ctx.is_set("recompute_granularity") or ctx.is_set("recompute_activations") or is_open(ctx):
        return None
    return Problem(
        f"{spell(said, True)} does nothing without --recompute-granularity", ("--recompute-granularity full",), key=said
    )


def distributed_saves(ctx: RuleContext) -> Problem | None:
    if not on(ctx, "distribute_saved_activations") or not on(ctx, "sequence_parallel"):
        return None
    fix = ("without --distribute-saved-activations",)
    return Problem("--distribute-saved-activations does not go with --sequence-parallel", fix)


def offload_layers(ctx: RuleContext) -> Iterator[Problem]:
    key = "cpu_offloading_num_layers"
    if not number_of(ctx, key):
        return
    if number_of(ctx, "pipeline_model_parallel_size") > 1:
        yield Problem("offloading layers does not go with a pipeline", (spell(key, None),), key=key)
    if ctx.is_set("recompute_granularity") or ctx.is_set("recompute_activations"):
        yield Problem("offloading layers does not go with recompute", (spell(key, None),), key=key)
    if text_of(ctx, "cuda_graph_impl") in ("local", "transformer_engine"):
        yield Problem("offloading layers goes with CUDA graphs of whole iterations only", (spell(key, None),), key=key)


def offload_environment(ctx: RuleContext) -> Problem | None:
    """Transformer Engine since 2.10 would offload weights with the activations unless it is told not to."""
    said = ctx.parsed.env.get(OFFLOAD_V1)
    elsewhere = ctx.parsed.gpu_request.source is None or any(one.unresolved for one in ctx.parsed.env.values())
    if not on(ctx, "fine_grained_activation_offloading") or elsewhere or (said is not None and said.value == "1"):
        return None
    return Problem(
        f"{OFFLOAD_V1} must be 1 where activations are offloaded",
        (f"export {OFFLOAD_V1}=1",),
        key=OFFLOAD_V1 if said is not None else "fine_grained_activation_offloading",
    )


OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
OF_EXPERTS = ("expert_fc1", "moe_act")


def offload_of_what(ctx: RuleContext) -> Problem | None:
    if not on(ctx, "fine_grained_activation_offloading") or ctx.is_set("offload_modules") or is_open(ctx):
        return None
    return Problem(
        "--fine-grained-activation-offloading does not say of which modules",
        (spell("offload_modules", OFFLOADED),),
        key="fine_grained_activation_offloading",
    )


def registered_graphs(ctx: RuleContext) -> Problem | None:
    env = ctx.parsed.env
    config = next((env[name] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in env), None)
    registered = env.get("NCCL_GRAPH_REGISTER")
    if text_of(ctx, "cuda_graph_impl") != "transformer_engine" or config is None or config.unresolved:
        return None
    if "expandable_segments:true" not in str(config.value).lower() or (registered and str(registered.value) == "0"):
        return None
    fix = ("export NCCL_GRAPH_REGISTER=0",)
    return Problem("CUDA graphs with expandable segments need NCCL_GRAPH_REGISTER=0", fix, key="cuda_graph_impl")


def te_loss(ctx: RuleContext) -> Problem | None:
    if not on(ctx, "cross_entropy_loss_fusion") or text_of(ctx, "cross_entropy_fusion_impl") != "te":
        return None
    fix = ("--cross-entropy-fusion-impl native",)
    return Problem("Transformer Engine's fused loss is refused", fix, key="cross_entropy_fusion_impl")


def width_without_experts(ctx: RuleContext) -> Problem | None:
    if not ctx.is_set("moe_ffn_hidden_size") or ctx.is_set("num_experts") or is_open(ctx):
        return None
    return Problem("--moe-ffn-hidden-size is given and --num-experts is not", ("--num-experts N",))


def top_one(ctx: RuleContext) -> Problem | None:
    one = ctx.is_set("moe_router_topk") and number_of(ctx, "moe_router_topk") == 1
    softmax = text_of(ctx, "moe_router_score_function") in ("", "softmax")
    if not one or not softmax or ctx.is_set("moe_router_pre_softmax") or is_open(ctx):
        return None
    fix = ("--moe-router-pre-softmax",)
    return Problem("top-1 routing needs the softmax before the choice", fix, key="moe_router_topk")


def bias_needs_sigmoid(ctx: RuleContext) -> Problem | None:
    scored = ctx.is_set("moe_router_score_function") and text_of(ctx, "moe_router_score_function") != "softmax"
    if not on(ctx, "moe_router_enable_expert_bias") or scored or is_open(ctx):
        return None
    return Problem("a balancing bias needs scores by sigmoid", ("--moe-router-score-function sigmoid",))


def async_format(ctx: RuleContext) -> Problem | None:
    if not on(ctx, "async_save") or text_of(ctx, "ckpt_format") not in ("torch", "torch_dcp", "zarr"):
        return None
    return Problem("--async-save needs --ckpt-format torch_dist", ("--ckpt-format torch_dist",), key="async_save")


def async_without_worker(ctx: RuleContext) -> Problem | None:
    plain = text_of(ctx, "ckpt_format") in ("torch", "torch_dcp", "zarr")
    if not on(ctx, "async_save") or plain or ctx.is_set("use_persistent_ckpt_worker") or is_open(ctx):
        return None
    fix = ("--use-persistent-ckpt-worker",)
    return Problem("--async-save is switched off without --use-persistent-ckpt-worker", fix, key="async_save")

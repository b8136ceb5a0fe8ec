"""Rules for precision, recompute, offload, CUDA graphs, MoE and checkpoint flags."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_lm.accessors import get_int, get_text, has_unread_args, is_on
from meshwright.frameworks.megatron_lm.arguments import format_flag
from meshwright.frameworks.megatron_lm.layouts import BLACKWELL

OFFLOAD_V1 = "NVTE_CPU_OFFLOAD_V1"


def exclusive_formats(ctx: RuleContext) -> Iterator[Problem]:
    for one, other in (("bf16", "fp16"), ("fp8_format", "fp4_format")):
        if ctx.is_set(one) and ctx.is_set(other) and "None" not in (get_text(ctx, one), get_text(ctx, other)):
            yield Problem(
                f"{format_flag(one, True)} and {format_flag(other, True)} are exclusive",
                (format_flag(other, None),),
                key=other,
            )


def fp8_output_proj(ctx: RuleContext) -> Problem | None:
    if not is_on(ctx, "fp8_output_proj") or get_text(ctx, "fp8_recipe") == "mxfp8":
        return None
    scales = ctx.cluster is not None and ctx.cluster.gpu.capability >= BLACKWELL  # MXFP8 needs its block scaling
    fix = "--fp8-recipe mxfp8" if scales or ctx.cluster is None else "without --fp8-output-proj"
    return Problem("--fp8-output-proj needs --fp8-recipe mxfp8", (fix,))


def fp8_recipe_ignored(ctx: RuleContext) -> Problem | None:
    if not ctx.is_set("fp8_recipe") or ctx.is_set("fp8_format") or ctx.is_set("fp4_format") or has_unread_args(ctx):
        return None
    return Problem("--fp8-recipe has no effect without --fp8-format: GEMMs run in bf16", ("--fp8-format hybrid",))


def recompute(ctx: RuleContext) -> Iterator[Problem]:
    granularity = get_text(ctx, "recompute_granularity")
    method, layers = get_text(ctx, "recompute_method"), get_text(ctx, "recompute_num_layers")
    if is_on(ctx, "recompute_activations"):
        if granularity == "full":
            yield Problem(
                "--recompute-activations means --recompute-granularity selective, and replaces full",
                ("without --recompute-activations",),
                key="recompute_activations",
            )
            return
        granularity = "selective"
    if ctx.is_set("recompute_granularity") and not granularity:
        return
    if (
        granularity == "full"
        and not (ctx.is_set("recompute_method") and ctx.is_set("recompute_num_layers"))
        and not has_unread_args(ctx)
    ):
        fix = ("--recompute-method uniform", "--recompute-num-layers 1")
        yield Problem(
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
            fix,
            key="recompute_granularity",
        )
    elif granularity == "selective" and (method or layers):
        keys = [key for key in ("recompute_method", "recompute_num_layers") if ctx.is_set(key)]
        yield Problem(
            "--recompute-granularity selective takes --recompute-modules, not a method or number of layers",
            tuple(format_flag(k, None) for k in keys),
            key=keys[0],
        )


def one_layer(ctx: RuleContext) -> Problem | None:
    full = get_text(ctx, "recompute_granularity") == "full"
    if not full or get_text(ctx, "recompute_method") != "block" or get_int(ctx, "recompute_num_layers") != 1:
        return None
    return Problem(
        "--recompute-method block with 1 layer recomputes only one layer per stage; use uniform to recompute all",
        ("--recompute-method uniform",),
        key="recompute_method",
    )


def recompute_ignored(ctx: RuleContext) -> Problem | None:
    setting = next((key for key in ("recompute_method", "recompute_num_layers") if ctx.is_set(key)), "")
    if (
        not setting
        or ctx.is_set("recompute_granularity")
        or ctx.is_set("recompute_activations")
        or has_unread_args(ctx)
    ):
        return None
    return Problem(
        f"{format_flag(setting, True)} has no effect without --recompute-granularity",
        ("--recompute-granularity full",),
        key=setting,
    )


def distributed_saves(ctx: RuleContext) -> Problem | None:
    if not is_on(ctx, "distribute_saved_activations") or not is_on(ctx, "sequence_parallel"):
        return None
    fix = ("without --distribute-saved-activations",)
    return Problem("--distribute-saved-activations cannot be combined with --sequence-parallel", fix)


def offload_layers(ctx: RuleContext) -> Iterator[Problem]:
    key = "cpu_offloading_num_layers"
    if not get_int(ctx, key):
        return
    if get_int(ctx, "pipeline_model_parallel_size") > 1:
        yield Problem(
            "--cpu-offloading-num-layers does not support pipeline parallelism", (format_flag(key, None),), key=key
        )
    if ctx.is_set("recompute_granularity") or ctx.is_set("recompute_activations"):
        yield Problem(
            "--cpu-offloading-num-layers cannot be combined with recompute", (format_flag(key, None),), key=key
        )
    if get_text(ctx, "cuda_graph_impl") in ("local", "transformer_engine"):
        yield Problem(
            "--cpu-offloading-num-layers supports only full-iteration CUDA graphs", (format_flag(key, None),), key=key
        )


def offload_environment(ctx: RuleContext) -> Problem | None:
    """Transformer Engine 2.10 and later offloads weights too unless NVTE_CPU_OFFLOAD_V1 is 1."""
    setting = ctx.parsed.env.get(OFFLOAD_V1)
    unknown_env = ctx.parsed.gpu_request.source is None or any(one.unresolved for one in ctx.parsed.env.values())
    if (
        not is_on(ctx, "fine_grained_activation_offloading")
        or unknown_env
        or (setting is not None and setting.value == "1")
    ):
        return None
    return Problem(
        f"--fine-grained-activation-offloading needs {OFFLOAD_V1}=1",
        (f"export {OFFLOAD_V1}=1",),
        key=OFFLOAD_V1 if setting is not None else "fine_grained_activation_offloading",
    )


OFFLOADED_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
OFFLOADED_EXPERT_MODULES = ("expert_fc1", "moe_act")


def offload_without_modules(ctx: RuleContext) -> Problem | None:
    if not is_on(ctx, "fine_grained_activation_offloading") or ctx.is_set("offload_modules") or has_unread_args(ctx):
        return None
    return Problem(
        "--fine-grained-activation-offloading needs --offload-modules",
        (format_flag("offload_modules", OFFLOADED_MODULES),),
        key="fine_grained_activation_offloading",
    )


def registered_graphs(ctx: RuleContext) -> Problem | None:
    env = ctx.parsed.env
    config = next((env[name] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in env), None)
    registered = env.get("NCCL_GRAPH_REGISTER")
    if get_text(ctx, "cuda_graph_impl") != "transformer_engine" or config is None or config.unresolved:
        return None
    if "expandable_segments:true" not in str(config.value).lower() or (registered and str(registered.value) == "0"):
        return None
    fix = ("export NCCL_GRAPH_REGISTER=0",)
    return Problem("CUDA graphs with expandable segments need NCCL_GRAPH_REGISTER=0", fix, key="cuda_graph_impl")


def graphs_of_unpadded_experts(ctx: RuleContext) -> Problem | None:
    scope = ctx.get("cuda_graph_modules") or ctx.get("cuda_graph_scope") or ["full"]
    if get_text(ctx, "cuda_graph_impl") not in ("local", "transformer_engine") or not {"full", "moe"} & set(scope):
        return None
    pad = "moe_pad_expert_input_to_capacity"
    if not ctx.is_set("moe_expert_capacity_factor") or is_on(ctx, pad) or has_unread_args(ctx):
        return None
    key = "moe_expert_capacity_factor"
    return Problem("CUDA graphs of experts need --moe-pad-expert-input-to-capacity", (format_flag(pad, True),), key=key)


def te_loss(ctx: RuleContext) -> Problem | None:
    if not is_on(ctx, "cross_entropy_loss_fusion") or get_text(ctx, "cross_entropy_fusion_impl") != "te":
        return None
    fix = ("--cross-entropy-fusion-impl native",)
    return Problem("--cross-entropy-fusion-impl te is rejected", fix, key="cross_entropy_fusion_impl")


def width_without_experts(ctx: RuleContext) -> Problem | None:
    if not ctx.is_set("moe_ffn_hidden_size") or ctx.is_set("num_experts") or has_unread_args(ctx):
        return None
    return Problem("--moe-ffn-hidden-size needs --num-experts", ("--num-experts N",))


MANY_EXPERTS = 16  # models with fewer have experts as wide as a dense block (Mixtral: 8)


def experts_as_wide_as_dense(ctx: RuleContext) -> Problem | None:
    """Find many experts whose width falls back to that of a dense block: they are usually narrow."""
    unset = not ctx.is_set("moe_ffn_hidden_size") and ctx.is_set("num_experts") and ctx.is_set("ffn_hidden_size")
    experts, width = get_int(ctx, "num_experts"), get_int(ctx, "ffn_hidden_size")
    if not unset or experts < MANY_EXPERTS or has_unread_args(ctx):
        return None
    model = None if ctx.case is None else ctx.case.model
    shown = f"--moe-ffn-hidden-size is not set: each of the {experts} experts is {width:,} wide, as --ffn-hidden-size"
    if model is not None and model.moe is not None and model.moe.width == width:
        total = model.params.total
        shown += f", and the model has {total / 1e9:.0f} B parameters, {model.params.active / 1e9:.0f} B active"
    known = model is not None and model.moe is not None and model.moe.width != width
    wanted = str(model.moe.width) if known and model is not None and model.moe is not None else "N"
    return Problem(shown, (f"--moe-ffn-hidden-size {wanted}",), key="ffn_hidden_size")


def top_one(ctx: RuleContext) -> Problem | None:
    one = ctx.is_set("moe_router_topk") and get_int(ctx, "moe_router_topk") == 1
    softmax = get_text(ctx, "moe_router_score_function") in ("", "softmax")
    sinkhorn = get_text(ctx, "moe_router_load_balancing_type") in ("sinkhorn", "['sinkhorn']")  # scores are sigmoids
    if not one or not softmax or sinkhorn or ctx.is_set("moe_router_pre_softmax") or has_unread_args(ctx):
        return None
    fix = ("--moe-router-pre-softmax",)
    return Problem("--moe-router-topk 1 needs --moe-router-pre-softmax", fix, key="moe_router_topk")


def bias_needs_sigmoid(ctx: RuleContext) -> Problem | None:
    scored = ctx.is_set("moe_router_score_function") and get_text(ctx, "moe_router_score_function") != "softmax"
    if not is_on(ctx, "moe_router_enable_expert_bias") or scored or has_unread_args(ctx):
        return None
    return Problem(
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
        ("--moe-router-score-function sigmoid",),
    )


def groups_without_bias(ctx: RuleContext) -> Problem | None:
    grouped = ctx.is_set("moe_router_num_groups") and get_int(ctx, "moe_router_num_groups") > 1
    sigmoid = get_text(ctx, "moe_router_score_function") == "sigmoid"
    balanced = is_on(ctx, "moe_router_enable_expert_bias") or is_on(ctx, "moe_router_force_load_balancing")
    if not grouped or not sigmoid or balanced or ctx.recipe.goal != "pretrain" or has_unread_args(ctx):
        return None
    return Problem(
        "sigmoid scores in groups are the router of DeepSeek-V3, which an expert bias balances, and the bias is off",
        ("--moe-router-enable-expert-bias",),
        key="moe_router_score_function",
    )


def async_format(ctx: RuleContext) -> Problem | None:
    if not is_on(ctx, "async_save") or get_text(ctx, "ckpt_format") not in ("torch", "torch_dcp", "zarr"):
        return None
    return Problem("--async-save needs --ckpt-format torch_dist", ("--ckpt-format torch_dist",), key="async_save")


def async_without_worker(ctx: RuleContext) -> Problem | None:
    plain = get_text(ctx, "ckpt_format") in ("torch", "torch_dcp", "zarr")
    if not is_on(ctx, "async_save") or plain or ctx.is_set("use_persistent_ckpt_worker") or has_unread_args(ctx):
        return None
    fix = ("--use-persistent-ckpt-worker",)
    return Problem("--async-save is disabled without --use-persistent-ckpt-worker", fix, key="async_save")

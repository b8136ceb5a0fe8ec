"""How Megatron-LM lets a training be cut over the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_lm.accessors import is_open, number_of, on, text_of
from meshwright.frameworks.megatron_lm.arguments import spell
from meshwright.frameworks.megatron_lm.parse import per_rank

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10.0  # compute capability


VIRTUAL = (
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout",
)  # fmt: skip
FIRST_LAST = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def two_interleavings(ctx: RuleContext) -> Problem | None:
    said = [key for key in VIRTUAL if ctx.is_set(key) and text_of(ctx, key) != "None"]
    if len(said) < 2:
        return None
    names = " and ".join(spell(key, True) for key in said)
    return Problem(f"{names} all say the virtual stages: give one", (spell(said[0], None),), key=said[0])


def virtual_layers(ctx: RuleContext) -> Iterator[Problem]:
    """Layers per virtual stage must come out even, on stages that are even themselves."""
    key = VIRTUAL[0]
    chunk, layers, pp = (
        number_of(ctx, key),
        number_of(ctx, "num_layers"),
        number_of(ctx, "pipeline_model_parallel_size"),
    )
    if not chunk or not layers or pp < 2:
        return
    if any(map(ctx.is_set, FIRST_LAST)):
        fix = spell(VIRTUAL[1], "N")
        yield Problem(f"{spell(key, chunk)} does not go with stages of their own number of layers", (fix,), key=key)
        return
    held = per_rank(ctx.parsed.settings, layers, pp)
    if held % chunk:
        fits = [size for size in range(chunk, 0, -1) if held % size == 0]
        yield Problem(
            f"{held} layers per stage are not divisible by {spell(key, chunk)}", (spell(key, fits[0]),), key=key
        )


def needs_stages(ctx: RuleContext) -> Problem | None:
    said = next((key for key in VIRTUAL[:2] if ctx.is_set(key) and text_of(ctx, key) != "None"), "")
    pp = number_of(ctx, "pipeline_model_parallel_size")
    if not said or not pp:
        return None
    least = 3 if on(ctx, "no_overlap_p2p_communication") else 2
    if pp >= least:
        return None
    return Problem(
        f"virtual stages need a pipeline of at least {least}"
        + (" while --no-overlap-p2p-communication is given" if least == 3 else ""),
        (spell(said, None),),
        key=said,
    )


def ends_without_stages(ctx: RuleContext) -> Problem | None:
    """The layers of the first or last stage leave the rest to others, of which there must be some."""
    said = next((key for key in FIRST_LAST[:2] if number_of(ctx, key)), "")
    if not said or number_of(ctx, "pipeline_model_parallel_size") > 1 or is_open(ctx):
        return None
    if "pipeline_model_parallel_size" in ctx.parsed.settings and not number_of(ctx, "pipeline_model_parallel_size"):
        return None  # only running tells how many there are
    return Problem(f"{spell(said, True)} counts the layers of one stage of several", (spell(said, None),), key=said)


def two_splits(ctx: RuleContext) -> Problem | None:
    uneven = next((key for key in (*FIRST_LAST, VIRTUAL[2]) if ctx.is_set(key)), "")
    counted = [f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss")]
    said = next((key for key in counted if on(ctx, key)), "")
    if not uneven or not said:
        return None
    return Problem(f"{spell(said, True)} does not go with {spell(uneven, True)}", (spell(said, None),), key=said)


def hierarchy(ctx: RuleContext) -> Problem | None:
    said = ctx.parsed.settings.get("hierarchical_context_parallel_sizes")
    kinds = ctx.get("cp_comm_type")
    cp = number_of(ctx, "context_parallel_size")
    if "a2a+p2p" not in (kinds if isinstance(kinds, list) else [kinds]) or not cp:
        return None
    if said is None:
        return Problem(
            "--cp-comm-type a2a+p2p needs the sizes of its levels",
            (spell("hierarchical_context_parallel_sizes", [2, max(1, cp // 2)]),),
            key="cp_comm_type",
        )
    sizes = [int(size) for size in said.value if str(size).isdigit()] if isinstance(said.value, list) else []
    if said.unresolved or prod(sizes) == cp:
        return None
    return Problem(
        f"the sizes multiply to {prod(sizes)}, --context-parallel-size is {cp}",
        (spell("hierarchical_context_parallel_sizes", [sizes[0] if sizes else 2, "N"]),),
        key="hierarchical_context_parallel_sizes",
    )


def overlap_without_sp(ctx: RuleContext) -> Problem | None:
    if not on(ctx, "tp_comm_overlap") or ctx.is_set("sequence_parallel") or is_open(ctx):
        return None
    return Problem("--tp-comm-overlap needs --sequence-parallel", ("--sequence-parallel",), key="tp_comm_overlap")


def fsdp(ctx: RuleContext) -> str:
    return next((key for key in ("use_torch_fsdp2", "use_megatron_fsdp") if on(ctx, key)), "")


def connections(ctx: RuleContext) -> Problem | None:
    """One hardware queue keeps the order of launches that overlap relies on; sharded parameters need several."""
    if ctx.parsed.gpu_request.source is None:
        return None
    said = ctx.parsed.env.get(CONNECTIONS)
    if said is not None and said.unresolved:
        return None
    value = None if said is None else str(said.value)
    if fsdp(ctx):
        if value != "1":
            return None
        return Problem(
            f"{CONNECTIONS}=1 does not go with {spell(fsdp(ctx), True)}", (f"unset {CONNECTIONS}",), key=CONNECTIONS
        )
    cut = max(number_of(ctx, f"{axis}_parallel_size") for axis in ("tensor_model", "context"))
    newer = ctx.cluster is not None and ctx.cluster.gpu.capability >= BLACKWELL
    if value == "1" or cut < 2 or newer or on(ctx, "overlap_moe_expert_parallel_comm"):
        return None
    found = "is not set" if value is None else f"is {value}"
    return Problem(
        f"{CONNECTIONS} {found}: with tensor or context parallelism it must be 1 on Hopper and older GPUs",
        (f"export {CONNECTIONS}=1",),
        key=CONNECTIONS if said is not None else "",
    )


def fsdp2_alone(ctx: RuleContext) -> Iterator[Problem]:
    if not on(ctx, "use_torch_fsdp2"):
        return
    for key in ("use_distributed_optimizer", "use_megatron_fsdp"):
        if on(ctx, key):
            yield Problem(f"--use-torch-fsdp2 does not go with {spell(key, True)}", (spell(key, None),), key=key)
    if not ctx.is_set("no_gradient_accumulation_fusion") and not is_open(ctx):
        fix = "--no-gradient-accumulation-fusion"
        yield Problem("--use-torch-fsdp2 cannot fuse gradient accumulation", (fix,), key="use_torch_fsdp2")


def fsdp_format(ctx: RuleContext) -> Problem | None:
    used = ctx.is_set("save") or ctx.is_set("load")
    if not on(ctx, "use_megatron_fsdp") or not used or text_of(ctx, "ckpt_format") == "fsdp_dtensor" or is_open(ctx):
        return None
    return Problem(
        "Megatron-FSDP saves and loads only --ckpt-format fsdp_dtensor",
        ("--ckpt-format fsdp_dtensor",),
        key="ckpt_format" if ctx.is_set("ckpt_format") else "use_megatron_fsdp",
    )


def fsdp_format_alone(ctx: RuleContext) -> Problem | None:
    if text_of(ctx, "ckpt_format") != "fsdp_dtensor" or on(ctx, "use_megatron_fsdp") or is_open(ctx):
        return None
    return Problem("--ckpt-format fsdp_dtensor is of Megatron-FSDP", ("--ckpt-format torch_dist",), key="ckpt_format")


ADAM = "adam"


def precision_aware(ctx: RuleContext) -> Iterator[Problem]:
    aware = on(ctx, "use_precision_aware_optimizer")
    if aware and text_of(ctx, "optimizer") not in ("", ADAM):
        fix = spell("use_precision_aware_optimizer", None)
        yield Problem("the precision-aware optimizer is Adam", (fix,), key="use_precision_aware_optimizer")
    if aware and not on(ctx, "use_distributed_optimizer") and not fsdp(ctx) and not is_open(ctx):
        fix = "--use-distributed-optimizer"
        yield Problem(
            "the precision-aware optimizer needs the distributed one", (fix,), key="use_precision_aware_optimizer"
        )
    if aware or is_open(ctx):
        return
    for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if text_of(ctx, key) not in ("", "fp32"):
            fix = "--use-precision-aware-optimizer"
            yield Problem(f"{spell(key, text_of(ctx, key))} needs the precision-aware optimizer", (fix,), key=key)


def offload_needs_aware(ctx: RuleContext) -> Problem | None:
    aware = ctx.is_set("use_precision_aware_optimizer")
    if not on(ctx, "optimizer_cpu_offload") or aware or is_open(ctx):
        return None
    return Problem("--optimizer-cpu-offload needs the precision-aware optimizer", ("--use-precision-aware-optimizer",))

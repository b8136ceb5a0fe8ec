"""Rules for parallelism, sharding and communication flags."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_lm.accessors import get_int, get_text, has_unread_args, is_on
from meshwright.frameworks.megatron_lm.arguments import UNDERSCORES, format_flag
from meshwright.frameworks.megatron_lm.parse import layers_per_rank, scheduled_batches

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10.0  # compute capability


VIRTUAL_STAGE_KEYS = (
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout",
)  # fmt: skip
FIRST_LAST_KEYS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def several_interleavings(ctx: RuleContext) -> Problem | None:
    given = [key for key in VIRTUAL_STAGE_KEYS if ctx.is_set(key) and get_text(ctx, key) != "None"]
    if len(given) < 2:
        return None
    names = " and ".join(format_flag(key, True) for key in given)
    return Problem(f"{names} all set the virtual stages: keep one", (format_flag(given[0], None),), key=given[0])


def virtual_layers(ctx: RuleContext) -> Iterator[Problem]:
    """Layers per virtual stage must divide the layers per stage, and all stages must be equal."""
    key = VIRTUAL_STAGE_KEYS[0]
    chunk, layers, pp = (get_int(ctx, key), get_int(ctx, "num_layers"), get_int(ctx, "pipeline_model_parallel_size"))
    if not chunk or not layers or pp < 2:
        return
    if any(map(ctx.is_set, FIRST_LAST_KEYS)):
        fix = format_flag(VIRTUAL_STAGE_KEYS[1], "N")
        yield Problem(f"{format_flag(key, chunk)} cannot be combined with uneven first or last stages", (fix,), key=key)
        return
    per_stage = layers_per_rank(ctx.parsed.settings, layers, pp)
    if per_stage % chunk:
        fits = [size for size in range(chunk, 0, -1) if per_stage % size == 0]
        yield Problem(
            f"{per_stage} layers per stage are not divisible by {format_flag(key, chunk)}",
            (format_flag(key, fits[0]),),
            key=key,
        )


GROUP_SIZE = "microbatch_group_size_per_virtual_pipeline_stage"


def micro_batch_groups(ctx: RuleContext) -> Problem | None:
    """Groups of micro batches must have at least as many as there are stages, the last one too."""
    size, pp = get_int(ctx, GROUP_SIZE), get_int(ctx, "pipeline_model_parallel_size")
    if not size or ctx.case is None or ctx.cluster is None or pp < 2 or int(ctx.case.vp) < 2:
        return None
    count = int(ctx.case.pass_micro_batches)
    fix = (format_flag(GROUP_SIZE, None),) if count % pp == 0 else ()
    if size < pp or size > count:
        message = (
            f"groups of {size} micro batches: between {pp} (the pipeline size) and {count} (all of a step) are possible"
        )
    elif 0 < count % size < pp:
        message = (
            f"{count} micro batches in groups of {size} leave a last group of {count % size}, fewer than {pp} stages"
        )
    else:
        return None
    return Problem(message, fix, key=GROUP_SIZE)


def batch_schedule(ctx: RuleContext) -> Iterator[Problem]:
    """A schedule of batch sizes starts at 0, and each of its batches is shared by all data-parallel ranks."""
    key = "step_batch_size_schedule"
    text = get_text(ctx, key)
    if not text:
        return
    if ctx.is_set("global_batch_size"):
        fix = format_flag("global_batch_size", None)
        yield Problem("--step-batch-size-schedule cannot be combined with --global-batch-size", (fix,), key=key)
    entries = [one.partition(":") for one in text.replace(",", " ").split()]
    sizes = scheduled_batches(ctx.parsed.settings)
    if not sizes or entries[0][0].strip("0"):
        example = format_flag(key, "0:384 200B:768")
        yield Problem(
            f"{format_flag(key, text)}: expected THRESHOLD:BATCH entries that start at 0", (example,), key=key
        )
        return
    if ctx.case is None or ctx.cluster is None:
        return
    part = int(ctx.case.micro_batch_size) * max(1, int(ctx.case.dp))
    wrong = next((size for size in sizes if size % part), None)
    if wrong:
        fixed = " ".join(f"{at}:{max(1, round(int(size) / part)) * part}" for at, _, size in entries)
        message = f"batch {wrong} of --step-batch-size-schedule is not divisible by micro batch × dp = {part}"
        yield Problem(message, (format_flag(key, fixed),), key=key)


def virtual_without_pipeline(ctx: RuleContext) -> Problem | None:
    setting = next((key for key in VIRTUAL_STAGE_KEYS[:2] if ctx.is_set(key) and get_text(ctx, key) != "None"), "")
    pp = get_int(ctx, "pipeline_model_parallel_size")
    if not setting or not pp:
        return None
    minimum = 3 if is_on(ctx, "no_overlap_p2p_communication") else 2
    if pp >= minimum:
        return None
    return Problem(
        f"virtual stages need a pipeline of at least {minimum} stages"
        + (" with --no-overlap-p2p-communication" if minimum == 3 else ""),
        (format_flag(setting, None),),
        key=setting,
    )


def uneven_without_pipeline(ctx: RuleContext) -> Problem | None:
    """Layer counts of the first or last stage need other stages for the remaining layers."""
    setting = next((key for key in FIRST_LAST_KEYS[:2] if get_int(ctx, key)), "")
    if not setting or get_int(ctx, "pipeline_model_parallel_size") > 1 or has_unread_args(ctx):
        return None
    if "pipeline_model_parallel_size" in ctx.parsed.settings and not get_int(ctx, "pipeline_model_parallel_size"):
        return None  # the number of stages is known only at run time
    return Problem(
        f"{format_flag(setting, True)} needs a pipeline of at least 2 stages",
        (format_flag(setting, None),),
        key=setting,
    )


def several_splits(ctx: RuleContext) -> Problem | None:
    uneven = next((key for key in (*FIRST_LAST_KEYS, VIRTUAL_STAGE_KEYS[2]) if ctx.is_set(key)), "")
    counted = [f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss")]
    setting = next((key for key in counted if is_on(ctx, key)), "")
    if not uneven or not setting:
        return None
    return Problem(
        f"{format_flag(setting, True)} cannot be combined with {format_flag(uneven, True)}",
        (format_flag(setting, None),),
        key=setting,
    )


def hierarchy(ctx: RuleContext) -> Problem | None:
    setting = ctx.parsed.settings.get("hierarchical_context_parallel_sizes")
    comm_type = ctx.get("cp_comm_type")
    cp = get_int(ctx, "context_parallel_size")
    if "a2a+p2p" not in (comm_type if isinstance(comm_type, list) else [comm_type]) or not cp:
        return None
    if setting is None:
        return Problem(
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes",
            (format_flag("hierarchical_context_parallel_sizes", [2, max(1, cp // 2)]),),
            key="cp_comm_type",
        )
    sizes = [int(size) for size in setting.value if str(size).isdigit()] if isinstance(setting.value, list) else []
    if setting.unresolved or prod(sizes) == cp:
        return None
    inner = sizes[0] if sizes and sizes[0] and cp % sizes[0] == 0 else 2 if cp % 2 == 0 else 1
    return Problem(
        f"--hierarchical-context-parallel-sizes multiply to {prod(sizes)}, not to --context-parallel-size {cp}",
        (format_flag("hierarchical_context_parallel_sizes", [inner, cp // inner]),),
        key="hierarchical_context_parallel_sizes",
    )


def overlap_without_sp(ctx: RuleContext) -> Problem | None:
    if not is_on(ctx, "tp_comm_overlap") or ctx.is_set("sequence_parallel") or has_unread_args(ctx):
        return None
    return Problem("--tp-comm-overlap needs --sequence-parallel", ("--sequence-parallel",), key="tp_comm_overlap")


def fsdp(ctx: RuleContext) -> str:
    return next((key for key in ("use_torch_fsdp2", "use_megatron_fsdp") if is_on(ctx, key)), "")


def connections(ctx: RuleContext) -> Problem | None:
    """Overlap relies on the launch order that a single hardware queue preserves; FSDP needs several queues."""
    if ctx.parsed.gpu_request.source is None:
        return None
    setting = ctx.parsed.env.get(CONNECTIONS)
    if setting is not None and setting.unresolved:
        return None
    value = None if setting is None else str(setting.value)
    if fsdp(ctx):
        if value != "1":
            return None
        return Problem(
            f"{CONNECTIONS}=1 cannot be combined with {format_flag(fsdp(ctx), True)}",
            (f"unset {CONNECTIONS}",),
            key=CONNECTIONS,
        )
    degree = max(get_int(ctx, f"{axis}_parallel_size") for axis in ("tensor_model", "context"))
    blackwell = ctx.cluster is not None and ctx.cluster.gpu.capability >= BLACKWELL
    if value == "1" or degree < 2 or blackwell or is_on(ctx, "overlap_moe_expert_parallel_comm"):
        return None
    found = "is not set" if value is None else f"is {value}"
    fork = value is None and any(one.field == UNDERSCORES for one in ctx.parsed.findings)  # its default may do
    return Problem(
        f"{CONNECTIONS} {found}, but TP and CP need 1 on Hopper and older GPUs",
        (f"export {CONNECTIONS}=1",),
        key=CONNECTIONS if setting is not None else "",
        severity="warning" if fork or (setting is not None and ctx.cluster is None) else None,  # or one for Blackwell
    )


def fsdp2_conflicts(ctx: RuleContext) -> Iterator[Problem]:
    if not is_on(ctx, "use_torch_fsdp2"):
        return
    for key in ("use_distributed_optimizer", "use_megatron_fsdp"):
        if is_on(ctx, key):
            yield Problem(
                f"--use-torch-fsdp2 cannot be combined with {format_flag(key, True)}",
                (format_flag(key, None),),
                key=key,
            )
    if not ctx.is_set("no_gradient_accumulation_fusion") and not has_unread_args(ctx):
        fix = "--no-gradient-accumulation-fusion"
        yield Problem("--use-torch-fsdp2 does not support gradient accumulation fusion", (fix,), key="use_torch_fsdp2")


def fsdp_format(ctx: RuleContext) -> Problem | None:
    used = ctx.is_set("save") or ctx.is_set("load")
    if (
        not is_on(ctx, "use_megatron_fsdp")
        or not used
        or get_text(ctx, "ckpt_format") == "fsdp_dtensor"
        or has_unread_args(ctx)
    ):
        return None
    return Problem(
        "--use-megatron-fsdp supports only --ckpt-format fsdp_dtensor",
        ("--ckpt-format fsdp_dtensor",),
        key="ckpt_format" if ctx.is_set("ckpt_format") else "use_megatron_fsdp",
    )


def fsdp_format_without_fsdp(ctx: RuleContext) -> Problem | None:
    if get_text(ctx, "ckpt_format") != "fsdp_dtensor" or is_on(ctx, "use_megatron_fsdp") or has_unread_args(ctx):
        return None
    return Problem(
        "--ckpt-format fsdp_dtensor needs --use-megatron-fsdp", ("--ckpt-format torch_dist",), key="ckpt_format"
    )


ADAM = "adam"


def precision_aware(ctx: RuleContext) -> Iterator[Problem]:
    enabled = is_on(ctx, "use_precision_aware_optimizer")
    if enabled and get_text(ctx, "optimizer") not in ("", ADAM):
        fix = format_flag("use_precision_aware_optimizer", None)
        yield Problem("--use-precision-aware-optimizer supports only Adam", (fix,), key="use_precision_aware_optimizer")
    if enabled and not is_on(ctx, "use_distributed_optimizer") and not fsdp(ctx) and not has_unread_args(ctx):
        fix = "--use-distributed-optimizer"
        yield Problem(
            "--use-precision-aware-optimizer needs --use-distributed-optimizer",
            (fix,),
            key="use_precision_aware_optimizer",
        )
    if enabled or has_unread_args(ctx):
        return
    for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if get_text(ctx, key) not in ("", "fp32"):
            fix = "--use-precision-aware-optimizer"
            yield Problem(
                f"{format_flag(key, get_text(ctx, key))} needs --use-precision-aware-optimizer", (fix,), key=key
            )


def offload_needs_precision_aware(ctx: RuleContext) -> Problem | None:
    enabled = ctx.is_set("use_precision_aware_optimizer")
    if not is_on(ctx, "optimizer_cpu_offload") or enabled or has_unread_args(ctx):
        return None
    return Problem(
        "--optimizer-cpu-offload needs --use-precision-aware-optimizer", ("--use-precision-aware-optimizer",)
    )

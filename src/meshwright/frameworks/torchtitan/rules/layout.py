"""Degrees, stages, batches and meshes that torchtitan refuses or runs badly."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.torchtitan.derived_fields import virtual_stages
from meshwright.frameworks.torchtitan.models import PRESETS, plain
from meshwright.frameworks.torchtitan.rules.common import (
    CP,
    EP,
    ETP,
    FLAVOR,
    MODE,
    NAME,
    PP,
    REPLICATE,
    SCHEDULE,
    SHARD,
    TP,
    degree,
    in_tokens,
    rule,
    today,
)
from meshwright.recipes.key_maps.torchtitan import LOCAL_BATCH, MICRO_BATCH, MICRO_BATCH_TOKENS, STEP_TOKENS


def _schedule_without_file(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get(SCHEDULE))
    if not name.lower().strip("_").startswith("pipelineschedule") or degree(ctx, PP) == 1:
        return None
    if ctx.get("parallelism.pipeline_parallel_schedule_csv"):
        return None
    return Problem(f"{name} runs a schedule from a file, and pipeline_parallel_schedule_csv names none")


def _uneven_chunks(ctx: RuleContext) -> Problem | None:
    pp = degree(ctx, PP)
    chunks = virtual_stages(ctx.parsed.settings, ctx.parsed.model)
    if pp == 1 or not chunks or chunks % pp == 0:
        return None
    key = "parallelism.pipeline_parallel_layers_per_stage"
    return Problem(f"{key}={ctx.get(key)} makes {chunks} stage chunks, which {pp} ranks cannot share equally", key=key)


def _ends_too_heavy(ctx: RuleContext) -> Iterator[Problem]:
    """The first and the last stage give up as many layers as their ends weigh, of those they would have."""
    model, pp = ctx.parsed.model, degree(ctx, PP)
    if pp == 1 or model is None or ctx.get("parallelism.module_fqns_per_model_part"):
        return
    keys = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    weights = [ctx.get(key) for key in keys]
    if not all(isinstance(weight, int) for weight in weights):
        return
    each = (model.num_layers + sum(weights)) // (pp * ctx.recipe.layout.vp)
    for key, weight in zip(keys, weights, strict=True):
        if 0 < each < weight:
            message = f"{key}={weight} is more than the {each} layers of a stage chunk"
            yield Problem(message, (ctx.framework.format_setting(key, each),), key=key)


def _microbatch_too_large(ctx: RuleContext) -> Problem | None:
    """More samples in a micro batch than there are in the batch it is cut from."""
    local, micro = ctx.get(LOCAL_BATCH), ctx.get(MICRO_BATCH)
    if in_tokens(ctx) or degree(ctx, PP) == 1 or not (isinstance(local, int) and isinstance(micro, int)):
        return None
    stages = degree(ctx, PP) * ctx.recipe.layout.vp
    if micro <= 0 or local % micro or local // micro >= stages:
        return None
    return Problem(
        f"{LOCAL_BATCH}={local} in micro batches of {micro} fills {local // micro} of {stages} stage chunks",
        (ctx.framework.format_setting(LOCAL_BATCH, stages * micro),),
        key=LOCAL_BATCH if ctx.is_set(LOCAL_BATCH) else PP,
    )


def _batch_not_divided(ctx: RuleContext) -> Problem | None:
    """With a pipeline, a step is made of whole local batches, not just of micro batches."""
    batch, local = ctx.get("training.global_batch_size"), ctx.get(LOCAL_BATCH)
    ranks = _ranks(ctx)
    if in_tokens(ctx) or degree(ctx, PP) == 1 or not (isinstance(batch, int) and isinstance(local, int)) or not ranks:
        return None
    micro = ctx.recipe.layout.micro_batch_size
    if local <= 0 or batch % (local * ranks) == 0 or batch % (micro * ranks):
        return None  # right, or told by the rule of micro batches
    return Problem(
        f"training.global_batch_size={batch} is not a multiple of {local * ranks}: {LOCAL_BATCH} × {ranks} data ranks",
        (
            ctx.framework.format_setting(
                "training.global_batch_size", max(1, round(batch / (local * ranks))) * local * ranks
            ),
        ),
    )


def _ranks(ctx: RuleContext) -> int:
    """Data-parallel ranks, where they are known; 0 where they are not."""
    shard, copies = ctx.get(SHARD), degree(ctx, REPLICATE)
    if isinstance(shard, int) and shard > 0:
        return shard * copies
    if ctx.cluster is None:
        return 0
    return max(1, ctx.cluster.world // (degree(ctx, TP) * degree(ctx, PP) * degree(ctx, CP)))


def _step_not_divided(ctx: RuleContext) -> Problem | None:
    step, tokens, ranks = ctx.get(STEP_TOKENS), ctx.get(MICRO_BATCH_TOKENS), _ranks(ctx)
    if not (isinstance(step, int) and isinstance(tokens, int)) or step <= 0 or tokens <= 0 or not ranks:
        return None
    micro_batches = degree(ctx, "parallelism.num_pp_microbatches") if degree(ctx, PP) > 1 else 1
    once = tokens * micro_batches * ranks
    if step % once == 0:
        return None
    return Problem(
        f"{STEP_TOKENS}={step} is not a multiple of {once}: tokens of a micro batch × micro batches × data ranks",
        (ctx.framework.format_setting(STEP_TOKENS, max(1, round(step / once)) * once),),
        key=STEP_TOKENS,
    )


def _tokens_not_divided(ctx: RuleContext) -> Problem | None:
    tokens = ctx.get(MICRO_BATCH_TOKENS)
    cut = ctx.get("parallelism.enable_sequence_parallel", True) is not False
    parts = (degree(ctx, TP) if cut else 1) * (2 * degree(ctx, CP) if degree(ctx, CP) > 1 else 1)
    if not isinstance(tokens, int) or tokens <= ctx.recipe.data.seq_length or tokens % parts == 0:
        return None  # right, or told by the rule of sequences
    return Problem(
        f"{MICRO_BATCH_TOKENS}={tokens} is not a multiple of {parts}, the parts that tp and 2 × cp cut it into",
        key=MICRO_BATCH_TOKENS,
    )


def _expert_mesh(ctx: RuleContext) -> Problem | None:
    ep, etp, tp = (degree(ctx, key) for key in (EP, ETP, TP))
    if ep == 1 or today(ctx) or etp in (1, tp):
        return None
    return Problem(
        f"{ETP}={etp}: experts are cut over tp={tp} ranks or over none",
        (ctx.framework.format_setting(ETP, 1),),
        key=ETP,
    )


def _sharded(ctx: RuleContext) -> int:
    """Data ranks that share the weights, where they are known; 0 where they are not."""
    return _ranks(ctx) // degree(ctx, REPLICATE)


def _experts_unsharded(ctx: RuleContext) -> Problem | None:
    """Next to expert parallelism the other weights are always sharded, over at least two ranks."""
    if today(ctx) or degree(ctx, EP) == 1 or ctx.case is None or not ctx.case.is_moe:
        return None
    if _sharded(ctx) != 1 or degree(ctx, CP) > 1:
        return None
    return Problem(
        "expert parallelism needs dp_shard × cp of 2 or more",
        (ctx.framework.format_setting(TP, degree(ctx, TP) // 2),),
        key=EP,
    )


def _experts_unread(ctx: RuleContext) -> Iterator[Problem]:
    """Degrees of experts that no layer asks for."""
    model = ctx.parsed.model
    if model is None:
        return
    ep, etp, ranks = degree(ctx, EP), degree(ctx, ETP), _sharded(ctx) * degree(ctx, CP) * degree(ctx, TP)
    if model.moe is None and ranks % (ep * etp):
        message = f"ep × etp = {ep} × {etp} does not divide the {ranks} ranks of dp_shard × cp × tp"
        yield Problem(message, severity="error")
        return
    for key in (EP, ETP):
        if degree(ctx, key) > 1 and model.moe is None:
            yield Problem(f"{key}={ctx.get(key)}: {model.name} has no experts, nothing is cut", key=key)
    if model.moe is not None and degree(ctx, ETP) > 1 and degree(ctx, EP) == 1:
        yield Problem(f"{ETP}={ctx.get(ETP)} is read next to {EP} only; experts are cut like the dense layers", key=ETP)


WITHOUT_STAGES = ("qwen3", "gpt_oss", "flux")
"""Models of the 0.2 line that cannot be cut into stages; later ones can."""
WITHOUT_CONTEXT = ("gpt_oss",)
WITHOUT_DEEPEP = ("qwen3", "gpt_oss")
"""Models of the 0.2 line with experts that do not ask how tokens are sent."""


def _no_stages(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get(NAME))
    if today(ctx) or degree(ctx, PP) == 1 or name not in WITHOUT_STAGES:
        return None
    return Problem(
        f"{name} cannot be cut into stages in torchtitan 0.2", (ctx.framework.format_setting(PP, 1),), key=PP
    )


def _sequence_parts(ctx: RuleContext) -> Problem | None:
    """The halves of context parallelism are asked for without it as well."""
    length, tp, cp = ctx.get("training.seq_len"), degree(ctx, TP), degree(ctx, CP)
    if today(ctx) or not isinstance(length, int) or length <= 0 or length % (2 * tp * cp) == 0:
        return None
    parts = 2 * tp * cp
    return Problem(
        f"training.seq_len={length} is not a multiple of {parts}: tp × 2 × cp = {tp} × 2 × {cp}",
        (ctx.framework.format_setting("training.seq_len", max(1, round(length / parts)) * parts),),
        key="training.seq_len",
    )


def _deepep(ctx: RuleContext) -> Iterator[Problem]:
    key = "parallelism.expert_parallel_comm_backend"
    if ctx.get(key) != "deepep" or ctx.case is None or not ctx.case.is_moe or ctx.get(NAME) in WITHOUT_DEEPEP:
        return
    if degree(ctx, EP) == 1:
        yield Problem("DeepEP needs expert parallelism", (ctx.framework.format_setting(key, "standard"),), key=key)
    elif degree(ctx, ETP) > 1:
        yield Problem("DeepEP does not cut experts over tensor ranks", (ctx.framework.format_setting(ETP, 1),), key=key)


def _dualpipe(ctx: RuleContext) -> Problem | None:
    overlapped = ctx.get("parallelism.pipeline_parallel_expert_parallel_overlap") is not False
    if str(ctx.get(SCHEDULE)).lower() != "dualpipev" or not overlapped or min(degree(ctx, PP), degree(ctx, EP)) == 1:
        return None
    if ctx.get(MODE) == "none" or today(ctx):
        return None
    fix = (
        ctx.framework.format_setting(MODE, "none"),
        ctx.framework.format_setting("parallelism.pipeline_parallel_expert_parallel_overlap", False),
    )
    return Problem("DualPipeV overlaps expert exchanges only without recompute", fix, key=SCHEDULE)


def _varlen_context(ctx: RuleContext) -> Problem | None:
    if degree(ctx, CP) == 1:
        return None
    if today(ctx):
        preset = PRESETS.get(str(ctx.get("module")), {}).get(str(ctx.get("config")))
        if in_tokens(ctx) and ctx.get("parallelism.spmd_backend", "spmd_types") != "spmd_types":
            return Problem("context parallelism needs the spmd_types backend", key="parallelism.spmd_backend")
        if preset is not None and preset.kernel != "flex":
            return Problem(
                f"context parallelism needs FlexAttention, and {ctx.get('config')} has {preset.kernel}", key=CP
            )
        return None
    if ctx.get(NAME) in WITHOUT_CONTEXT:
        return Problem(
            f"{ctx.get(NAME)} does not run over context ranks", (ctx.framework.format_setting(CP, 1),), key=CP
        )
    if not str(ctx.get(FLAVOR)).endswith(("_varlen", "_varlen_attn")):
        return None
    return Problem(
        "varlen attention does not run over context ranks",
        (ctx.framework.format_setting(FLAVOR, plain(str(ctx.get(FLAVOR)))),),
        key=CP,
    )


def _no_balancer(ctx: RuleContext) -> Problem | None:
    key = "parallelism.context_parallel_load_balancer"
    name, fix = ctx.get(key), (ctx.framework.format_setting(key, "headtail"),)
    if not ctx.is_set(key) or name in ("headtail", None) or (name != "" and degree(ctx, CP) == 1):
        return None  # right, or read by nothing
    if name != "ptrr":
        return Problem(f"{key}={name!r}: headtail, ptrr, or left out", fix)
    if today(ctx) or "flex" in str(ctx.get(FLAVOR)):
        return None
    return Problem(f"{key}=ptrr needs the block masks of FlexAttention, and {ctx.get(FLAVOR)} has none", fix)


def _copies_alone(ctx: RuleContext) -> Problem | None:
    others = [axis for axis, key in (("tp", TP), ("pp", PP)) if degree(ctx, key) > 1]
    if today(ctx) or degree(ctx, REPLICATE) == 1 or _sharded(ctx) != 1 or degree(ctx, CP) > 1 or not others:
        return None  # context ranks share the weights too
    return Problem(
        f"copies without sharding are DDP, which does not run next to {', '.join(others)}",
        (ctx.framework.format_setting(REPLICATE, 1), ctx.framework.format_setting(SHARD, -1)),
        key=REPLICATE,
    )


def _no_micro_batches(ctx: RuleContext) -> Problem | None:
    key = "parallelism.num_pp_microbatches"
    value = ctx.get(key)
    return Problem(f"{key}={value} must be above 0", key=key) if isinstance(value, int) and value <= 0 else None


RULES = (
    rule(
        "schedule-file",
        "error",
        (SCHEDULE,),
        _schedule_without_file,
        "the schedule is built without actions and fails",
        "the general schedules take their order from a file",
    ),
    rule(
        "stage-count",
        "error",
        ("parallelism.pipeline_parallel_layers_per_stage",),
        _uneven_chunks,
        "ValueError about virtual stages and the pipeline degree",
        "every rank runs the same number of chunks",
    ),
    rule(
        "stage-ends",
        "error",
        tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")),
        _ends_too_heavy,
        "ValueError: input_weight exceeds minimum layers per stage",
        "what the embedding and the head weigh is taken off the layers of their stages",
    ),
    rule(
        "pipeline-underfilled",
        "warning",
        (LOCAL_BATCH, MICRO_BATCH),
        _microbatch_too_large,
        "a warning that micro batches are fewer than stages; slow steps",
        "accumulation runs one pipeline after the other, each with the micro batches of one local batch",
    ),
    rule(
        "global-batch",
        "error",
        ("training.global_batch_size",),
        _batch_not_divided,
        "an assertion on the global batch size",
        "a step is a whole number of local batches on every rank",
    ),
    rule(
        "tokens-per-step",
        "error",
        (STEP_TOKENS,),
        _step_not_divided,
        "ValueError on num_tokens_per_train_step",
        "a step is a whole number of micro batches on every rank",
    ),
    rule(
        "tokens-per-microbatch",
        "error",
        (MICRO_BATCH_TOKENS,),
        _tokens_not_divided,
        "ValueError on the tokens of a micro batch",
        "sequence and context parallelism cut the tokens into equal parts",
    ),
    rule(
        "expert-mesh",
        "error",
        (ETP, EP),
        _expert_mesh,
        "an assertion that etp is tp or 1",
        "experts borrow the tensor ranks as a whole or not at all",
    ),
    rule(
        "experts-ignored",
        "warning",
        (EP, ETP),
        _experts_unread,
        "trains as without it",
        "meshes are built for every degree, and only layers with experts use those of experts",
        covers=("moe.ep-needs-experts",),
    ),
    rule(
        "experts-unsharded",
        "error",
        (EP,),
        _experts_unsharded,
        "ValueError: mesh fsdp is not available",
        "the weights beside the experts are wrapped for sharding whenever there is expert parallelism",
    ),
    rule(
        "no-pipeline",
        "error",
        (PP,),
        _no_stages,
        "RuntimeError: the model does not support pipelining",
        "each model brings the function that cuts it into stages, and some bring none",
        covers=("pipeline.tied-embeddings",),
    ),
    rule(
        "sequence-parts",
        "error",
        ("training.seq_len",),
        _sequence_parts,
        "an assertion on the sequence length",
        "the length must divide by tp and by two parts for each context rank, one context rank included",
        covers=("sequence.tensor-parts", "sequence.context-chunks"),
    ),
    rule(
        "deepep",
        "error",
        ("parallelism.expert_parallel_comm_backend",),
        _deepep,
        "ValueError or NotImplementedError",
        "its kernels exchange tokens between expert ranks only",
    ),
    rule(
        "dualpipe-recompute",
        "error",
        (SCHEDULE,),
        _dualpipe,
        "NotImplementedError",
        "recompute would run the exchanges a second time out of order",
    ),
    rule(
        "context-attention",
        "error",
        (CP,),
        _varlen_context,
        "NotImplementedError or ValueError",
        "only some attention kernels can merge partial results of context ranks",
    ),
    rule(
        "load-balancer",
        "error",
        ("parallelism.context_parallel_load_balancer",),
        _no_balancer,
        "ValueError",
        "the name is looked up",
    ),
    rule(
        "ddp-with-other-axes",
        "error",
        (REPLICATE,),
        _copies_alone,
        "RuntimeError: DDP with more than one dimension",
        "plain copies have no place for other axes",
    ),
    rule(
        "pp-microbatches",
        "error",
        ("parallelism.num_pp_microbatches",),
        _no_micro_batches,
        "ValueError",
        "a pipeline needs at least one micro batch",
    ),
)

"""torchtitan's rules on parallel degrees, pipeline stages, batches and the device mesh."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.torchtitan.derived_fields import total_stages
from meshwright.frameworks.torchtitan.models import PRESETS, base_flavor
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
    is_current,
    rule,
)
from meshwright.recipes.key_maps.torchtitan import LOCAL_BATCH, MICRO_BATCH, MICRO_BATCH_TOKENS, STEP_TOKENS


def _schedule_csv_missing(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get(SCHEDULE))
    if not name.lower().strip("_").startswith("pipelineschedule") or degree(ctx, PP) == 1:
        return None
    if ctx.get("parallelism.pipeline_parallel_schedule_csv"):
        return None
    return Problem(f"{name} requires pipeline_parallel_schedule_csv")


def _stages_not_divisible(ctx: RuleContext) -> Problem | None:
    pp = degree(ctx, PP)
    stages = total_stages(ctx.parsed.settings, ctx.parsed.model)
    if pp == 1 or not stages or stages % pp == 0:
        return None
    key = "parallelism.pipeline_parallel_layers_per_stage"
    return Problem(
        f"{key}={ctx.get(key)} gives {stages} stages, which is not a multiple of pipeline_parallel_degree={pp}", key=key
    )


def _stage_ends_too_heavy(ctx: RuleContext) -> Iterator[Problem]:
    """The first and last stage lose the layers that the embedding and the head count as."""
    model, pp = ctx.parsed.model, degree(ctx, PP)
    if pp == 1 or model is None or ctx.get("parallelism.module_fqns_per_model_part"):
        return
    keys = [f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    weights = [ctx.get(key) for key in keys]
    if not all(isinstance(weight, int) for weight in weights):
        return
    per_stage = (model.num_layers + sum(weights)) // (pp * ctx.recipe.layout.vp)
    for key, weight in zip(keys, weights, strict=True):
        if 0 < per_stage < weight:
            message = f"{key}={weight} is more than the {per_stage} layers of a stage"
            yield Problem(message, (ctx.framework.format_setting(key, per_stage),), key=key)


def _pipeline_underfilled(ctx: RuleContext) -> Problem | None:
    """Report fewer micro batches than stages."""
    local, micro = ctx.get(LOCAL_BATCH), ctx.get(MICRO_BATCH)
    if in_tokens(ctx) or degree(ctx, PP) == 1 or not (isinstance(local, int) and isinstance(micro, int)):
        return None
    stages = degree(ctx, PP) * ctx.recipe.layout.vp
    if micro <= 0 or local % micro or local // micro >= stages:
        return None
    return Problem(
        f"{LOCAL_BATCH}={local} gives {local // micro} micro batches of {micro} for {stages} stages",
        (ctx.framework.format_setting(LOCAL_BATCH, _filling_batch(ctx, stages) * micro),),
        key=LOCAL_BATCH if ctx.is_set(LOCAL_BATCH) else PP,
    )


def _filling_batch(ctx: RuleContext, stages: int) -> int:
    """Return the fewest micro batches that fill the stages and divide those of a step, if its batch is set."""
    batch, micro, ranks = ctx.get("training.global_batch_size"), ctx.recipe.layout.micro_batch_size, _ranks(ctx)
    if not isinstance(batch, int) or batch <= 0 or not ranks or batch % (micro * ranks):
        return stages
    every = batch // (micro * ranks)
    return next((count for count in range(stages, every + 1) if every % count == 0), stages)


def _global_batch_not_divisible(ctx: RuleContext) -> Problem | None:
    """With a pipeline, a step consists of whole local batches, not only of micro batches."""
    batch, local = ctx.get("training.global_batch_size"), ctx.get(LOCAL_BATCH)
    ranks = _ranks(ctx)
    if in_tokens(ctx) or degree(ctx, PP) == 1 or not (isinstance(batch, int) and isinstance(local, int)) or not ranks:
        return None
    micro = ctx.recipe.layout.micro_batch_size
    if local <= 0 or batch % (local * ranks) == 0 or batch % (micro * ranks):
        return None  # valid, or reported by the micro-batch rule
    return Problem(
        f"training.global_batch_size={batch} is not a multiple of {local * ranks}: {LOCAL_BATCH} × {ranks} ranks",
        (
            ctx.framework.format_setting(
                "training.global_batch_size", max(1, round(batch / (local * ranks))) * local * ranks
            ),
        ),
    )


def _ranks(ctx: RuleContext) -> int:
    """Return the number of data-parallel ranks, or 0 if unknown."""
    shard, replicas = ctx.get(SHARD), degree(ctx, REPLICATE)
    if isinstance(shard, int) and shard > 0:
        return shard * replicas
    if ctx.cluster is None:
        return 0
    return max(1, ctx.cluster.world // (degree(ctx, TP) * degree(ctx, PP) * degree(ctx, CP)))


def _step_tokens_not_divisible(ctx: RuleContext) -> Problem | None:
    step, tokens, ranks = ctx.get(STEP_TOKENS), ctx.get(MICRO_BATCH_TOKENS), _ranks(ctx)
    if not (isinstance(step, int) and isinstance(tokens, int)) or step <= 0 or tokens <= 0 or not ranks:
        return None
    micro_batches = degree(ctx, "parallelism.num_pp_microbatches") if degree(ctx, PP) > 1 else 1
    tokens_per_pass = tokens * micro_batches * ranks
    if step % tokens_per_pass == 0:
        return None
    return Problem(
        f"{STEP_TOKENS}={step} is not a multiple of {tokens_per_pass}: {MICRO_BATCH_TOKENS} × micro batches × ranks",
        (ctx.framework.format_setting(STEP_TOKENS, max(1, round(step / tokens_per_pass)) * tokens_per_pass),),
        key=STEP_TOKENS,
    )


def _micro_batch_tokens_not_divisible(ctx: RuleContext) -> Problem | None:
    tokens = ctx.get(MICRO_BATCH_TOKENS)
    sequence_parallel = ctx.get("parallelism.enable_sequence_parallel", True) is not False
    shards = (degree(ctx, TP) if sequence_parallel else 1) * (2 * degree(ctx, CP) if degree(ctx, CP) > 1 else 1)
    if not isinstance(tokens, int) or tokens <= ctx.recipe.data.seq_length or tokens % shards == 0:
        return None  # valid, or reported by the sequence-length rule
    return Problem(
        f"{MICRO_BATCH_TOKENS}={tokens} is not a multiple of {shards}, the shards of tp × 2 × cp",
        key=MICRO_BATCH_TOKENS,
    )


def _expert_mesh(ctx: RuleContext) -> Problem | None:
    ep, etp, tp = (degree(ctx, key) for key in (EP, ETP, TP))
    if ep == 1 or is_current(ctx) or etp in (1, tp):
        return None
    return Problem(
        f"{ETP}={etp}: must be 1 or the tensor-parallel degree {tp}", (ctx.framework.format_setting(ETP, 1),), key=ETP
    )


def _shard_ranks(ctx: RuleContext) -> int:
    """Return the number of ranks that shard the weights, or 0 if unknown."""
    return _ranks(ctx) // degree(ctx, REPLICATE)


def _experts_unsharded(ctx: RuleContext) -> Problem | None:
    """With expert parallelism, the other weights are always sharded, over at least two ranks."""
    if is_current(ctx) or degree(ctx, EP) == 1 or ctx.case is None or not ctx.case.is_moe:
        return None
    if _shard_ranks(ctx) != 1 or degree(ctx, CP) > 1:
        return None
    return Problem(
        "expert parallelism requires dp_shard × cp of at least 2",
        (ctx.framework.format_setting(TP, degree(ctx, TP) // 2),),
        key=EP,
    )


def _experts_ignored(ctx: RuleContext) -> Iterator[Problem]:
    """Report expert degrees that no layer uses."""
    model = ctx.parsed.model
    if model is None:
        return
    ep, etp, ranks = degree(ctx, EP), degree(ctx, ETP), _shard_ranks(ctx) * degree(ctx, CP) * degree(ctx, TP)
    if model.moe is None and ranks % (ep * etp):
        message = f"ep × etp = {ep} × {etp} does not divide the {ranks} ranks of dp_shard × cp × tp"
        yield Problem(message, severity="error")
        return
    for key in (EP, ETP):
        if degree(ctx, key) > 1 and model.moe is None:
            yield Problem(f"{key}={ctx.get(key)}: has no effect: {model.name} has no experts", key=key)
    if model.moe is not None and degree(ctx, ETP) > 1 and degree(ctx, EP) == 1:
        yield Problem(
            f"{ETP}={ctx.get(ETP)} is ignored without {EP}; experts are sharded like the dense layers", key=ETP
        )


NO_PIPELINE_MODELS = ("qwen3", "gpt_oss", "flux")
"""Models without pipeline support in the 0.2 line."""
NO_CONTEXT_MODELS = ("gpt_oss",)
NO_DEEPEP_MODELS = ("qwen3", "gpt_oss")
"""MoE models of the 0.2 line that ignore the dispatcher setting."""


def _pipeline_unsupported(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get(NAME))
    if is_current(ctx) or degree(ctx, PP) == 1 or name not in NO_PIPELINE_MODELS:
        return None
    return Problem(
        f"torchtitan 0.2 does not support pipeline parallelism for {name}",
        (ctx.framework.format_setting(PP, 1),),
        key=PP,
    )


def _sequence_not_divisible(ctx: RuleContext) -> Problem | None:
    """The factor 2 of context parallelism is required even without it."""
    length, tp, cp = ctx.get("training.seq_len"), degree(ctx, TP), degree(ctx, CP)
    if is_current(ctx) or not isinstance(length, int) or length <= 0 or length % (2 * tp * cp) == 0:
        return None
    parts = 2 * tp * cp
    smaller = [one for one in range(2, tp) if length % (2 * one * cp) == 0]
    is_unusual = tp & (tp - 1) != 0  # lengths and heads are mostly divisible by powers of two
    fixed = {TP: smaller[-1]} if smaller and is_unusual else {"training.seq_len": max(1, round(length / parts)) * parts}
    ((key, value),) = fixed.items()
    return Problem(
        f"training.seq_len={length} is not a multiple of {parts}: tp × 2 × cp = {tp} × 2 × {cp}",
        (ctx.framework.format_setting(key, value),),
        key="training.seq_len",
    )


def _deepep(ctx: RuleContext) -> Iterator[Problem]:
    key = "parallelism.expert_parallel_comm_backend"
    if ctx.get(key) != "deepep" or ctx.case is None or not ctx.case.is_moe or ctx.get(NAME) in NO_DEEPEP_MODELS:
        return
    if degree(ctx, EP) == 1:
        yield Problem("DeepEP requires expert parallelism", (ctx.framework.format_setting(key, "standard"),), key=key)
    elif degree(ctx, ETP) > 1:
        yield Problem(
            "DeepEP does not support expert tensor parallelism", (ctx.framework.format_setting(ETP, 1),), key=key
        )


def _dualpipe_recompute(ctx: RuleContext) -> Problem | None:
    overlapped = ctx.get("parallelism.pipeline_parallel_expert_parallel_overlap") is not False
    if str(ctx.get(SCHEDULE)).lower() != "dualpipev" or not overlapped or min(degree(ctx, PP), degree(ctx, EP)) == 1:
        return None
    if ctx.get(MODE) == "none" or is_current(ctx):
        return None
    fix = (
        ctx.framework.format_setting(MODE, "none"),
        ctx.framework.format_setting("parallelism.pipeline_parallel_expert_parallel_overlap", False),
    )
    return Problem(
        "DualPipeV with expert-parallel overlap does not support activation checkpointing", fix, key=SCHEDULE
    )


def _context_attention(ctx: RuleContext) -> Problem | None:
    if degree(ctx, CP) == 1:
        return None
    if is_current(ctx):
        preset = PRESETS.get(str(ctx.get("module")), {}).get(str(ctx.get("config")))
        if in_tokens(ctx) and ctx.get("parallelism.spmd_backend", "spmd_types") != "spmd_types":
            return Problem("context parallelism requires the spmd_types backend", key="parallelism.spmd_backend")
        if preset is not None and preset.kernel != "flex":
            return Problem(
                f"context parallelism requires FlexAttention, but {ctx.get('config')} has {preset.kernel}", key=CP
            )
        return None
    if ctx.get(NAME) in NO_CONTEXT_MODELS:
        return Problem(
            f"{ctx.get(NAME)} does not support context parallelism", (ctx.framework.format_setting(CP, 1),), key=CP
        )
    if not str(ctx.get(FLAVOR)).endswith(("_varlen", "_varlen_attn")):
        return None
    return Problem(
        "varlen attention does not support context parallelism",
        (ctx.framework.format_setting(FLAVOR, base_flavor(str(ctx.get(FLAVOR)))),),
        key=CP,
    )


def _load_balancer(ctx: RuleContext) -> Problem | None:
    key = "parallelism.context_parallel_load_balancer"
    name, fix = ctx.get(key), (ctx.framework.format_setting(key, "headtail"),)
    if not ctx.is_set(key) or name in ("headtail", None) or (name != "" and degree(ctx, CP) == 1):
        return None  # valid, or ignored
    if name != "ptrr":
        return Problem(f"{key}={name!r}: must be headtail, ptrr or unset", fix)
    if is_current(ctx) or "flex" in str(ctx.get(FLAVOR)):
        return None
    return Problem(f"{key}=ptrr requires FlexAttention's block masks, but {ctx.get(FLAVOR)} has none", fix)


def _ddp_with_other_axes(ctx: RuleContext) -> Problem | None:
    others = [axis for axis, key in (("tp", TP), ("pp", PP)) if degree(ctx, key) > 1]
    if is_current(ctx) or degree(ctx, REPLICATE) == 1 or _shard_ranks(ctx) != 1 or degree(ctx, CP) > 1 or not others:
        return None  # context ranks shard the weights too
    return Problem(
        f"replicas without sharding are DDP, which cannot be combined with {', '.join(others)}",
        (ctx.framework.format_setting(REPLICATE, 1), ctx.framework.format_setting(SHARD, -1)),
        key=REPLICATE,
    )


def _pp_microbatches_not_positive(ctx: RuleContext) -> Problem | None:
    key = "parallelism.num_pp_microbatches"
    value = ctx.get(key)
    return Problem(f"{key}={value} must be above 0", key=key) if isinstance(value, int) and value <= 0 else None


RULES = (
    rule("schedule-file", "error", (SCHEDULE,), _schedule_csv_missing, symptom="the schedule has no actions and fails",
        cause="the generic schedules read their actions from a CSV file"),
    rule("stage-count", "error", ("parallelism.pipeline_parallel_layers_per_stage",), _stages_not_divisible,
        symptom="ValueError about virtual stages and the pipeline degree",
        cause="every rank runs the same number of stages"),
    rule("stage-ends", "error",
        tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")),
        _stage_ends_too_heavy, symptom="ValueError: input_weight exceeds minimum layers per stage",
        cause="the weights of the embedding and the head are subtracted from the layers of their stages"),
    rule("pipeline-underfilled", "warning", (LOCAL_BATCH, MICRO_BATCH), _pipeline_underfilled,
        symptom="a warning about fewer micro batches than stages, and slow steps",
        cause="gradient accumulation runs the pipeline once per local batch; only its micro batches fill the stages",
        covers=("schedule.idle-stages",)),
    rule("global-batch", "error", ("training.global_batch_size",), _global_batch_not_divisible,
        symptom="AssertionError about the global batch size",
        cause="every rank runs an integer number of local batches per step", covers=("schedule.uneven-passes",)),
    rule("tokens-per-step", "error", (STEP_TOKENS,), _step_tokens_not_divisible,
        symptom="ValueError on num_tokens_per_train_step",
        cause="every rank runs an integer number of micro batches per step"),
    rule("tokens-per-microbatch", "error", (MICRO_BATCH_TOKENS,), _micro_batch_tokens_not_divisible,
        symptom="ValueError about the tokens per micro batch",
        cause="sequence and context parallelism split the tokens into equal shards"),
    rule("expert-mesh", "error", (ETP, EP), _expert_mesh, symptom="AssertionError: etp must be tp or 1",
        cause="experts use either all tensor-parallel ranks or none"),
    rule("experts-ignored", "warning", (EP, ETP), _experts_ignored, symptom="none: the degree has no effect",
        cause="the mesh is built for every degree, but only MoE layers use the expert degrees",
        covers=("moe.ep-needs-experts",)),
    rule("experts-unsharded", "error", (EP,), _experts_unsharded, symptom="ValueError: mesh fsdp is not available",
        cause="with expert parallelism, the non-expert weights are always wrapped in FSDP"),
    rule("no-pipeline", "error", (PP,), _pipeline_unsupported,
        symptom="RuntimeError: the model does not support pipelining",
        cause="each model provides its own pipelining function, and some do not",
        covers=("pipeline.tied-embeddings", "pipeline.torchtitan-models")),
    rule("sequence-parts", "error", ("training.seq_len",), _sequence_not_divisible,
        symptom="AssertionError about the sequence length",
        cause="the length must be divisible by tp × 2 × cp, also with cp = 1",
        covers=("sequence.tensor-parts", "sequence.context-chunks")),
    rule("deepep", "error", ("parallelism.expert_parallel_comm_backend",), _deepep,
        symptom="ValueError or NotImplementedError",
        cause="DeepEP's kernels exchange tokens between expert-parallel ranks only"),
    rule("dualpipe-recompute", "error", (SCHEDULE,), _dualpipe_recompute, symptom="NotImplementedError",
        cause="recompute would repeat the expert communication out of order"),
    rule("context-attention", "error", (CP,), _context_attention, symptom="NotImplementedError or ValueError",
        cause="only some attention kernels support context parallelism",
        covers=("sequence.torchtitan-models",)),
    rule("load-balancer", "error", ("parallelism.context_parallel_load_balancer",), _load_balancer,
        symptom="ValueError", cause="the load balancer is looked up by name"),
    rule("ddp-with-other-axes", "error", (REPLICATE,), _ddp_with_other_axes,
        symptom="RuntimeError: DDP with more than one dimension", cause="DDP does not support other parallel axes"),
    rule("pp-microbatches", "error", ("parallelism.num_pp_microbatches",), _pp_microbatches_not_positive,
        symptom="ValueError", cause="a pipeline needs at least one micro batch"),
)  # fmt: skip

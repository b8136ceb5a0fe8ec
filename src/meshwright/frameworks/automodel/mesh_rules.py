"""What AutoModel refuses in the mesh, the strategy, the batch and the stages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.frameworks.automodel.accessors import as_int, is_open, size
from meshwright.frameworks.automodel.extra_keys import NARROW
from meshwright.frameworks.automodel.format_override import spell
from meshwright.frameworks.automodel.values import strategy_of
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.recipes.key_maps.automodel import COMMON_OPTIONS, PARALLEL_AXES, STRATEGY_OPTIONS

REFUSED = {
    "ddp": ("tp", "pp", "cp", "ep"),
    "megatron_fsdp": ("pp", "ep"),
}
"""Degrees above 1 that a strategy refuses."""

IN_NAME = re.compile(r"(?:(?<=[^a-z])|(?<=\d)|^)(tp|pp|cp|ep)(\d+)(?![a-z0-9]*b(?:\b|_))")


def _pipeline_missing(ctx: RuleContext) -> Problem | None:
    said = ctx.keys_under("distributed.pipeline")
    if size(ctx, "pp") == 1 or (said and (said != ["distributed.pipeline"] or ctx.get(said[0]) is not None)):
        return None
    return Problem(
        f"pp_size={size(ctx, 'pp')} needs a pipeline block; an empty one takes the defaults",
        ("distributed.pipeline: {}",),
        key="distributed.pp_size",
    )


def _not_its_option(ctx: RuleContext) -> Iterator[Problem]:
    strategy = strategy_of(ctx.parsed.settings)
    if not strategy:
        return
    of_others = {option for options in STRATEGY_OPTIONS.values() for option in options} - {
        *STRATEGY_OPTIONS[strategy],
        *COMMON_OPTIONS,
    }
    told: set[str] = set()
    for key in ctx.keys_under("distributed"):
        option = key.removeprefix("distributed.").split(".")[0].split("[")[0]
        if option in of_others and option not in told:
            told.add(option)
            owner = next(name for name, options in STRATEGY_OPTIONS.items() if option in options)
            yield Problem(
                f"{option} is no option of the {strategy} strategy, whatever its value",
                (spell("distributed.strategy", owner),),
                key=key,
            )


def _strategy_refuses(ctx: RuleContext) -> Iterator[Problem]:
    strategy = strategy_of(ctx.parsed.settings)
    names = [name for name in REFUSED.get(strategy, ()) if size(ctx, name) > 1]
    if strategy != "fsdp2" and size(ctx, "dp_replicate") > 1:
        names.append("dp_replicate")
    if names:
        said = ", ".join(f"{name}_size={size(ctx, name)}" for name in names)
        yield Problem(f"the {strategy} strategy refuses {said}", (spell("distributed.strategy", "fsdp2"),))
    if strategy == "megatron_fsdp" and ctx.recipe.layout.recompute == "selective":
        key = "distributed.activation_checkpointing"
        yield Problem("megatron_fsdp refuses selective activation checkpointing", (spell(key, True),), key=key)


def _checkpointing_skipped(ctx: RuleContext) -> Problem | None:
    if strategy_of(ctx.parsed.settings) != "megatron_fsdp" or ctx.recipe.layout.recompute != "full":
        return None
    return Problem("megatron_fsdp skips activation checkpointing", (spell("distributed.strategy", "fsdp2"),))


def _world(ctx: RuleContext) -> int | None:
    return ctx.cluster.world if ctx.cluster is not None else ctx.parsed.gpu_request.count


def _model_ranks(ctx: RuleContext) -> int:
    return size(ctx, "tp") * size(ctx, "cp") * size(ctx, "pp")


def _data_ranks(ctx: RuleContext) -> int | None:
    """Data-parallel ranks, when a file or the number of GPUs tells them."""
    said = as_int(ctx, "distributed.dp_size")
    if said is not None:
        return said
    world = _world(ctx)
    return None if world is None or world % _model_ranks(ctx) else world // _model_ranks(ctx)


def _mesh(ctx: RuleContext) -> Problem | None:
    world, ranks = _world(ctx), _model_ranks(ctx)
    if world is None or is_open(ctx, *(f"distributed.{name}_size" for name in (*PARALLEL_AXES, "dp"))):
        return None
    said = as_int(ctx, "distributed.dp_size")
    if said is None:
        if world % ranks == 0:
            return None
        return Problem(f"tp × cp × pp = {ranks} ranks do not divide {world} GPUs", key="distributed.tp_size")
    if said * ranks == world:
        return None
    message = f"dp_size={said} × tp × cp × pp = {said * ranks} ranks, on {world} GPUs"
    outcome = "the others are left out without a word" if said * ranks < world else "there are not as many"
    return Problem(f"{message}: {outcome}", (spell("distributed.dp_size", "none"),), key="distributed.dp_size")


def _expert_mesh(ctx: RuleContext) -> Problem | None:
    ep, ranks = size(ctx, "ep"), _data_ranks(ctx)
    if ep == 1 or ranks is None or strategy_of(ctx.parsed.settings) != "fsdp2":
        return None
    borrowed = ranks * size(ctx, "cp") * size(ctx, "tp")
    if borrowed % ep == 0:
        return None
    fits = max(degree for degree in range(1, ep) if borrowed % degree == 0)
    return Problem(
        f"ep_size={ep} does not divide dp × cp × tp = {borrowed} ranks", (spell("distributed.ep_size", fits),)
    )


def _batch(ctx: RuleContext) -> Problem | None:
    whole, local = ctx.get("step_scheduler.global_batch_size"), ctx.get("step_scheduler.local_batch_size")
    ranks = _data_ranks(ctx) or 1
    if not all(isinstance(value, int) and value > 0 for value in (whole, local)):
        return None
    if (
        is_open(ctx, "step_scheduler.global_batch_size", "step_scheduler.local_batch_size")
        or whole % (local * ranks) == 0
    ):
        return None
    return Problem(
        f"global_batch_size={whole} is not a multiple of local_batch_size × dp = {local} × {ranks}",
        (spell("step_scheduler.global_batch_size", -(-whole // (local * ranks)) * local * ranks),),
        key="step_scheduler.local_batch_size",
    )


def _stages_idle(ctx: RuleContext) -> Problem | None:
    pp, local = size(ctx, "pp"), as_int(ctx, "step_scheduler.local_batch_size")
    micro = as_int(ctx, "distributed.pipeline.pp_microbatch_size") or 1
    if pp == 1 or local is None or is_open(ctx, "distributed.pipeline.pp_microbatch_size") or local // micro >= pp:
        return None
    return Problem(
        f"a local batch of {local} makes {local // micro} micro batches of {micro}, fewer than pp_size={pp}",
        (spell("step_scheduler.local_batch_size", pp * micro),),
        key="step_scheduler.local_batch_size",
    )


def _rounds(ctx: RuleContext) -> Problem | None:
    pp, local = size(ctx, "pp"), as_int(ctx, "step_scheduler.local_batch_size")
    micro = as_int(ctx, "distributed.pipeline.pp_microbatch_size") or 1
    name = str(ctx.get("distributed.pipeline.pp_schedule")).lower()
    interleaved = name in ("interleaved1f1b", "interleavedzerobubble")
    if pp == 1 or local is None or not interleaved or is_open(ctx, "distributed.pipeline.pp_microbatch_size"):
        return None
    batches = local // micro
    rounds = max(1, batches // pp)
    if batches % rounds == 0:
        return None
    return Problem(
        f"{batches} micro batches do not divide into {rounds} equal rounds over {pp} stages",
        (spell("step_scheduler.local_batch_size", batches // pp * pp * micro),),
        key="step_scheduler.local_batch_size",
    )


def _replicas(ctx: RuleContext) -> Problem | None:
    copies, ranks = size(ctx, "dp_replicate"), _data_ranks(ctx)
    if copies == 1 or ranks is None or strategy_of(ctx.parsed.settings) != "fsdp2":
        return None
    if ranks % copies == 0 and copies < ranks:
        return None
    why = "leaves nothing to shard over" if ranks % copies == 0 else "does not divide"
    fits = max(degree for degree in range(1, max(2, ranks)) if ranks % degree == 0 and degree <= copies)
    return Problem(
        f"dp_replicate_size={copies} {why} ({ranks} data-parallel ranks)",
        (spell("distributed.dp_replicate_size", fits),),
    )


def _stages_uneven(ctx: RuleContext) -> Problem | None:
    each, pp = as_int(ctx, "distributed.pipeline.layers_per_stage"), size(ctx, "pp")
    rounding = "distributed.pipeline.round_virtual_stages_to_pp_multiple"
    if ctx.case is None or each is None or pp == 1 or ctx.get(rounding) is not None:
        return None
    stages = -(-int(ctx.case.layers) // each)
    if stages % pp == 0:
        return None
    return Problem(
        f"layers_per_stage={each} makes {stages} stages, which pp_size={pp} does not divide",
        (spell(rounding, "up"),),
        key="distributed.pipeline.layers_per_stage",
    )


def _stage_format(ctx: RuleContext) -> Problem | None:
    wide, output = ctx.get("distributed.pipeline.dtype"), ctx.get("distributed.mp_policy.output_dtype") or "bfloat16"
    if not isinstance(wide, str) or (wide in NARROW) == (str(output) in NARROW):
        return None
    return Problem(
        f"stages send {wide}, while activations are {output}: the receiving buffers do not fit",
        (spell("distributed.pipeline.dtype", output),),
    )


def _async_tensor(ctx: RuleContext) -> Problem | None:
    asks = ctx.get("distributed.enable_async_tensor_parallel") is True and size(ctx, "tp") > 1
    if not asks or ctx.get("distributed.sequence_parallel") is True:
        return None
    return Problem(
        "asynchronous tensor parallelism needs sequence_parallel", (spell("distributed.sequence_parallel", True),)
    )


def _name_differs(ctx: RuleContext) -> Iterator[Problem]:
    for name, degree in IN_NAME.findall(ctx.parsed.name.lower()):
        key = f"distributed.{name}_size"
        if int(degree) != size(ctx, name) and not is_open(ctx, key):
            yield Problem(
                f"the file is named {name}{degree} and says {name}_size={size(ctx, name)}",
                (spell(key, int(degree)),),
                key=key,
            )


MESH = (
    FrameworkRule(
        "automodel.pipeline-missing",
        "error",
        ("distributed.pp_size",),
        _pipeline_missing,
        symptom="ValueError before the mesh is built",
        cause="stages without a schedule are taken for a mistake",
    ),
    FrameworkRule(
        "automodel.strategy-option",
        "error",
        ("distributed.strategy",),
        _not_its_option,
        symptom="ValueError: unknown options for the strategy",
        cause="all other keys of the section go to the strategy, which knows its own options only",
        supersedes=("strategy.megatron-fsdp-sp",),
    ),
    FrameworkRule(
        "automodel.strategy-conflict",
        "error",
        ("distributed.strategy",),
        _strategy_refuses,
        symptom="ValueError when the mesh is built",
        cause="plain replicas and Megatron-FSDP have no place for these degrees",
        supersedes=(
            "strategy.ddp-tp",
            "strategy.ddp-pp",
            "strategy.ddp-cp",
            "strategy.ddp-ep",
            "strategy.ddp-dp-replicate",
            "strategy.megatron-fsdp-pp",
            "strategy.megatron-fsdp-ep",
            "strategy.megatron-fsdp-dp-replicate",
            "recompute.sharded-selective",
        ),
    ),
    FrameworkRule(
        "automodel.checkpointing-ignored",
        "warning",
        ("distributed.activation_checkpointing",),
        _checkpointing_skipped,
        symptom="an error line in the log, and the memory of a run without it",
        cause="Megatron-FSDP does not wrap checkpointed layers on several GPUs",
        supersedes=("recompute.sharded-full",),
    ),
    FrameworkRule(
        "automodel.mesh",
        "error",
        ("distributed.dp_size", "distributed.tp_size"),
        _mesh,
        symptom="ValueError; or, with an explicit dp_size, GPUs that wait outside the mesh",
        cause="an explicit dp_size is taken as it is and never compared with the number of ranks",
        supersedes=("topology.world", "topology.shard-product"),
    ),
    FrameworkRule(
        "automodel.expert-mesh",
        "error",
        ("distributed.ep_size",),
        _expert_mesh,
        symptom="ValueError when the mesh of experts is built",
        cause="experts re-cut all ranks of a stage, those of tp included",
        supersedes=("topology.expert-mesh",),
    ),
    FrameworkRule(
        "automodel.batch",
        "error",
        ("step_scheduler.local_batch_size", "step_scheduler.global_batch_size"),
        _batch,
        symptom="ValueError from the step scheduler",
        cause="a step is a whole number of local batches on every data-parallel rank",
        supersedes=("batch.divides", "batch.smaller-than-data-parallel"),
    ),
    FrameworkRule(
        "automodel.too-few-micro-batches",
        "error",
        ("step_scheduler.local_batch_size",),
        _stages_idle,
        symptom="an assertion on pp_batch_size and pp_size",
        cause="the local batch, not the global one, is what a pipeline cuts into micro batches",
        supersedes=("schedule.micro-batches",),
    ),
    FrameworkRule(
        "automodel.micro-batch-rounds",
        "error",
        ("step_scheduler.local_batch_size",),
        _rounds,
        symptom="ValueError from torch's interleaved schedule",
        cause="micro batches go through the stages in rounds of one size",
    ),
    FrameworkRule(
        "automodel.replicas",
        "error",
        ("distributed.dp_replicate_size",),
        _replicas,
        symptom="ValueError when the mesh is built",
        cause="every copy is sharded over the same number of ranks, more than one",
        supersedes=("topology.replicas-divide", "topology.pure-replication"),
    ),
    FrameworkRule(
        "automodel.stages-uneven",
        "error",
        ("distributed.pipeline.layers_per_stage",),
        _stages_uneven,
        symptom="ValueError when the model is split",
        cause="every rank holds the same number of stages, unless rounding is asked for",
    ),
    FrameworkRule(
        "automodel.stage-dtype",
        "warning",
        ("distributed.pipeline.dtype",),
        _stage_format,
        symptom="a warning, then wrong shapes or numbers between stages",
        cause="stages allocate what they receive by this format; unset, it follows the mixed-precision policy",
    ),
    FrameworkRule(
        "automodel.async-tensor-parallel",
        "error",
        ("distributed.enable_async_tensor_parallel",),
        _async_tensor,
        symptom="ValueError in the parallelizer, although the documentation says it is switched on",
        cause="only the gathers of sequence parallelism can be overlapped",
        supersedes=("overlap.async-tensor-parallel",),
    ),
    FrameworkRule(
        "automodel.name-mismatch",
        "warning",
        tuple(f"distributed.{name}_size" for name in PARALLEL_AXES),
        _name_differs,
        symptom="a run of another layout than its name promises",
        cause="the file was copied and only one of the two was changed",
    ),
)

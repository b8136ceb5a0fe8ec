"""AutoModel's rules on the device mesh, the strategy, the batch and the pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.frameworks.automodel.accessors import is_unresolved, positive_int, size
from meshwright.frameworks.automodel.extra_keys import BF16_NAMES
from meshwright.frameworks.automodel.format_override import format_setting
from meshwright.frameworks.automodel.values import strategy_name
from meshwright.frameworks.common import new_batch
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.recipes.capabilities import limited_fields
from meshwright.recipes.key_maps.automodel import COMMON_OPTIONS, PARALLEL_AXES, STRATEGY_OPTIONS
from meshwright.rules.search_values import nearest_split

AXIS_IN_NAME = re.compile(r"(?:(?<=[^a-z])|(?<=\d)|^)(tp|pp|cp|ep)(\d+)(?![a-z0-9]*b(?:\b|_))")


def _pipeline_missing(ctx: RuleContext) -> Problem | None:
    keys = ctx.keys_under("distributed.pipeline")
    if size(ctx, "pp") == 1 or (keys and (keys != ["distributed.pipeline"] or ctx.get(keys[0]) is not None)):
        return None
    return Problem(
        f"pp_size={size(ctx, 'pp')} requires a pipeline block; an empty one uses the defaults",
        ("distributed.pipeline: {}",),
        key="distributed.pp_size",
    )


def _strategy_option(ctx: RuleContext) -> Iterator[Problem]:
    strategy = strategy_name(ctx.parsed.settings)
    if not strategy:
        return
    foreign_options = {option for options in STRATEGY_OPTIONS.values() for option in options} - {
        *STRATEGY_OPTIONS[strategy],
        *COMMON_OPTIONS,
    }
    reported: set[str] = set()
    for key in ctx.keys_under("distributed"):
        option = key.removeprefix("distributed.").split(".")[0].split("[")[0]
        if option in foreign_options and option not in reported:
            reported.add(option)
            owner = next(name for name, options in STRATEGY_OPTIONS.items() if option in options)
            yield Problem(
                f"{option} is not an option of the {strategy} strategy",
                (format_setting("distributed.strategy", owner),),
                key=key,
            )


def _strategy_conflict(ctx: RuleContext) -> Iterator[Problem]:
    strategy = strategy_name(ctx.parsed.settings)
    limited = [name for name in limited_fields(strategy, "automodel") if name != "sp"]  # a switch: a rule of its own
    names = [name for name in limited if size(ctx, name) > 1]
    if names:
        listed = ", ".join(f"{name}_size={size(ctx, name)}" for name in names)
        yield Problem(
            f"the {strategy} strategy does not support {listed}", (format_setting("distributed.strategy", "fsdp2"),)
        )
    if strategy == "megatron_fsdp" and ctx.recipe.layout.recompute == "selective":
        key = "distributed.activation_checkpointing"
        yield Problem(
            "megatron_fsdp does not support selective activation checkpointing", (format_setting(key, True),), key=key
        )


def _checkpointing_ignored(ctx: RuleContext) -> Problem | None:
    if strategy_name(ctx.parsed.settings) != "megatron_fsdp" or ctx.recipe.layout.recompute != "full":
        return None
    return Problem("megatron_fsdp ignores activation checkpointing", (format_setting("distributed.strategy", "fsdp2"),))


def _world(ctx: RuleContext) -> int | None:
    return ctx.cluster.world if ctx.cluster is not None else ctx.parsed.gpu_request.count


def _model_ranks(ctx: RuleContext) -> int:
    return size(ctx, "tp") * size(ctx, "cp") * size(ctx, "pp")


def _data_ranks(ctx: RuleContext) -> int | None:
    """Return the number of data-parallel ranks, if the file or the cluster determines it."""
    dp_size = positive_int(ctx, "distributed.dp_size")
    if dp_size is not None:
        return dp_size
    world = _world(ctx)
    return None if world is None or world % _model_ranks(ctx) else world // _model_ranks(ctx)


def _mesh(ctx: RuleContext) -> Problem | None:
    world, ranks = _world(ctx), _model_ranks(ctx)
    if ctx.get("separate_meshes") is True:  # the teacher has GPUs of its own
        return None
    if world is None or is_unresolved(ctx, *(f"distributed.{name}_size" for name in (*PARALLEL_AXES, "dp"))):
        return None
    dp_size = positive_int(ctx, "distributed.dp_size")
    if dp_size is None:
        if world % ranks == 0:
            return None
        return Problem(f"tp × cp × pp = {ranks} ranks do not divide {world} GPUs", key="distributed.tp_size")
    if dp_size * ranks == world:
        return None
    message = f"dp_size={dp_size} × tp × cp × pp = {dp_size * ranks} ranks, on {world} GPUs"
    outcome = "the others are silently unused" if dp_size * ranks < world else "too many"
    return Problem(f"{message}: {outcome}", (format_setting("distributed.dp_size", "none"),), key="distributed.dp_size")


def _expert_mesh(ctx: RuleContext) -> Problem | None:
    ep, ranks = size(ctx, "ep"), _data_ranks(ctx)
    if ep == 1 or ranks is None or strategy_name(ctx.parsed.settings) != "fsdp2":
        return None
    expert_ranks = ranks * size(ctx, "cp") * size(ctx, "tp")
    if expert_ranks % ep == 0:
        return None
    fits = max(degree for degree in range(1, ep) if expert_ranks % degree == 0)
    return Problem(
        f"ep_size={ep} does not divide dp × cp × tp = {expert_ranks} ranks",
        (format_setting("distributed.ep_size", fits),),
    )


def _experts_with_tensor_parallelism(ctx: RuleContext) -> Problem | None:
    tp, ep = size(ctx, "tp"), size(ctx, "ep")
    if min(tp, ep) == 1 or is_unresolved(ctx, "distributed.tp_size", "distributed.ep_size"):
        return None
    fix = (format_setting("distributed.tp_size", 1),)
    if any(ctx.get(key) not in (None, "") for key in ctx.keys_under("distributed.tp_plan")):
        return Problem(
            f"tp_size={tp} with ep_size={ep}: releases up to 0.5.0 refuse it, also with a tp_plan",
            fix,
            key="distributed.tp_size",
            severity="warning",
        )
    return Problem(
        f"tp_size={tp} with ep_size={ep}: there is no tensor-parallel plan for MoE models with expert parallelism",
        fix,
        key="distributed.tp_size",
    )


def _batch(ctx: RuleContext) -> Problem | None:
    global_batch, local_batch = ctx.get("step_scheduler.global_batch_size"), ctx.get("step_scheduler.local_batch_size")
    ranks = _data_ranks(ctx) or 1
    if not ctx.keys_under("step_scheduler"):  # recipes of draft models have batches of their own
        return None
    if not all(isinstance(value, int) and value > 0 for value in (global_batch, local_batch)):
        return None
    if (
        is_unresolved(ctx, "step_scheduler.global_batch_size", "step_scheduler.local_batch_size")
        or global_batch % (local_batch * ranks) == 0
    ):
        return None
    batch, local = nearest_split(global_batch, local_batch, ranks)
    changed = {"global_batch_size": (global_batch, batch), "local_batch_size": (local_batch, local)}
    return Problem(
        f"global_batch_size={global_batch} is not a multiple of local_batch_size × dp = {local_batch} × {ranks}"
        f"{new_batch(global_batch, batch)}",
        tuple(format_setting(f"step_scheduler.{key}", new) for key, (old, new) in changed.items() if new != old),
        key="step_scheduler.local_batch_size",
    )


def _too_few_micro_batches(ctx: RuleContext) -> Problem | None:
    pp, local = size(ctx, "pp"), positive_int(ctx, "step_scheduler.local_batch_size")
    micro = positive_int(ctx, "distributed.pipeline.pp_microbatch_size") or 1
    if (
        pp == 1
        or local is None
        or is_unresolved(ctx, "distributed.pipeline.pp_microbatch_size")
        or local // micro >= pp
    ):
        return None
    return Problem(
        f"local_batch_size={local} gives {local // micro} micro batches of {micro}, fewer than pp_size={pp}",
        (format_setting("step_scheduler.local_batch_size", pp * micro),),
        key="step_scheduler.local_batch_size",
    )


def _micro_batch_rounds(ctx: RuleContext) -> Problem | None:
    pp, local = size(ctx, "pp"), positive_int(ctx, "step_scheduler.local_batch_size")
    micro = positive_int(ctx, "distributed.pipeline.pp_microbatch_size") or 1
    name = str(ctx.get("distributed.pipeline.pp_schedule")).lower()
    interleaved = name in ("interleaved1f1b", "interleavedzerobubble")
    if pp == 1 or local is None or not interleaved or is_unresolved(ctx, "distributed.pipeline.pp_microbatch_size"):
        return None
    batches = local // micro
    rounds = max(1, batches // pp)
    if batches % rounds == 0:
        return None
    return Problem(
        f"{batches} micro batches cannot be split into {rounds} equal rounds over {pp} stages",
        (format_setting("step_scheduler.local_batch_size", batches // pp * pp * micro),),
        key="step_scheduler.local_batch_size",
    )


def _replicas(ctx: RuleContext) -> Problem | None:
    replicas, ranks = size(ctx, "dp_replicate"), _data_ranks(ctx)
    if replicas == 1 or ranks is None or strategy_name(ctx.parsed.settings) != "fsdp2":
        return None
    if ranks % replicas == 0 and replicas < ranks:
        return None
    reason = "leaves no ranks to shard over" if ranks % replicas == 0 else "does not divide"
    fits = max(degree for degree in range(1, max(2, ranks)) if ranks % degree == 0 and degree <= replicas)
    return Problem(
        f"dp_replicate_size={replicas} {reason} ({ranks} data-parallel ranks)",
        (format_setting("distributed.dp_replicate_size", fits),),
    )


def _stages_uneven(ctx: RuleContext) -> Problem | None:
    per_stage, pp = positive_int(ctx, "distributed.pipeline.layers_per_stage"), size(ctx, "pp")
    rounding = "distributed.pipeline.round_virtual_stages_to_pp_multiple"
    if ctx.case is None or per_stage is None or pp == 1 or ctx.get(rounding) is not None:
        return None
    stages = -(-int(ctx.case.layers) // per_stage)
    if stages % pp == 0:
        return None
    return Problem(
        f"layers_per_stage={per_stage} gives {stages} stages, which is not a multiple of pp_size={pp}",
        (format_setting(rounding, "up"),),
        key="distributed.pipeline.layers_per_stage",
    )


def _stage_dtype(ctx: RuleContext) -> Problem | None:
    dtype, output = ctx.get("distributed.pipeline.dtype"), ctx.get("distributed.mp_policy.output_dtype") or "bfloat16"
    if not isinstance(dtype, str) or (dtype in BF16_NAMES) == (str(output) in BF16_NAMES):
        return None
    return Problem(
        f"pipeline.dtype={dtype}, but activations are {output}: the receive buffers do not match",
        (format_setting("distributed.pipeline.dtype", output),),
    )


def _async_tensor_parallel(ctx: RuleContext) -> Problem | None:
    enabled = ctx.get("distributed.enable_async_tensor_parallel") is True and size(ctx, "tp") > 1
    if not enabled or ctx.get("distributed.sequence_parallel") is True:
        return None
    return Problem(
        "enable_async_tensor_parallel requires sequence_parallel",
        (format_setting("distributed.sequence_parallel", True),),
    )


def _name_mismatch(ctx: RuleContext) -> Iterator[Problem]:
    for name, degree in AXIS_IN_NAME.findall(ctx.parsed.name.lower()):
        key = f"distributed.{name}_size"
        if int(degree) != size(ctx, name) and not is_unresolved(ctx, key):
            yield Problem(
                f"the file name says {name}{degree}, but {name}_size={size(ctx, name)}",
                (format_setting(key, int(degree)),),
                key=key,
            )


MESH_RULES = (
    FrameworkRule("automodel.pipeline-missing", "error", ("distributed.pp_size",), _pipeline_missing,
        symptom="ValueError before the mesh is built",
        cause="pp_size above 1 without a schedule is treated as a mistake"),
    FrameworkRule("automodel.strategy-option", "error", ("distributed.strategy",), _strategy_option,
        symptom="ValueError: unknown options for the strategy",
        cause="all other keys of the section are passed to the strategy, which accepts only its own options",
        supersedes=("strategy.megatron-fsdp-sp",)),
    FrameworkRule("automodel.strategy-conflict", "error", ("distributed.strategy",), _strategy_conflict,
        symptom="ValueError when the mesh is built", cause="DDP and Megatron-FSDP do not support these axes",
        supersedes=(
            "strategy.ddp-tp", "strategy.ddp-pp", "strategy.ddp-cp", "strategy.ddp-ep",
            "strategy.ddp-dp-replicate", "strategy.megatron-fsdp-pp", "strategy.megatron-fsdp-ep",
            "strategy.megatron-fsdp-dp-replicate", "recompute.sharded-selective",
        )),
    FrameworkRule("automodel.checkpointing-ignored", "warning", ("distributed.activation_checkpointing",),
        _checkpointing_ignored, symptom="an error in the log, and the memory use of a run without checkpointing",
        cause="Megatron-FSDP does not wrap checkpointed layers on several GPUs",
        supersedes=("recompute.sharded-full",)),
    FrameworkRule("automodel.mesh", "error", ("distributed.dp_size", "distributed.tp_size"), _mesh,
        symptom="ValueError; or, with an explicit dp_size, GPUs outside the mesh",
        cause="an explicit dp_size is never compared with the number of ranks",
        supersedes=("topology.world", "topology.shard-product")),
    FrameworkRule("automodel.expert-mesh", "error", ("distributed.ep_size",), _expert_mesh,
        symptom="ValueError when the expert mesh is built",
        cause="the expert mesh covers all ranks of a stage, including the tensor-parallel ones",
        supersedes=("topology.expert-mesh",)),
    FrameworkRule("automodel.experts-with-tensor-parallelism", "error", ("distributed.tp_size", "distributed.ep_size"),
        _experts_with_tensor_parallelism,
        symptom="AssertionError: Tensor parallelism not supported for custom MoE models; or ValueError: no safe plan",
        cause="with ep_size above 1 the MoE parallelizer shards the model, and no model class has a plan for it",
        supersedes=("moe.tensor-parallel-experts",)),
    FrameworkRule("automodel.batch", "error", ("step_scheduler.local_batch_size", "step_scheduler.global_batch_size"),
        _batch, symptom="ValueError from the step scheduler",
        cause="every data-parallel rank runs an integer number of local batches per step",
        supersedes=("batch.divides", "batch.smaller-than-data-parallel", "schedule.uneven-passes")),
    FrameworkRule("automodel.too-few-micro-batches", "error", ("step_scheduler.local_batch_size",),
        _too_few_micro_batches, symptom="AssertionError about pp_batch_size and pp_size",
        cause="the pipeline splits the local batch, not the global one, into micro batches",
        supersedes=("schedule.micro-batches",)),
    FrameworkRule("automodel.micro-batch-rounds", "error", ("step_scheduler.local_batch_size",), _micro_batch_rounds,
        symptom="ValueError from torch's interleaved schedule",
        cause="the interleaved schedule runs micro batches in rounds of equal size",
        supersedes=("schedule.micro-batch-rounds",)),
    FrameworkRule("automodel.replicas", "error", ("distributed.dp_replicate_size",), _replicas,
        symptom="ValueError when the mesh is built",
        cause="every replica is sharded over the same number of ranks, at least two",
        supersedes=("topology.replicas-divide", "topology.pure-replication")),
    FrameworkRule("automodel.stages-uneven", "error", ("distributed.pipeline.layers_per_stage",), _stages_uneven,
        symptom="ValueError when the model is split",
        cause="every rank has the same number of stages, unless rounding is set"),
    FrameworkRule("automodel.stage-dtype", "warning", ("distributed.pipeline.dtype",), _stage_dtype,
        symptom="a warning, then wrong shapes or values between stages",
        cause="stages allocate receive buffers in this dtype; unset, it follows the mixed-precision policy"),
    FrameworkRule("automodel.async-tensor-parallel", "error", ("distributed.enable_async_tensor_parallel",),
        _async_tensor_parallel,
        symptom="ValueError in the parallelizer, although the documentation says it is enabled automatically",
        cause="only the all-gathers of sequence parallelism can be overlapped",
        supersedes=("overlap.async-tensor-parallel",)),
    FrameworkRule("automodel.name-mismatch", "warning", tuple(f"distributed.{name}_size" for name in PARALLEL_AXES),
        _name_mismatch, symptom="a run with a different layout than its name says",
        cause="the file was copied and only one of the two was changed"),
)  # fmt: skip

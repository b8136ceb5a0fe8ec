"""Rules for recompute, pipelines, training length, schedules and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.parsed_config import get_value
from meshwright.frameworks.megatron_bridge.rules.common import bridge_recipe, get_int, rule, uses_runner
from meshwright.frameworks.megatron_bridge.settings import BIAS, BIAS_SCORES, ROUTER_SCORES
from meshwright.frameworks.schedule_units import UNIT_KEYS, counts_samples


def _offloaded_layers(ctx: RuleContext) -> Iterator[Problem]:
    """Whole layers are never offloaded beside recompute or a pipeline."""
    key, layout = "model.cpu_offloading", ctx.recipe.layout
    if ctx.get(key) is not True:
        return
    if layout.recompute != "none":
        fix = format_override("model.recompute_granularity", None)
        yield Problem(f"{key}=true cannot be combined with recompute ({layout.recompute})", (fix,), key=key)
    if layout.pp > 1:
        fix = format_override(key, False)
        yield Problem(f"{key}=true does not support pipeline parallelism (pp {layout.pp})", (fix,), key=key)


def _offloads_nothing(ctx: RuleContext) -> Problem | None:
    key, number = "model.cpu_offloading", "model.cpu_offloading_num_layers"
    if ctx.get(key) is not True or number in ctx.parsed.settings or ctx.case is None:
        return None
    fix = format_override(number, ctx.case.model.num_layers - 1)
    return Problem(f"{key}=true offloads nothing: {number} is 0", (fix,), key=key)


def _incomplete_recompute(ctx: RuleContext) -> Problem | None:
    settings = ctx.parsed.settings
    names = ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers")
    if not any(name in settings for name in names) or any(n in settings and settings[n].unresolved for n in names):
        return None
    row = bridge_recipe(ctx)
    before = row.recipe().layout if row else None
    full = before is not None and before.recompute == "full"
    granularity = get_value(settings, names[0], before.recompute if before else None)
    method = get_value(settings, names[1], "there" if full else None)
    get_int = get_value(settings, names[2], 1 if full else None)
    first = next(name for name in names if name in settings)
    if granularity == "full" and not (method and get_int):
        missing = " and ".join(name for name, setting in zip(names[1:], (method, get_int), strict=True) if not setting)
        fix = " ".join((format_override(names[1], "uniform"), format_override(names[2], 1)))
        return Problem(f"recompute_granularity=full needs {missing}", (fix,), key=first)
    if granularity == "selective" and (method or get_int):
        fix = " ".join((format_override(names[1], None), format_override(names[2], None)))
        return Problem(
            "recompute_granularity=selective takes neither recompute_method nor recompute_num_layers", (fix,), key=first
        )
    return None


def _conflicting_splits(ctx: RuleContext) -> Problem | None:
    settings = ctx.parsed.settings
    stage_layout = get_value(settings, "model.pipeline_model_parallel_layout")
    ends = [f"model.num_layers_in_{stage}_pipeline_stage" for stage in ("first", "last")]
    ends = [key for key in ends if get_value(settings, key)]
    if not stage_layout or not ends:
        return None
    return Problem(
        "pipeline_model_parallel_layout and layer counts of the first or last stage are exclusive",
        (format_override(ends[0], None),),
        key=ends[0],
    )


def _hierarchy(ctx: RuleContext) -> Problem | None:
    key = "model.hierarchical_context_parallel_sizes"
    sizes, cp = get_value(ctx.parsed.settings, key), ctx.recipe.layout.cp
    if not isinstance(sizes, list) or not all(isinstance(one, int) for one in sizes) or prod(sizes) == cp:
        return None
    return Problem(f"{key} multiply to {prod(sizes)}, not to context_parallel_size={cp}", (), key=key)


def _comm_types(ctx: RuleContext) -> Problem | None:
    comm_types, model = get_value(ctx.parsed.settings, "model.cp_comm_type"), ctx.case.model if ctx.case else None
    if not isinstance(comm_types, list) or model is None or ctx.recipe.layout.cp == 1:
        return None
    layers = ctx.recipe.architecture.layers or model.num_layers
    if len(comm_types) == layers:
        return None
    return Problem(f"cp_comm_type has {len(comm_types)} entries for {layers} layers", (), key="model.cp_comm_type")


def _conflicting_lengths(ctx: RuleContext) -> Iterator[Problem]:
    settings = ctx.parsed.settings
    for key in ("train.train_samples", "train.num_epochs"):
        if get_value(settings, key) and get_value(settings, "train.train_iters", "recipe") is not None:
            fix = ("train.train_iters=null", *(_warmup_in_samples(ctx) if "samples" in key else ()))
            yield Problem(f"{key} and train.train_iters are exclusive", fix, key=key)
    if get_value(settings, "train.num_epochs") and ctx.recipe.goal == "pretrain":
        yield Problem("train.num_epochs is supported for fine-tuning only", (), key="train.num_epochs")


def _warmup_in_samples(ctx: RuleContext) -> tuple[str, ...]:
    """Return the warmup in samples, which a length in samples requires; the recipe sets it in iterations."""
    row, key = bridge_recipe(ctx), "scheduler.lr_warmup_iters"
    warmup = get_value(ctx.parsed.settings, key, row.recipe().schedule.warmup_steps if row else 0)
    if not is_int(warmup) or warmup <= 0:
        return ()
    samples = warmup * max(1, ctx.recipe.train.global_batch_size)
    return format_override("scheduler.lr_warmup_samples", samples), format_override(key, 0)


def _schedule_units(ctx: RuleContext) -> Iterator[Problem]:
    settings, row = ctx.parsed.settings, bridge_recipe(ctx)
    base = row.recipe().schedule if row else None
    warmup = get_value(settings, "scheduler.lr_warmup_iters", base.warmup_steps if base else 0)
    yield from _other_units(ctx, {"scheduler.lr_warmup_iters": warmup})
    fraction = "scheduler.lr_warmup_fraction"
    if get_value(settings, fraction) and warmup:
        yield Problem(
            f"{fraction} and lr_warmup_iters={warmup} both set the warm-up",
            ("scheduler.lr_warmup_iters=0",),
            key=fraction,
        )
    max_steps, steps = get_int(ctx, "scheduler.max_steps"), ctx.recipe.train.steps
    if max_steps is not None and max_steps < steps:
        yield Problem(
            f"scheduler.max_steps={max_steps} is less than train_iters={steps}",
            (format_override("scheduler.max_steps", steps),),
            key="scheduler.max_steps",
        )


def _other_units(ctx: RuleContext, base: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield lengths of the schedule that are not in the unit of the training's length."""
    settings, keys = ctx.parsed.settings, UNIT_KEYS["megatron_bridge"].samples
    batch, in_samples = max(1, ctx.recipe.train.global_batch_size), counts_samples("megatron_bridge", settings)
    for steps, samples in list(keys.items())[1:]:
        wrong, right = (steps, samples) if in_samples else (samples, steps)
        length = get_value(settings, wrong, base.get(wrong) if in_samples else None)
        if not is_int(length) or length <= 0:
            continue
        unit, other = ("iterations", "train.train_samples") if in_samples else ("samples", "train.train_iters")
        instead = length * batch if in_samples else max(1, length // batch)
        off = format_override(wrong, 0 if "warmup" in wrong else None)
        fix = (off,) if get_value(settings, right) else (format_override(right, instead), off)
        yield Problem(f"{wrong}={length} is in {unit}, but the length is {other}", fix, key=wrong)


SAMPLES = ("scheduler.lr_decay_samples", "scheduler.lr_warmup_samples", "scheduler.lr_wsd_decay_samples")


def _warmup_capped(ctx: RuleContext) -> Problem | None:
    row, settings = bridge_recipe(ctx), ctx.parsed.settings
    decay = get_int(ctx, "scheduler.lr_decay_iters")
    warmup = get_value(settings, "scheduler.lr_warmup_iters", row.recipe().schedule.warmup_steps if row else 0)
    if not decay or not isinstance(warmup, int) or warmup < decay:
        return None
    key = "scheduler.lr_warmup_iters"
    return Problem(
        f"the warm-up of {warmup} iterations is truncated: the decay ends at {decay}",
        (format_override(key, max(decay // 10, 1)),),
        key=key if ctx.is_set(key) else "scheduler.lr_decay_iters",
    )


def _duplicate_evaluation(ctx: RuleContext) -> Iterator[Problem]:
    for name in ("eval_interval", "eval_iters"):
        older, newer = (get_value(ctx.parsed.settings, f"{section}.{name}") for section in ("train", "validation"))
        if older is not None and newer is not None and older != newer and uses_runner(ctx):
            yield Problem(
                f"train.{name}={older} overrides validation.{name}={newer}",
                (format_override(f"train.{name}", None),),
                key=f"validation.{name}",
            )


def _full_validation(ctx: RuleContext) -> Iterator[Problem]:
    for key in ("validation.full_validation", "dataset.full_validation"):
        if ctx.get(key) is True:
            yield Problem(
                f"{key} is rejected: evaluation length is set by eval_iters", (format_override(key, False),), key=key
            )


def _evaluation_batch(ctx: RuleContext) -> Problem | None:
    key = "validation.eval_global_batch_size"
    batch = get_int(ctx, key)
    if batch is None or ctx.cluster is None:
        return None
    layout = ctx.recipe.layout
    micro = get_int(ctx, "validation.eval_micro_batch_size") or layout.micro_batch_size
    ranks = ctx.cluster.world // (layout.tp * layout.pp * layout.cp) or 1
    if batch % (micro * ranks) == 0:
        return None
    return Problem(
        f"{key}={batch} is not a multiple of micro batch × data-parallel ranks = {micro} × {ranks}",
        (format_override(key, micro * ranks),),
        key=key,
    )


def _per_token_average(ctx: RuleContext) -> Problem | None:
    """A per-token loss cannot be averaged inside the collective."""
    settings, key = ctx.parsed.settings, "ddp.average_in_collective"
    tokens = get_value(settings, "model.calculate_per_token_loss")
    row = bridge_recipe(ctx)
    pretraining = row is not None and row.goal == "pretrain" and not row.recipe().train.per_token_loss
    averaged = get_value(settings, key, pretraining and not (row is not None and row.benchmark))
    if tokens is not True or averaged is not True:
        return None
    return Problem(
        "calculate_per_token_loss needs ddp.average_in_collective=false", (format_override(key, False),), key=key
    )


def _bias_needs_sigmoid(ctx: RuleContext) -> Problem | None:
    experts = ctx.case.model.moe if ctx.case is not None else None
    if get_value(ctx.parsed.settings, BIAS) is not True or experts is None:
        return None
    scores = ctx.parsed.settings.get(ROUTER_SCORES)
    if experts.balance_bias if scores is None else scores.unresolved or scores.value in BIAS_SCORES:
        return None
    fixes = (format_override(ROUTER_SCORES, BIAS_SCORES[0]), format_override(BIAS, False))
    return Problem(f"{BIAS}=true needs {ROUTER_SCORES}={BIAS_SCORES[0]}", fixes, key=BIAS)


def _unused_backend(ctx: RuleContext) -> Problem | None:
    key = "model.moe_flex_dispatcher_backend"
    if not (uses_runner(ctx) or ctx.is_set("recipe")) or get_value(ctx.parsed.settings, key) is None:
        return None
    if ctx.recipe.moe.dispatcher not in ("alltoall", "allgather"):
        return None
    return Problem(
        f"{key} is read only by the flex dispatcher",
        (format_override("model.moe_token_dispatcher_type", "flex"),),
        key=key,
    )


def _deterministic(ctx: RuleContext) -> Problem | None:
    key = "model.deterministic_mode"
    if ctx.get(key) is not True or ctx.is_set("--deterministic"):
        return None
    missing = []
    if "NCCL_ALGO" not in ctx.parsed.env and not ctx.is_set("env_vars.NCCL_ALGO"):
        missing.append("NCCL_ALGO in the environment")
    if ctx.get("model.cross_entropy_loss_fusion", True) is not False:
        missing.append("model.cross_entropy_loss_fusion=false")
    if not missing:
        return None
    fix = ("--deterministic",) if uses_runner(ctx) else ("model.cross_entropy_loss_fusion=false", "NCCL_ALGO=Ring")
    return Problem(f"deterministic_mode needs {' and '.join(missing)}", fix, key=key)


RULES = (
    rule(
        "offloaded-layers", "error", ("model.cpu_offloading",), _offloaded_layers,
        "ValueError about CPU offloading while the model's config is built",
        "offloaded activations are prefetched in the order of a plain backward pass",
    ),
    rule(
        "offloads-nothing", "warning", ("model.cpu_offloading", "model.cpu_offloading_num_layers"), _offloads_nothing,
        "memory as without offloading",
        "the number of offloaded layers is 0 by default",
    ),
    rule(
        "incomplete-recompute", "error", ("model.recompute_granularity",), _incomplete_recompute,
        "ValueError when the model config is finalized",
        "full recompute needs a method and a layer count, selective recompute takes modules",
    ),
    rule(
        "two-splits", "error", ("model.pipeline_model_parallel_layout",), _conflicting_splits,
        "ValueError when the model config is finalized",
        "stages are given as a layout string or as layer counts",
    ),
    rule(
        "hierarchy", "error", ("model.hierarchical_context_parallel_sizes",), _hierarchy,
        "AssertionError: the sizes must multiply to the context-parallel size",
        "every level partitions the context-parallel ranks",
    ),
    rule(
        "cp-comm-types", "error", ("model.cp_comm_type",), _comm_types,
        "AssertionError about the length of cp_comm_type",
        "a list has one entry per layer",
    ),
    rule(
        "two-lengths", "error", ("train.train_samples", "train.num_epochs"), _conflicting_lengths,
        "AssertionError: only one of them may be set",
        "every recipe sets train_iters; another length needs train_iters=null",
    ),
    rule(
        "schedule-units", "error", ("scheduler.lr_warmup_fraction", *SAMPLES), _schedule_units,
        "AssertionError from the scheduler section",
        "a schedule uses iterations or samples, and recipes set a warm-up in iterations",
    ),
    rule(
        "warmup-capped", "warning", ("scheduler.lr_warmup_iters", "scheduler.lr_decay_iters"), _warmup_capped,
        "a warning, and a warm-up that ends one sample before the decay",
        "the warm-up was chosen for a longer run",
    ),
    rule(
        "duplicate-evaluation", "warning", ("validation.eval_iters", "validation.eval_interval"), _duplicate_evaluation,
        "a deprecation warning; the older value is used",
        "the fields moved from train to validation, and the old ones overwrite the new ones",
    ),
    rule(
        "full-validation", "error", ("validation.full_validation",), _full_validation,
        "ValueError from validate",
        "evaluation runs a fixed number of batches",
    ),
    rule(
        "evaluation-batch", "error", ("validation.eval_global_batch_size",), _evaluation_batch,
        "AssertionError about eval_global_batch_size",
        "every data-parallel rank evaluates the same integer number of micro batches",
    ),
    rule(
        "per-token-average", "error", ("ddp.average_in_collective",), _per_token_average,
        "AssertionError: cannot average in collective when calculating per-token loss",
        "ranks have different numbers of tokens, and pretraining recipes average over ranks",
    ),
    rule(
        "bias-needs-sigmoid", "error", (BIAS, ROUTER_SCORES), _bias_needs_sigmoid,
        "ValueError about the expert bias while the model's config is built",
        "the bias applies to independent per-expert scores, and the recipe's are a softmax",
    ),
    rule(
        "unused-backend", "warning", ("model.moe_flex_dispatcher_backend",), _unused_backend,
        "the other dispatcher runs",
        "only the flex dispatcher has backends",
    ),
    rule(
        "deterministic", "error", ("model.deterministic_mode",), _deterministic,
        "AssertionError about NCCL_ALGO or the fused cross-entropy",
        "deterministic reductions need a fixed NCCL algorithm, and the fused loss is not deterministic",
    ),
)  # fmt: skip

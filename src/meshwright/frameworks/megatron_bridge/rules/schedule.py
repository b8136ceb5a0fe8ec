"""Recompute, pipelines, lengths, schedules and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge.format_override import spell
from meshwright.frameworks.megatron_bridge.parsed_config import value
from meshwright.frameworks.megatron_bridge.rules.common import command, number, rule, shipped


def _half_recompute(ctx: RuleContext) -> Problem | None:
    settings = ctx.parsed.settings
    names = ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers")
    if not any(name in settings for name in names) or any(n in settings and settings[n].unresolved for n in names):
        return None
    row = shipped(ctx)
    before = row.recipe().layout if row else None
    full = before is not None and before.recompute == "full"
    granularity = value(settings, names[0], before.recompute if before else None)
    method = value(settings, names[1], "there" if full else None)
    number = value(settings, names[2], 1 if full else None)
    place = next(name for name in names if name in settings)
    if granularity == "full" and not (method and number):
        missing = " and ".join(name for name, setting in zip(names[1:], (method, number), strict=True) if not setting)
        fix = " ".join((spell(names[1], "uniform"), spell(names[2], 1)))
        return Problem(f"full recompute needs {missing}", (fix,), key=place)
    if granularity == "selective" and (method or number):
        fix = " ".join((spell(names[1], None), spell(names[2], None)))
        return Problem("selective recompute takes neither recompute_method nor recompute_num_layers", (fix,), key=place)
    return None


def _two_splits(ctx: RuleContext) -> Problem | None:
    settings = ctx.parsed.settings
    drawn = value(settings, "model.pipeline_model_parallel_layout")
    ends = [f"model.num_layers_in_{place}_pipeline_stage" for place in ("first", "last")]
    ends = [key for key in ends if value(settings, key)]
    if not drawn or not ends:
        return None
    return Problem(
        "the stages are drawn and their layers are counted; say one of the two", (spell(ends[0], None),), key=ends[0]
    )


def _hierarchy(ctx: RuleContext) -> Problem | None:
    key = "model.hierarchical_context_parallel_sizes"
    sizes, cp = value(ctx.parsed.settings, key), ctx.recipe.layout.cp
    if not isinstance(sizes, list) or not all(isinstance(one, int) for one in sizes) or prod(sizes) == cp:
        return None
    return Problem(f"{key} multiply to {prod(sizes)}, context_parallel_size is {cp}", (), key=key)


def _rings(ctx: RuleContext) -> Problem | None:
    rings, model = value(ctx.parsed.settings, "model.cp_comm_type"), ctx.case.model if ctx.case else None
    if not isinstance(rings, list) or model is None or ctx.recipe.layout.cp == 1:
        return None
    layers = ctx.recipe.architecture.layers or model.num_layers
    if len(rings) == layers:
        return None
    return Problem(f"cp_comm_type lists {len(rings)} layers of {layers}", (), key="model.cp_comm_type")


def _two_lengths(ctx: RuleContext) -> Iterator[Problem]:
    settings = ctx.parsed.settings
    for key in ("train.train_samples", "train.num_epochs"):
        if value(settings, key) and value(settings, "train.train_iters", "recipe") is not None:
            yield Problem(f"{key} and train.train_iters exclude each other", ("train.train_iters=null",), key=key)
    if value(settings, "train.num_epochs") and ctx.recipe.goal == "pretrain":
        yield Problem("epochs are counted on fine-tuning data only", (), key="train.num_epochs")


def _schedule_units(ctx: RuleContext) -> Iterator[Problem]:
    settings, row = ctx.parsed.settings, shipped(ctx)
    warmup = value(settings, "scheduler.lr_warmup_iters", row.recipe().schedule.warmup_steps if row else 0)
    samples = [key for key in SAMPLES if value(settings, key)]
    decay = value(settings, "scheduler.lr_decay_iters")
    if samples and (warmup or decay):
        yield Problem(
            f"{samples[0]} counts samples, the rest of the schedule iterations",
            ("scheduler.lr_warmup_iters=0",),
            key=samples[0],
        )
    fraction = "scheduler.lr_warmup_fraction"
    if value(settings, fraction) and warmup:
        yield Problem(
            f"the warm-up is given as a fraction and as {warmup} iterations",
            ("scheduler.lr_warmup_iters=0",),
            key=fraction,
        )
    most, steps = number(ctx, "scheduler.max_steps"), ctx.recipe.train.steps
    if most is not None and most < steps:
        yield Problem(
            f"scheduler.max_steps={most} is less than train_iters={steps}",
            (spell("scheduler.max_steps", steps),),
            key="scheduler.max_steps",
        )


SAMPLES = ("scheduler.lr_decay_samples", "scheduler.lr_warmup_samples", "scheduler.lr_wsd_decay_samples")


def _warmup_capped(ctx: RuleContext) -> Problem | None:
    row, settings = shipped(ctx), ctx.parsed.settings
    decay = number(ctx, "scheduler.lr_decay_iters")
    warmup = value(settings, "scheduler.lr_warmup_iters", row.recipe().schedule.warmup_steps if row else 0)
    if not decay or not isinstance(warmup, int) or warmup < decay:
        return None
    key = "scheduler.lr_warmup_iters"
    return Problem(
        f"the warm-up of {warmup} iterations is cut: the decay ends at {decay}",
        (spell(key, max(decay // 10, 1)),),
        key=key if ctx.is_set(key) else "scheduler.lr_decay_iters",
    )


def _evaluation_twice(ctx: RuleContext) -> Iterator[Problem]:
    for name in ("eval_interval", "eval_iters"):
        older, newer = (value(ctx.parsed.settings, f"{section}.{name}") for section in ("train", "validation"))
        if older is not None and newer is not None and older != newer and command(ctx):
            yield Problem(
                f"train.{name}={older} wins over validation.{name}={newer}",
                (spell(f"train.{name}", None),),
                key=f"validation.{name}",
            )


def _full_validation(ctx: RuleContext) -> Iterator[Problem]:
    for key in ("validation.full_validation", "dataset.full_validation"):
        if ctx.get(key) is True:
            yield Problem(f"{key} is refused: evaluation is as long as eval_iters", (spell(key, False),), key=key)


def _evaluation_batch(ctx: RuleContext) -> Problem | None:
    key = "validation.eval_global_batch_size"
    batch = number(ctx, key)
    if batch is None or ctx.cluster is None:
        return None
    layout = ctx.recipe.layout
    micro = number(ctx, "validation.eval_micro_batch_size") or layout.micro_batch_size
    ranks = ctx.cluster.world // (layout.tp * layout.pp * layout.cp) or 1
    if batch % (micro * ranks) == 0:
        return None
    return Problem(
        f"{key}={batch} is not a multiple of micro batch × data ranks = {micro} × {ranks}",
        (spell(key, micro * ranks),),
        key=key,
    )


def _averaged_per_token(ctx: RuleContext) -> Problem | None:
    """The loss per token cannot be averaged inside the collective."""
    settings, key = ctx.parsed.settings, "ddp.average_in_collective"
    tokens = value(settings, "model.calculate_per_token_loss")
    row = shipped(ctx)
    pretraining = row is not None and row.goal == "pretrain" and not row.recipe().train.per_token_loss
    averaged = value(settings, key, pretraining and not (row is not None and row.benchmark))
    if tokens is not True or averaged is not True:
        return None
    return Problem("a loss per token is not averaged in the collective", (spell(key, False),), key=key)


def _unused_backend(ctx: RuleContext) -> Problem | None:
    key = "model.moe_flex_dispatcher_backend"
    if not (command(ctx) or ctx.is_set("recipe")) or value(ctx.parsed.settings, key) is None:
        return None
    if ctx.recipe.moe.dispatcher not in ("alltoall", "allgather"):
        return None
    return Problem(
        f"{key} is only read by the flex dispatcher",
        (spell("model.moe_token_dispatcher_type", "flex"),),
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
    fix = ("--deterministic",) if command(ctx) else ("model.cross_entropy_loss_fusion=false", "NCCL_ALGO=Ring")
    return Problem(f"deterministic_mode needs {' and '.join(missing)}", fix, key=key)


RULES = (
    rule(
        "half-recompute", "error", ("model.recompute_granularity",), _half_recompute,
        "ValueError when the model's config is finished",
        "full recompute is told how and how much, selective recompute which modules",
    ),
    rule(
        "two-splits", "error", ("model.pipeline_model_parallel_layout",), _two_splits,
        "ValueError when the model's config is finished",
        "either the stages are drawn or their layers are counted",
    ),
    rule(
        "hierarchy", "error", ("model.hierarchical_context_parallel_sizes",), _hierarchy,
        "an assertion that the sizes multiply to the context-parallel size",
        "each rank has one place in every level",
    ),
    rule(
        "rings", "error", ("model.cp_comm_type",), _rings,
        "an assertion about the length of cp_comm_type",
        "a list has one entry per layer",
    ),
    rule(
        "two-lengths", "error", ("train.train_samples", "train.num_epochs"), _two_lengths,
        "an assertion that only one of them is set",
        "every recipe sets train_iters; another measure of the run needs it gone",
    ),
    rule(
        "schedule-units", "error", ("scheduler.lr_warmup_fraction", *SAMPLES), _schedule_units,
        "an assertion from the scheduler section",
        "a schedule counts iterations or samples, and recipes bring a warm-up in iterations",
    ),
    rule(
        "warmup-capped", "warning", ("scheduler.lr_warmup_iters", "scheduler.lr_decay_iters"), _warmup_capped,
        "a warning, and a warm-up that ends one sample before the decay",
        "the warm-up was made for a longer run",
    ),
    rule(
        "evaluation-twice", "warning", ("validation.eval_iters", "validation.eval_interval"), _evaluation_twice,
        "a deprecation warning, and the older value in use",
        "the fields moved from train to validation, and the old ones are copied over",
    ),
    rule(
        "full-validation", "error", ("validation.full_validation",), _full_validation,
        "ValueError from validate",
        "evaluation runs a fixed number of batches",
    ),
    rule(
        "evaluation-batch", "error", ("validation.eval_global_batch_size",), _evaluation_batch,
        "an assertion about eval_global_batch_size",
        "every data rank evaluates the same whole number of micro batches",
    ),
    rule(
        "averaged-per-token", "error", ("ddp.average_in_collective",), _averaged_per_token,
        "an assertion: cannot average in collective when calculating per-token loss",
        "ranks have different numbers of tokens, and pretraining recipes average over ranks",
    ),
    rule(
        "unused-backend", "warning", ("model.moe_flex_dispatcher_backend",), _unused_backend,
        "the other dispatcher runs",
        "a backend belongs to the flex dispatcher",
    ),
    rule(
        "deterministic", "error", ("model.deterministic_mode",), _deterministic,
        "an assertion about NCCL_ALGO or the fused cross-entropy",
        "repeatable sums need one algorithm, and the fused loss is not repeatable",
    ),
)  # fmt: skip

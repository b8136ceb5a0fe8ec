"""DeepSpeed's rules on batch sizes, numeric ranges and dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.common import INFINITE, Ranges, new_batch, range_rule
from meshwright.frameworks.deepspeed.format_override import format_setting
from meshwright.frameworks.deepspeed.parse import BATCH, batch_sizes, data_ranks
from meshwright.frameworks.deepspeed.rules.common import STAGE, is_on, stage_of
from meshwright.frameworks.framework import FrameworkRule, ParsedConfig, Problem, RuleContext
from meshwright.recipes.types import Recipe
from meshwright.rules.search_values import nearest_split


def _batch_size_missing(ctx: RuleContext) -> Problem | None:
    if any(ctx.is_set(key) for key in BATCH[:2]):
        return None
    return Problem(
        "neither train_batch_size nor train_micro_batch_size_per_gpu is set",
        (format_setting(BATCH[1], 1), '"train_micro_batch_size_per_gpu": "auto" under transformers or accelerate'),
    )


def _batch_arithmetic(ctx: RuleContext) -> Problem | None:
    """The product must be exact; without the number of GPUs only divisibility can be checked."""
    batch, micro, steps = batch_sizes(ctx.parsed.settings)
    world = ctx.cluster.world if ctx.cluster else ctx.parsed.gpu_request.count
    if batch is None or fits_ranks(ctx.recipe, ctx.parsed, world):
        return None
    ranks = data_ranks(ctx.recipe, ctx.parsed, world) if world else 1
    per_step = (micro or 1) * (steps or 1) * ranks
    exact = world is not None and micro is not None and steps is not None
    parts = [f"micro batch {micro}" if micro else "", f"accumulation {steps}" if steps else ""]
    parts = [part for part in (*parts, f"{ranks} data-parallel ranks" if world else "") if part]
    product = " × ".join(parts) + (f" = {per_step}" if len(parts) > 1 else "")
    changed = _split(batch, micro, steps, ranks)
    kept = f"; {format_setting(BATCH[0], per_step)} keeps both sizes" if exact and BATCH[0] in changed else ""
    return Problem(
        f"train_batch_size={batch} is not {'' if exact else 'a multiple of '}{product}"
        f"{new_batch(batch, changed.get(BATCH[0], batch))}{kept}",
        tuple(format_setting(key, value) for key, value in changed.items()),
        key="train_batch_size",
    )


def fits_ranks(recipe: Recipe, parsed: ParsedConfig, world: int | None) -> bool:
    """Return whether the batch sizes of a config agree on so many processes, as far as both are known.

    Sizes that are auto or known only at run time are positive integers: the others have to divide the batch anyway.
    """
    batch, micro, steps = batch_sizes(parsed.settings)
    if batch is None or recipe.layout.tp > 1:
        return True
    per_step = (micro or 1) * (steps or 1) * (data_ranks(recipe, parsed, world) if world else 1)
    exact = world is not None and micro is not None and steps is not None
    return batch == per_step if exact else batch % per_step == 0


def sizes_for(recipe: Recipe, parsed: ParsedConfig, world: int) -> str:
    """Return the settings with which a config fits so many processes."""
    batch, micro, steps = batch_sizes(parsed.settings)
    changed = {} if batch is None else _split(batch, micro, steps, data_ranks(recipe, parsed, world))
    return " ".join(format_setting(key, value) for key, value in changed.items())


def _split(batch: int, micro: int | None, steps: int | None, ranks: int) -> dict[str, int]:
    """Return the sizes that change, by key: another number of accumulation steps first, then another micro batch."""
    if micro is None and steps is not None:
        kept, rounds = nearest_split(batch, steps, ranks)
        found = {BATCH[0]: kept, BATCH[2]: rounds}
    else:
        size = micro or 1
        kept, least = (batch, size) if batch % (size * ranks) == 0 else nearest_split(batch, size, ranks)
        found = {BATCH[0]: kept, BATCH[1]: least, BATCH[2]: kept // (least * ranks)}
    before = {BATCH[0]: batch, BATCH[1]: micro, BATCH[2]: steps}
    return {key: value for key, value in found.items() if before[key] not in (None, value)}


def _two_dtypes(ctx: RuleContext) -> Problem | None:
    half = next((key for key in ("bf16.enabled", "bfloat16.enabled") if is_on(ctx, key)), "")
    if not half or not is_on(ctx, "fp16.enabled"):
        return None
    return Problem("bf16 and fp16 are both enabled", (format_setting("fp16.enabled", False),), key="fp16.enabled")


def _dtype_needs_zero(ctx: RuleContext) -> Iterator[Problem]:
    keys = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads")
    for key in keys:
        if is_on(ctx, key) and stage_of(ctx) == 0:
            yield Problem(f"{key} requires ZeRO stage 1, 2 or 3", (format_setting(STAGE, 1),), key=key)
    if is_on(ctx, keys[1]) and not is_on(ctx, keys[0]):
        yield Problem(f"{keys[1]} requires {keys[0]}", (format_setting(keys[0], True),), key=keys[1])


def _gradient_dtype(ctx: RuleContext) -> Problem | None:
    dtype, key = ctx.get("data_types.grad_accum_dtype"), "data_types.grad_accum_dtype"
    open_ = any(ctx.is_set(each) and ctx.get(each) is None for each in ("bf16.enabled", "fp16.enabled"))
    if dtype is None or stage_of(ctx) != 0 or open_:
        return None
    half = "bf16" if is_on(ctx, "bf16.enabled") or is_on(ctx, "bfloat16.enabled") else ""
    params = half or ("fp16" if is_on(ctx, "fp16.enabled") else "fp32")
    if dtype == params:
        return None
    return Problem(
        f"grad_accum_dtype={dtype} with {params} parameters requires ZeRO", (format_setting(STAGE, 1),), key=key
    )


AT_LEAST_0 = (0.0, INFINITE, False)
RANGES: Ranges = {
    "scheduler.params.warmup_num_steps": AT_LEAST_0,  # DeepSpeed warms up for at least 2 steps
    "zero_optimization.reduce_bucket_size": (0.0, INFINITE, True),
    "fp16.loss_scale": AT_LEAST_0,
    **dict.fromkeys(
        (
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.sub_group_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
            "zero_optimization.zero_hpz_partition_size",
        ),
        AT_LEAST_0,
    ),
    "zero_optimization.offload_optimizer.ratio": (0.0, 1.0, False),
}


RULES = (
    FrameworkRule("deepspeed.no-batch-size", "error", BATCH[:2], _batch_size_missing,
        symptom="AssertionError: either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
        cause="batch, micro batch and accumulation steps can be derived only if one of these two is set"),
    FrameworkRule("deepspeed.batch-arithmetic", "error", BATCH, _batch_arithmetic,
        symptom="AssertionError: train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size",
        cause="every rank runs exactly gradient_accumulation_steps micro batches per step; nothing is rounded",
        supersedes=("batch.divides", "batch.smaller-than-data-parallel")),
    range_rule("deepspeed", RANGES, format_setting, "AssertionError or ValidationError while the config is read"),
    FrameworkRule("deepspeed.two-dtypes", "error", ("fp16.enabled",), _two_dtypes,
        symptom="AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled",
        cause="parameters have one dtype"),
    FrameworkRule("deepspeed.dtype-needs-zero", "error", (), _dtype_needs_zero,
        symptom="AssertionError: … is only supported with ZeRO Stage 1, 2, or 3",
        cause="only ZeRO's optimizers manage the master weights; without ZeRO they are always fp32"),
    FrameworkRule("deepspeed.gradient-dtype", "error", ("data_types.grad_accum_dtype",), _gradient_dtype,
        symptom="NotImplementedError: unsupported mix of model_dtype and grad_accum_dtype",
        cause="without ZeRO, gradients are torch's own and have the parameter dtype"),
)  # fmt: skip

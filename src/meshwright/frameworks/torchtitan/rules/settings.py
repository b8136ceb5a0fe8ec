"""Names that are not there, and settings that torchtitan refuses, ignores or changes by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from meshwright.errors import closest
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.torchtitan.models import ELSEWHERE, FLAVORS, PRESETS, plain, positions_of
from meshwright.frameworks.torchtitan.rules.common import (
    CP,
    EP,
    FLAVOR,
    MODE,
    NAME,
    OPTION,
    PP,
    TP,
    custom,
    degree,
    in_tokens,
    rule,
    today,
)
from meshwright.recipes.key_maps.torchtitan import CONTEXT_LENGTH, DATASETS
from meshwright.recipes.key_maps.torchtitan import CONVERTERS as CONVERTER_NAMES

FLOAT8_SINCE = 8.9
"""The first CUDA compute capability with float8."""


def _unknown_model(ctx: RuleContext) -> Problem | None:
    name, flavor = str(ctx.get(NAME)), str(ctx.get(FLAVOR))
    if today(ctx) or custom(ctx) or name in ELSEWHERE or "." in name:
        return None
    if name not in FLAVORS:
        known = ", ".join(FLAVORS)
        fix = tuple(ctx.framework.format_setting(NAME, near) for near in closest(name, FLAVORS, 1))
        return Problem(f"torchtitan has no model {name}; it has {known}", fix, key=NAME)
    if plain(flavor) in FLAVORS[name] or not ctx.is_set(FLAVOR) or ctx.parsed.model is not None:
        return None  # or one of the user's own, whose shape was given
    fix = tuple(ctx.framework.format_setting(FLAVOR, near) for near in _near_flavor(flavor, FLAVORS[name]))
    known = ", ".join(FLAVORS[name])
    return Problem(f"{name} has no flavor {flavor}; it has {known} (--model NAME for one of your own)", fix, key=FLAVOR)


def _near_flavor(flavor: str, known: Any) -> list[str]:
    same = [name for name in known if name.lower() == flavor.lower()]
    return same or closest(flavor, known, 1)


def _unknown_data(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get("training.dataset"))
    if (
        custom(ctx)
        or not ctx.is_set("training.dataset")
        or str(ctx.get(NAME)) not in FLAVORS
        or ctx.get(NAME) == "flux"
    ):
        return None
    if name in DATASETS or ctx.get("job.custom_config_module"):
        return None
    return Problem(
        f"no data set {name}: torchtitan knows {', '.join(DATASETS)}, and those a module of yours registers",
        (ctx.framework.format_setting("training.dataset", "c4"),),
    )


def _unknown_optimizer(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get("optimizer.name"))
    near = [known for known in ("AdamW", "Adam") if known != name and known.lower() == name.lower()]
    if not near or custom(ctx):
        return None
    return Problem(
        f"there is no optimizer {name}: names are looked up exactly",
        (ctx.framework.format_setting("optimizer.name", near[0]),),
    )


def _budget_uncompiled(ctx: RuleContext) -> Problem | None:
    if ctx.get(MODE) != "memory_budget" or ctx.recipe.kernels.compile:
        return None
    fix = (
        ctx.framework.format_setting("compile.enable", True),
        ctx.framework.format_setting("compile.components", ["model", "loss"]),
    )
    return Problem("a memory budget is kept by the compiler, and the model is not compiled", fix, key=MODE)


def _recompute_option(ctx: RuleContext) -> Problem | None:
    option = ctx.get(OPTION)
    if ctx.get(MODE) != "selective" or not ctx.is_set(OPTION) or re.fullmatch("op|[0-9]+", str(option)):
        return None
    return Problem(
        f"{OPTION}={option}: op, or how often a layer is recomputed",
        (ctx.framework.format_setting(OPTION, "op"),),
        key=OPTION,
    )


def _budget_unread(ctx: RuleContext) -> Problem | None:
    key = "activation_checkpoint.memory_budget"
    if not ctx.is_set(key) or ctx.get(MODE) == "memory_budget" or ctx.get(key) == 0.5:
        return None
    return Problem(
        f"{key} is read in mode memory_budget, and the mode is {ctx.get(MODE)}",
        (ctx.framework.format_setting(MODE, "memory_budget"),),
    )


def _emulated(ctx: RuleContext) -> Problem | None:
    key = "quantize.linear.float8.emulate"
    if ctx.get(key) is not True or not ctx.recipe.kernels.compile or CONVERTER_NAMES[0] not in _converters(ctx):
        return None
    older = ctx.cluster is not None and ctx.cluster.gpu.capability < FLOAT8_SINCE
    fix = (ctx.framework.format_setting(key, False), ctx.framework.format_setting("compile.enable", False))
    if older:
        return Problem("emulated float8 is refused in a compiled model on GPUs without float8", fix, severity="error")
    return Problem("emulated float8 computes in higher precision: nothing gets faster", fix[:1])


def _converters(ctx: RuleContext) -> list[str]:
    found = ctx.get("model.converters", [])
    return [str(name) for name in found] if isinstance(found, list) else [str(found)]


def _recipe_and_gather(ctx: RuleContext) -> Problem | None:
    gather, recipe = "quantize.linear.float8.enable_fsdp_float8_all_gather", "quantize.linear.float8.recipe_name"
    if ctx.get(gather) is not True or not ctx.get(recipe) or CONVERTER_NAMES[0] not in _converters(ctx):
        return None
    return Problem(
        f"{gather} is for scaling without a recipe name, and {recipe}={ctx.get(recipe)}",
        (ctx.framework.format_setting(gather, False),),
        key=gather,
    )


def _quantize_unread(ctx: RuleContext) -> Iterator[Problem]:
    """Settings that switch something on in a table that no converter reads."""
    for table in CONVERTER_NAMES:
        if table in _converters(ctx):
            continue
        for key in ctx.keys_under(table):
            if ctx.get(key) is True or (key == "quantize.linear.float8.recipe_name" and ctx.get(key)):
                fix = (ctx.framework.format_setting("model.converters", [*_converters(ctx), table]),)
                yield Problem(
                    f"{key} is read by the converter {table}, which model.converters does not list", fix, key=key
                )


def _converter_layout(ctx: RuleContext) -> Iterator[Problem]:
    """Axes and company that a converter does not stand."""
    listed, key = _converters(ctx), "model.converters"
    if today(ctx):
        return
    if CONVERTER_NAMES[2] in listed:
        for axis, degree_key in (("a pipeline", PP), ("context parallelism", CP)):
            if degree(ctx, degree_key) > 1:
                fix = (ctx.framework.format_setting(key, [name for name in listed if name != CONVERTER_NAMES[2]]),)
                yield Problem(f"{CONVERTER_NAMES[2]} does not run with {axis}", fix, key=key)
    if CONVERTER_NAMES[1] in listed and degree(ctx, TP) > 1 and ctx.recipe.kernels.compile:
        fix = (ctx.framework.format_setting("compile.components", ["loss"]),)
        yield Problem(f"{CONVERTER_NAMES[1]} with tensor parallelism does not run in a compiled model", fix, key=key)
    formats = sorted({name.rpartition(".")[2] for name in listed if name in CONVERTER_NAMES})
    if len(formats) > 1:
        yield Problem(f"converters of one format are taken, not of {' and '.join(formats)}", key=key)


def _one_checkpoint(ctx: RuleContext) -> Problem | None:
    key = "checkpoint.keep_latest_k"
    if ctx.get(key) != 1 or not (today(ctx) or ctx.get("checkpoint.enable") is True):
        return None
    return Problem(
        "one checkpoint is too few: the last may be half written; 0 keeps all", (ctx.framework.format_setting(key, 2),)
    )


def _more_than_weights(ctx: RuleContext) -> Iterator[Problem]:
    if not today(ctx) and ctx.get("checkpoint.enable") is not True:
        return  # today it is asked of configs that save nothing, too
    for folder, only in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ):
        if ctx.get(f"checkpoint.{folder}") is True and ctx.get(f"checkpoint.{only}") is False:
            message = f"checkpoint.{folder} needs checkpoint.{only}: such a folder holds weights and nothing else"
            yield Problem(
                message, (ctx.framework.format_setting(f"checkpoint.{only}", True),), key=f"checkpoint.{only}"
            )


def _relative_path(ctx: RuleContext) -> Problem | None:
    key = "checkpoint.initial_load_path"
    path = ctx.get(key)
    if not today(ctx) or not isinstance(path, str) or not path or path.startswith("/") or "://" in path:
        return None
    return Problem(f"{key}={path} is taken from the root or by a URI, not from where the job starts")


def _async_uncompiled(ctx: RuleContext) -> Problem | None:
    """Asked before anything is known of tensor ranks."""
    key = "compile.enable_async_tensor_parallel"
    if not today(ctx) or ctx.get(key) is not True or ctx.recipe.kernels.compile:
        return None
    return Problem(
        "async tensor parallelism needs a compiled model", (ctx.framework.format_setting("compile.enable", True),)
    )


def _early_step(ctx: RuleContext) -> Iterator[Problem]:
    key = "optimizer.early_step_in_backward"
    if ctx.get(key) is not True:
        return
    off = (ctx.framework.format_setting(key, False),)
    for other, axis in ((PP, "a pipeline"), (EP, "expert parallelism")):
        if degree(ctx, other) > 1:
            yield Problem(f"the optimizer cannot step in the backward pass with {axis}", off, key=key)


def _early_step_unclipped(ctx: RuleContext) -> Problem | None:
    key, norm = "optimizer.early_step_in_backward", ctx.get("training.max_norm")
    if ctx.get(key) is not True or not isinstance(norm, int | float) or norm <= 0:
        return None
    if max(degree(ctx, PP), degree(ctx, EP)) > 1:
        return None  # which is refused anyway
    return Problem(f"training.max_norm={norm} clips nothing: gradients are used up in the backward pass", key=key)


def _type_checked(ctx: RuleContext) -> Problem | None:
    key = "debug.spmd_typechecking"
    if ctx.get(key) is not True:
        return None
    if degree(ctx, PP) > 1:
        return Problem("type checking does not run with a pipeline", ("--debug.no_spmd_typechecking",), key=key)
    preset = PRESETS.get(str(ctx.get("module")), {}).get(str(ctx.get("config")))
    if ctx.get(MODE) == "selective" and preset is not None and preset.kernel == "flex":
        fix = ("--debug.no_spmd_typechecking", "activation-checkpoint:full")
        return Problem("type checking does not run with selective recompute and FlexAttention", fix, key=key)
    return None


def _batch_invariant(ctx: RuleContext) -> Problem | None:
    key = "debug.batch_invariant"
    return (
        Problem("batch invariance is for inference", ("--debug.no_batch_invariant",), key=key)
        if ctx.get(key) is True
        else None
    )


def _beyond_positions(ctx: RuleContext) -> Problem | None:
    most = positions_of(str(ctx.get("module")), str(ctx.get("config")))
    key = CONTEXT_LENGTH if in_tokens(ctx) else "training.seq_len"
    length = ctx.recipe.data.seq_length
    if not today(ctx) or most is None or length <= most:
        return None
    message = f"{key}={length} is longer than the {most} positions of {ctx.get('config')}"
    return Problem(message, (f"--{key}={most}",), key=key)


def _decay_cut(ctx: RuleContext) -> Problem | None:
    ratio, steps, warmup = (
        ctx.get("lr_scheduler.decay_ratio"),
        ctx.get("training.steps"),
        ctx.get("lr_scheduler.warmup_steps"),
    )
    if isinstance(ratio, bool) or not all(isinstance(v, int | float) for v in (ratio, steps, warmup)):
        return None
    total = ctx.get("lr_scheduler.total_steps") or steps
    if not isinstance(total, int) or not ratio >= 0 or warmup >= total:
        return None
    if warmup + round(total * min(ratio, 1)) <= total:
        return None
    return Problem(
        f"{warmup} warm-up steps and a decay over {ratio:g} of {total} steps do not fit; the decay is cut short",
        (ctx.framework.format_setting("lr_scheduler.decay_ratio", round(1 - warmup / total, 4)),),
    )


def _total_steps(ctx: RuleContext) -> Problem | None:
    """The schedule does not end at its last step: a linear decay goes on below zero."""
    key = "lr_scheduler.total_steps"
    total, steps, shape = ctx.get(key), ctx.get("training.steps"), ctx.get("lr_scheduler.decay_type")
    if isinstance(total, bool) or not isinstance(total, int) or not isinstance(steps, int) or not 0 < total < steps:
        return None
    ratio, warmup = ctx.get("lr_scheduler.decay_ratio"), ctx.get("lr_scheduler.warmup_steps")
    if ratio == 0 or (isinstance(warmup, int) and warmup >= total):
        then = f"the training stops with an error at step {total + 2}: no decay is left"
    elif shape == "cosine":
        then = "the rate rises again"
    else:
        then = "the rate is below zero, and the loss is climbed"
    return Problem(
        f"{key}={total} ends before training.steps={steps}: from then on {then}",
        (ctx.framework.format_setting(key, steps),),
    )


def _estimated(ctx: RuleContext) -> Problem | None:
    key = "memory_estimation.enable"
    used = [axis for axis, name in (("tp", TP), ("pp", PP), ("cp", CP), ("ep", EP)) if degree(ctx, name) > 1]
    used += ["compile"] if ctx.get("compile.enable") is True else []
    if ctx.get(key) is not True or not used:
        return None
    return Problem(f"their estimate of memory knows FSDP and HSDP only, not {', '.join(used)}", key=key)


RULES = (
    rule(
        "model-name",
        "error",
        (NAME, FLAVOR),
        _unknown_model,
        "KeyError or a list of the models there are",
        "models are looked up by name and flavor in a table of the program",
    ),
    rule(
        "dataset-name",
        "error",
        ("training.dataset",),
        _unknown_data,
        "ValueError that lists the data sets there are",
        "data sets are looked up by name; a path alone does not say how to read one",
    ),
    rule(
        "optimizer-name",
        "error",
        ("optimizer.name",),
        _unknown_optimizer,
        "NotImplementedError that names the optimizer",
        "optimizers are looked up by their exact name",
    ),
    rule(
        "memory-budget",
        "error",
        (MODE,),
        _budget_uncompiled,
        "ValueError: the model must be compiled",
        "the compiler decides what to recompute within the budget",
    ),
    rule(
        "recompute-option",
        "error",
        (OPTION,),
        _recompute_option,
        "ValueError: invalid selective AC option",
        "selective recompute is by operation or by every nth layer",
    ),
    rule(
        "memory-budget-ignored",
        "warning",
        ("activation_checkpoint.memory_budget",),
        _budget_unread,
        "nothing changes",
        "the budget belongs to another mode",
    ),
    rule(
        "float8-emulation",
        "warning",
        ("quantize.linear.float8.emulate",),
        _emulated,
        "slow steps; ValueError on GPUs older than H100 and L40 when the model is compiled",
        "emulation is for tests on hardware without float8",
    ),
    rule(
        "float8-gather",
        "error",
        ("quantize.linear.float8.enable_fsdp_float8_all_gather",),
        _recipe_and_gather,
        "an assertion while the converter is built",
        "a recipe name fixes everything, the gather included",
    ),
    rule(
        "quantize-ignored",
        "warning",
        ("model.converters",),
        _quantize_unread,
        "trains in bf16",
        "the tables under quantize say how; model.converters says whether",
    ),
    rule(
        "converter-layout",
        "error",
        ("model.converters",),
        _converter_layout,
        "an assertion while the converters are built",
        "each converter names what it was not tried with",
    ),
    rule(
        "one-checkpoint",
        "error",
        ("checkpoint.keep_latest_k",),
        _one_checkpoint,
        "ValueError about checkpoint replicas",
        "the newest checkpoint may still be being written",
    ),
    rule(
        "weights-only",
        "error",
        ("checkpoint.last_save_model_only", "checkpoint.initial_load_model_only"),
        _more_than_weights,
        "ValueError while checkpointing is set up",
        "safetensors hold tensors only",
    ),
    rule(
        "relative-path",
        "error",
        ("checkpoint.initial_load_path",),
        _relative_path,
        "ValueError: initial_load_path must be an absolute path or a remote URI",
        "every rank opens it from a folder of its own",
    ),
    rule(
        "async-tp-uncompiled",
        "error",
        ("compile.enable_async_tensor_parallel",),
        _async_uncompiled,
        "ValueError: Async TP requires 'model' in --compile.components",
        "the compiler interleaves the exchanges with the products",
        covers=("overlap.async-tensor-parallel",),
    ),
    rule(
        "early-step",
        "error",
        ("optimizer.early_step_in_backward",),
        _early_step,
        "NotImplementedError",
        "gradients must live until all stages or experts are done",
    ),
    rule(
        "early-step-unclipped",
        "warning",
        ("optimizer.early_step_in_backward",),
        _early_step_unclipped,
        "the gradient norm is logged as 0",
        "each gradient is freed as soon as its parameter was updated",
    ),
    rule(
        "type-checking",
        "error",
        ("debug.spmd_typechecking",),
        _type_checked,
        "ValueError",
        "the checker does not follow pipelines, nor recompute around FlexAttention",
    ),
    rule(
        "batch-invariant",
        "error",
        ("debug.batch_invariant",),
        _batch_invariant,
        "ValueError",
        "pretraining has no batch-invariant mode",
    ),
    rule(
        "context-too-long",
        "error",
        (CONTEXT_LENGTH,),
        _beyond_positions,
        "ValueError on the length of the rotary table",
        "positions are read from a table",
    ),
    rule(
        "decay-truncated",
        "warning",
        ("lr_scheduler.decay_ratio",),
        _decay_cut,
        "a warning, and a steeper decay than asked for",
        "warm-up, plateau and decay must fit into the steps",
    ),
    rule(
        "total-steps",
        "error",
        ("lr_scheduler.total_steps",),
        _total_steps,
        "the loss rises after total_steps, or an assertion on decay_steps",
        "the factor of the rate is computed from the step, whether or not the decay is over",
        covers=("learning_rate.decay-inside-warmup",),
    ),
    rule(
        "estimate",
        "warning",
        ("memory_estimation.enable",),
        _estimated,
        "the estimate stops or is of another layout",
        "it tracks FSDP only",
    ),
)

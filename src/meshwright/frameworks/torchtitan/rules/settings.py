"""torchtitan's rules on names, precision, checkpoints and other settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from meshwright.errors import closest
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.initial_weights import is_hub_id, is_hugging_face
from meshwright.frameworks.torchtitan.models import EXPERIMENT_MODELS, FLAVORS, PRESETS, base_flavor, max_positions
from meshwright.frameworks.torchtitan.rules.common import (
    CP,
    EP,
    FLAVOR,
    MODE,
    NAME,
    OPTION,
    PP,
    TP,
    degree,
    has_custom_module,
    in_tokens,
    is_current,
    rule,
)
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.key import ConfigKey
from meshwright.recipes.key_maps.torchtitan import CONTEXT_LENGTH, DATASETS
from meshwright.recipes.key_maps.torchtitan import CONVERTERS as CONVERTER_NAMES
from meshwright.recipes.types import recipe_fields
from meshwright.recipes.values import NUMBER, bare_type

MIN_FLOAT8_CAPABILITY = 8.9
"""The first CUDA compute capability with float8."""
MANY_STEPS = 10_000  # of a training, not of a test
VALIDATION_STEPS = ("validation.steps", "validator.steps")
RARE_PROFILES = 100  # steps between traces that cost little


def _unknown_model(ctx: RuleContext) -> Problem | None:
    name, flavor = str(ctx.get(NAME)), str(ctx.get(FLAVOR))
    if is_current(ctx) or has_custom_module(ctx) or name in EXPERIMENT_MODELS or "." in name:
        return None
    if name not in FLAVORS:
        known = ", ".join(FLAVORS)
        fix = tuple(ctx.framework.format_setting(NAME, near) for near in closest(name, FLAVORS, 1))
        return Problem(f"unknown model {name}; torchtitan has {known}", fix, key=NAME)
    if base_flavor(flavor) in FLAVORS[name] or not ctx.is_set(FLAVOR) or ctx.parsed.model is not None:
        return None  # or a custom flavor whose model was passed
    fix = tuple(ctx.framework.format_setting(FLAVOR, near) for near in _similar_flavors(flavor, FLAVORS[name]))
    known = ", ".join(FLAVORS[name])
    return Problem(
        f"{name} has no flavor {flavor}; it has {known} (pass --model NAME for a custom one)", fix, key=FLAVOR
    )


def _text_values(ctx: RuleContext) -> Iterator[Problem]:
    """Yield numbers and booleans that a TOML file writes as texts: torchtitan passes them on as they are."""
    table = config_keys(ctx.framework.key_map)
    for key, setting in ctx.parsed.settings.items():
        kind = _kind(table[key]) if key in table else ""
        if kind not in ("int", "float", "bool") or not isinstance(setting.value, str):
            continue
        if setting.unresolved or not setting.file.endswith(".toml"):
            continue  # values of a command are parsed by their type
        plain = setting.value.strip().lower() if kind == "bool" else setting.value.strip()
        effect = "any text counts as true" if kind == "bool" else "it is not converted to a number"
        if plain in ("true", "false") if kind == "bool" else NUMBER.fullmatch(plain):  # others are invalid values
            yield Problem(f'{key} = "{setting.value}" is a text: {effect}', (f"{key} = {plain}",), key=key)


def _kind(row: ConfigKey) -> str:
    """Return the type of a key's values: its own, that of its recipe field, or that of its default."""
    if row.type or row.choices or row.values:
        return row.type
    hint = bare_type(recipe_fields()[row.field].type)[0] if row.field else type(row.default)
    return {bool: "bool", int: "int", float: "float"}.get(hint, "")


def _similar_flavors(flavor: str, known: Any) -> list[str]:
    """Return the flavor that is meant; one of another size is another model, and not a fix."""
    same = [name for name in known if name.lower() == flavor.lower()]
    alike = [one for one in known if _size_of(flavor) in ("", _size_of(one))]
    return same or closest(flavor, alike, 1)


def _size_of(flavor: str) -> str:
    """Return the number that a flavor starts with, as 30 of 30B-A3B; empty if it has none."""
    found = re.match(r"\d+(\.\d+)?", flavor)
    return found[0] if found else ""


def _unknown_dataset(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get("training.dataset"))
    if (
        has_custom_module(ctx)
        or not ctx.is_set("training.dataset")
        or str(ctx.get(NAME)) not in FLAVORS
        or ctx.get(NAME) == "flux"
    ):
        return None
    if name in DATASETS or ctx.get("job.custom_config_module"):
        return None
    own = base_flavor(str(ctx.get(FLAVOR))) not in FLAVORS[str(ctx.get(NAME))]  # of code with models of its own
    where = f"the code with the flavor {ctx.get(FLAVOR)} must register it" if own else "those a custom module registers"
    return Problem(
        f"unknown dataset {name}: torchtitan has {', '.join(DATASETS)}{';' if own else ' and'} {where}",
        (ctx.framework.format_setting("training.dataset", "c4"),),
        severity="warning" if own else None,
    )


def _unknown_optimizer(ctx: RuleContext) -> Problem | None:
    name = str(ctx.get("optimizer.name"))
    near = [known for known in ("AdamW", "Adam") if known != name and known.lower() == name.lower()]
    if not near or has_custom_module(ctx):
        return None
    return Problem(
        f"unknown optimizer {name}: names are case-sensitive",
        (ctx.framework.format_setting("optimizer.name", near[0]),),
    )


def _memory_budget_uncompiled(ctx: RuleContext) -> Problem | None:
    if ctx.get(MODE) != "memory_budget" or ctx.recipe.kernels.compile:
        return None
    fix = (
        ctx.framework.format_setting("compile.enable", True),
        ctx.framework.format_setting("compile.components", ["model", "loss"]),
    )
    return Problem("mode memory_budget requires a compiled model", fix, key=MODE)


def _recompute_option(ctx: RuleContext) -> Problem | None:
    option = ctx.get(OPTION)
    if ctx.get(MODE) != "selective" or not ctx.is_set(OPTION) or re.fullmatch("op|[0-9]+", str(option)):
        return None
    return Problem(
        f"{OPTION}={option}: must be op or an integer", (ctx.framework.format_setting(OPTION, "op"),), key=OPTION
    )


def _memory_budget_ignored(ctx: RuleContext) -> Problem | None:
    key = "activation_checkpoint.memory_budget"
    if not ctx.is_set(key) or ctx.get(MODE) == "memory_budget" or ctx.get(key) == 0.5:
        return None
    return Problem(
        f"{key} is ignored: it requires mode memory_budget, but the mode is {ctx.get(MODE)}",
        (ctx.framework.format_setting(MODE, "memory_budget"),),
    )


def _test_dataset(ctx: RuleContext) -> Problem | None:
    key, steps = "training.dataset", ctx.recipe.train.steps
    if not ctx.is_set(key) or ctx.get(key) != "c4_test" or steps <= MANY_STEPS:
        return None
    message = f"c4_test is 2,000 documents for tests, and {steps:,} steps repeat them many times"
    return Problem(message, (ctx.framework.format_setting(key, "c4"),))


def _profiled_often(ctx: RuleContext) -> Problem | None:
    key, every = "profiling.profile_freq", ctx.get("profiling.profile_freq")
    on = ctx.get("profiling.enable_profiling") is True
    if not on or not isinstance(every, int) or ctx.recipe.train.steps <= MANY_STEPS or every >= RARE_PROFILES:
        return None
    count = ctx.recipe.train.steps // max(every, 1)
    fix = (ctx.framework.format_setting("profiling.enable_profiling", False),)
    return Problem(
        f"a trace every {every} steps: {count:,} traces per rank, each step with one is slower", fix, key=key
    )


def _lacks_float8(ctx: RuleContext) -> bool:
    return ctx.cluster is not None and ctx.cluster.gpu.capability < MIN_FLOAT8_CAPABILITY


def _float8_emulated(ctx: RuleContext) -> Problem | None:
    key = "quantize.linear.float8.emulate"
    if ctx.get(key) is not True or not ctx.recipe.kernels.compile or CONVERTER_NAMES[0] not in _converters(ctx):
        return None
    fix = (ctx.framework.format_setting(key, False), ctx.framework.format_setting("compile.enable", False))
    if _lacks_float8(ctx):
        return Problem("emulated float8 cannot be compiled on GPUs without float8", fix, severity="error")
    return Problem("emulated float8 computes in higher precision and is not faster", fix[:1])


def _converters(ctx: RuleContext) -> list[str]:
    found = ctx.get("model.converters", [])
    return [str(name) for name in found] if isinstance(found, list) else [str(found)]


def _float8_gather_with_recipe(ctx: RuleContext) -> Problem | None:
    gather, recipe = "quantize.linear.float8.enable_fsdp_float8_all_gather", "quantize.linear.float8.recipe_name"
    if ctx.get(gather) is not True or not ctx.get(recipe) or CONVERTER_NAMES[0] not in _converters(ctx):
        return None
    return Problem(
        f"{gather} requires an unset recipe_name, but {recipe}={ctx.get(recipe)}",
        (ctx.framework.format_setting(gather, False),),
        key=gather,
    )


def _quantize_ignored(ctx: RuleContext) -> Iterator[Problem]:
    """Report options in a quantize table whose converter is not enabled.

    Published configs without float8 have a table that turns nothing on.
    """
    for table in CONVERTER_NAMES:
        keys = [] if table in _converters(ctx) else list(ctx.keys_under(table))
        is_on = any(ctx.get(key) is True or (key.endswith("float8.recipe_name") and ctx.get(key)) for key in keys)
        for key in keys if is_on else ():
            if ctx.get(key) not in (None, False, "", []):
                fix = (ctx.framework.format_setting("model.converters", [*_converters(ctx), table]),)
                if _lacks_float8(ctx):
                    fix = (f"without {key}",)
                yield Problem(f"{key} is ignored: model.converters does not include {table}", fix, key=key)


def _converter_layout(ctx: RuleContext) -> Iterator[Problem]:
    """Report axes and other converters that a converter cannot be combined with."""
    listed, key = _converters(ctx), "model.converters"
    if is_current(ctx):
        return
    if CONVERTER_NAMES[2] in listed:
        for axis, degree_key in (("pipeline parallelism", PP), ("context parallelism", CP)):
            if degree(ctx, degree_key) > 1:
                fix = (ctx.framework.format_setting(key, [name for name in listed if name != CONVERTER_NAMES[2]]),)
                yield Problem(f"{CONVERTER_NAMES[2]} does not support {axis}", fix, key=key)
    if CONVERTER_NAMES[1] in listed and degree(ctx, TP) > 1 and ctx.recipe.kernels.compile:
        fix = (ctx.framework.format_setting("compile.components", ["loss"]),)
        yield Problem(f"{CONVERTER_NAMES[1]} with tensor parallelism does not support compile", fix, key=key)
    formats = sorted({name.rpartition(".")[2] for name in listed if name in CONVERTER_NAMES})
    if len(formats) > 1:
        yield Problem(f"converters of {' and '.join(formats)} cannot be combined", key=key)


def _keeps_one_checkpoint(ctx: RuleContext) -> Problem | None:
    key = "checkpoint.keep_latest_k"
    if ctx.get(key) != 1 or not (is_current(ctx) or ctx.get("checkpoint.enable") is True):
        return None
    return Problem(
        "keep_latest_k=1 is too few: the newest checkpoint may be incomplete; 0 keeps all",
        (ctx.framework.format_setting(key, 2),),
    )


def _no_interval(ctx: RuleContext) -> Problem | None:
    key = "checkpoint.interval"
    if ctx.get(key) != 0 or ctx.get("checkpoint.enable") is not True:
        return None
    return Problem("every step is divided by interval=0", (ctx.framework.format_setting(key, 500),))


def _hf_weights_only(ctx: RuleContext) -> Iterator[Problem]:
    if not is_current(ctx) and ctx.get("checkpoint.enable") is not True:
        return  # later versions check it even if checkpoints are disabled
    for folder, only in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ):
        if ctx.get(f"checkpoint.{folder}") is True and ctx.get(f"checkpoint.{only}") is False:
            message = f"checkpoint.{folder} requires checkpoint.{only}: Hugging Face checkpoints contain only weights"
            yield Problem(
                message, (ctx.framework.format_setting(f"checkpoint.{only}", True),), key=f"checkpoint.{only}"
            )


def _relative_load_path(ctx: RuleContext) -> Problem | None:
    key = "checkpoint.initial_load_path"
    path = ctx.get(key)
    if not isinstance(path, str) or not path or path.startswith("/") or "://" in path:
        return None
    read = is_current(ctx) or ctx.get("checkpoint.enable") is True
    if not read or not (is_current(ctx) or is_hub_id(path)):
        return None  # the 0.2 line also takes relative folders
    what = "an absolute path or a URI" if is_current(ctx) else "a folder"
    fix = (ctx.framework.format_setting(key, f"/path/to/{PurePosixPath(path).name}"),)
    download = f": download {path} (scripts/download_hf_assets.py --assets safetensors)" if is_hub_id(path) else ""
    return Problem(f"{key}={path} must be {what}{download}", fix)


def _hf_folder_as_checkpoint(ctx: RuleContext) -> Problem | None:
    key, in_hf = "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"
    path = ctx.get(key)
    if not isinstance(path, str) or ctx.get(in_hf) is True or ctx.get("checkpoint.enable") is not True:
        return None
    if is_hub_id(path) or not is_hugging_face(path):
        return None
    message = f"{key}={path} is a Hugging Face folder, and without initial_load_in_hf it is read as torch's own"
    return Problem(message, (ctx.framework.format_setting(in_hf, True),))


def _async_tp_uncompiled(ctx: RuleContext) -> Problem | None:
    """torchtitan checks this even without tensor parallelism."""
    key = "compile.enable_async_tensor_parallel"
    if not is_current(ctx) or ctx.get(key) is not True or ctx.recipe.kernels.compile:
        return None
    return Problem(
        "async tensor parallelism requires a compiled model", (ctx.framework.format_setting("compile.enable", True),)
    )


def _early_step(ctx: RuleContext) -> Iterator[Problem]:
    key = "optimizer.early_step_in_backward"
    if ctx.get(key) is not True:
        return
    off = (ctx.framework.format_setting(key, False),)
    for other, axis in ((PP, "pipeline parallelism"), (EP, "expert parallelism")):
        if degree(ctx, other) > 1:
            yield Problem(f"early_step_in_backward does not support {axis}", off, key=key)


def _early_step_ignores_clipping(ctx: RuleContext) -> Problem | None:
    key, norm = "optimizer.early_step_in_backward", ctx.get("training.max_norm")
    if ctx.get(key) is not True or not isinstance(norm, int | float) or norm <= 0:
        return None
    if max(degree(ctx, PP), degree(ctx, EP)) > 1:
        return None  # rejected by the rule above
    return Problem(f"training.max_norm={norm} has no effect: gradients are freed during the backward pass", key=key)


def _type_checking(ctx: RuleContext) -> Problem | None:
    key = "debug.spmd_typechecking"
    if ctx.get(key) is not True:
        return None
    if degree(ctx, PP) > 1:
        return Problem(
            "spmd_typechecking does not support pipeline parallelism", ("--debug.no_spmd_typechecking",), key=key
        )
    preset = PRESETS.get(str(ctx.get("module")), {}).get(str(ctx.get("config")))
    if ctx.get(MODE) == "selective" and preset is not None and preset.kernel == "flex":
        fix = ("--debug.no_spmd_typechecking", "activation-checkpoint:full")
        return Problem(
            "spmd_typechecking does not support selective activation checkpointing with FlexAttention", fix, key=key
        )
    return None


def _batch_invariant(ctx: RuleContext) -> Problem | None:
    key = "debug.batch_invariant"
    return (
        Problem("batch_invariant is for inference only", ("--debug.no_batch_invariant",), key=key)
        if ctx.get(key) is True
        else None
    )


def _context_too_long(ctx: RuleContext) -> Problem | None:
    limit = max_positions(str(ctx.get("module")), str(ctx.get("config")))
    key = CONTEXT_LENGTH if in_tokens(ctx) else "training.seq_len"
    length = ctx.recipe.data.seq_length
    if not is_current(ctx) or limit is None or length <= limit:
        return None
    message = f"{key}={length} exceeds the {limit} positions of {ctx.get('config')}"
    return Problem(message, (f"--{key}={limit}",), key=key)


def _decay_truncated(ctx: RuleContext) -> Problem | None:
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
        f"{warmup} warmup steps plus a decay over {ratio:g} of {total} steps exceed the total; the decay is truncated",
        (ctx.framework.format_setting("lr_scheduler.decay_ratio", round(1 - warmup / total, 4)),),
    )


def _total_steps(ctx: RuleContext) -> Problem | None:
    """The schedule does not stop at its last step: a linear decay continues below zero."""
    key = "lr_scheduler.total_steps"
    total, steps, shape = ctx.get(key), ctx.get("training.steps"), ctx.get("lr_scheduler.decay_type")
    if isinstance(total, bool) or not isinstance(total, int) or not isinstance(steps, int) or not 0 < total < steps:
        return None
    ratio, warmup = ctx.get("lr_scheduler.decay_ratio"), ctx.get("lr_scheduler.warmup_steps")
    if ratio == 0 or (isinstance(warmup, int) and warmup >= total):
        effect = f"training fails at step {total + 2}"
    elif shape == "cosine":
        effect = "the learning rate rises again"
    else:
        effect = "the learning rate is negative and the loss increases"
    return Problem(
        f"{key}={total} ends before training.steps={steps}: after that {effect}",
        (ctx.framework.format_setting(key, steps),),
    )


def _memory_estimation(ctx: RuleContext) -> Problem | None:
    key = "memory_estimation.enable"
    used = [axis for axis, name in (("tp", TP), ("pp", PP), ("cp", CP), ("ep", EP)) if degree(ctx, name) > 1]
    used += ["compile"] if ctx.get("compile.enable") is True else []
    if ctx.get(key) is not True or not used:
        return None
    return Problem(f"torchtitan's memory estimation supports FSDP and HSDP only, not {', '.join(used)}", key=key)


def _no_validation_steps(ctx: RuleContext) -> Iterator[Problem]:
    for key in VALIDATION_STEPS:
        value = ctx.get(key)
        if isinstance(value, int) and value < 1 and value != -1:
            yield Problem(f"{key}={value} must be above 0, or -1", (ctx.framework.format_setting(key, -1),), key=key)


RULES = (
    rule("model-name", "error", (NAME, FLAVOR), _unknown_model, symptom="KeyError, or an error that lists the models",
        cause="models are looked up by name and flavor"),
    rule("dataset-name", "error", ("training.dataset",), _unknown_dataset,
        symptom="ValueError that lists the datasets",
        cause="datasets are looked up by name, which also selects how a path is read"),
    rule("optimizer-name", "error", ("optimizer.name",), _unknown_optimizer,
        symptom="NotImplementedError that names the optimizer", cause="optimizers are looked up by their exact name"),
    rule("memory-budget", "error", (MODE,), _memory_budget_uncompiled,
        symptom="ValueError: the model must be compiled",
        cause="the compiler selects what to recompute within the budget"),
    rule("recompute-option", "error", (OPTION,), _recompute_option, symptom="ValueError: invalid selective AC option",
        cause="selective checkpointing is per op or every nth layer"),
    rule("memory-budget-ignored", "warning", ("activation_checkpoint.memory_budget",), _memory_budget_ignored,
        symptom="none: the budget is ignored", cause="only mode memory_budget uses it"),
    rule("test-dataset", "warning", ("training.dataset",), _test_dataset,
        symptom="the training loss falls towards zero: the model memorizes the documents",
        cause="the data loader starts again at the end of its data"),
    rule("profiled-often", "warning", ("profiling.profile_freq",), _profiled_often,
        symptom="slow steps, and a disk full of traces", cause="a trace is hundreds of MiB, written by every rank"),
    rule("float8-emulation", "warning", ("quantize.linear.float8.emulate",), _float8_emulated,
        symptom="slow steps; ValueError on GPUs older than H100 and L40 when the model is compiled",
        cause="emulation is for tests on hardware without float8"),
    rule("float8-gather", "error", ("quantize.linear.float8.enable_fsdp_float8_all_gather",),
        _float8_gather_with_recipe, symptom="AssertionError while the converter is built",
        cause="a recipe name sets all options, including the gather"),
    rule("quantize-ignored", "warning", ("model.converters",), _quantize_ignored, symptom="trains in bf16",
        cause="the quantize tables only configure; model.converters enables"),
    rule("converter-layout", "error", ("model.converters",), _converter_layout,
        symptom="AssertionError while the converters are built",
        cause="each converter rejects combinations it was not tested with"),
    rule("one-checkpoint", "error", ("checkpoint.keep_latest_k",), _keeps_one_checkpoint,
        symptom="ValueError about checkpoint replicas", cause="the newest checkpoint may still be in progress"),
    rule("no-checkpoint-interval", "error", ("checkpoint.interval",), _no_interval,
        symptom="ZeroDivisionError after the first step", cause="a step is saved if the interval divides it",
        covers=("saving.never",)),
    rule("weights-only", "error", ("checkpoint.last_save_model_only", "checkpoint.initial_load_model_only"),
        _hf_weights_only, symptom="ValueError while checkpointing is initialized",
        cause="safetensors files contain only tensors"),
    rule("relative-path", "error", ("checkpoint.initial_load_path",), _relative_load_path,
        symptom="ValueError: initial_load_path must be an absolute path or a remote URI; in 0.2: the path is not valid",
        cause="the working directory may differ between ranks, and a Hugging Face id is not downloaded"),
    rule("weights-format", "error", ("checkpoint.initial_load_path",), _hf_folder_as_checkpoint,
        symptom="FileNotFoundError or CheckpointException: the folder has no .metadata",
        cause="torch's distributed checkpoints and safetensors folders are read by different readers"),
    rule("async-tp-uncompiled", "error", ("compile.enable_async_tensor_parallel",), _async_tp_uncompiled,
        symptom="ValueError: Async TP requires 'model' in --compile.components",
        cause="the compiler overlaps the communication with the matmuls", covers=("overlap.async-tensor-parallel",)),
    rule("early-step", "error", ("optimizer.early_step_in_backward",), _early_step, symptom="NotImplementedError",
        cause="gradients must be kept until all stages or experts are done"),
    rule("early-step-unclipped", "warning", ("optimizer.early_step_in_backward",), _early_step_ignores_clipping,
        symptom="the gradient norm is logged as 0",
        cause="each gradient is freed as soon as its parameter is updated"),
    rule("type-checking", "error", ("debug.spmd_typechecking",), _type_checking, symptom="ValueError",
        cause="the type checker supports neither pipelines nor selective checkpointing with FlexAttention"),
    rule("batch-invariant", "error", ("debug.batch_invariant",), _batch_invariant, symptom="ValueError",
        cause="pretraining has no batch-invariant mode"),
    rule("context-too-long", "error", (CONTEXT_LENGTH,), _context_too_long,
        symptom="ValueError about the length of the RoPE table",
        cause="RoPE frequencies are read from a precomputed table"),
    rule("decay-truncated", "warning", ("lr_scheduler.decay_ratio",), _decay_truncated,
        symptom="a warning, and a steeper decay than configured",
        cause="warmup, plateau and decay must fit into the steps"),
    rule("total-steps", "error", ("lr_scheduler.total_steps",), _total_steps,
        symptom="the loss rises after total_steps, or AssertionError about decay_steps",
        cause="the learning-rate factor is computed from the step even after the decay has ended",
        covers=("learning_rate.decay-inside-warmup",)),
    rule("text-value", "error", (), _text_values,
        symptom="a UserWarning of tyro, then TypeError at the first use; a boolean is on whatever it says",
        cause="values of a TOML file become fields of the config without conversion"),
    rule("validation-steps", "error", VALIDATION_STEPS, _no_validation_steps,
        symptom="AssertionError: validation steps must be positive or -1",
        cause="a validation has at least one step, and -1 means the whole dataset"),
    rule("estimate", "warning", ("memory_estimation.enable",), _memory_estimation,
        symptom="the estimation fails or describes another layout", cause="the estimator tracks FSDP only"),
)  # fmt: skip

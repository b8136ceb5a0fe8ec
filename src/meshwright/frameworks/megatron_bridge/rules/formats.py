"""Number formats: what mixed_precision decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge import precision
from meshwright.frameworks.megatron_bridge.format_override import spell
from meshwright.frameworks.megatron_bridge.parsed_config import value
from meshwright.frameworks.megatron_bridge.rules.common import command, rule, shipped


def _precision_inside_name(ctx: RuleContext) -> Iterator[Problem]:
    row = shipped(ctx)
    if row is None or not row.precision_is_a_name or not command(ctx) or ctx.is_set("mixed_precision"):
        return
    for key in ctx.keys_under("mixed_precision"):
        if "." in key:
            yield Problem(
                f"mixed_precision is one word in {ctx.parsed.name}: there is no {key} to set",
                (spell("mixed_precision", "bf16_mixed"),),
                key=key,
            )


def _precision_overwrites(ctx: RuleContext) -> Iterator[Problem]:
    settings = ctx.parsed.settings
    if value(settings, "mixed_precision", "") is None or not (command(ctx) or ctx.is_set("recipe")):
        return  # a saved config lists what was there before and after
    formats = ctx.recipe.precision
    wanted: dict[str, Any] = {
        "grad_reduce_in_fp32": formats.reduce == "fp32",
        "fp8_param_gather": formats.fp8_gather,
        "first_last_layers_bf16": formats.first_last_bf16,
        "bf16": formats.compute == "bf16",
        "fp16": formats.compute == "fp16",
        "fp8": formats.matmul.startswith(("fp8", "mxfp8")),
        "fp4": formats.matmul == "nvfp4",
    }
    if formats.matmul in precision.RECIPES:
        wanted["fp8_recipe"] = precision.RECIPES[formats.matmul]
    row = shipped(ctx)
    inside = row is not None and not row.precision_is_a_name and not ctx.is_set("mixed_precision")
    for key, name in precision.OVERWRITTEN.items():
        if key not in settings or settings[key].unresolved or name not in wanted or not _known_start(ctx):
            continue
        setting, taken = settings[key].value, wanted[name]
        same = bool(setting) == taken if isinstance(taken, bool) else str(setting) == taken
        if not same:
            fix = (spell(f"mixed_precision.{name}", setting),) if inside or not command(ctx) else _named(name, setting)
            yield Problem(f"{key}={_text(setting)} is overwritten by mixed_precision", fix, key=key)


def _known_start(ctx: RuleContext) -> bool:
    """Whether the precision that wins is known: that of a recipe, or one that is said."""
    return shipped(ctx) is not None or bool(ctx.keys_under("mixed_precision"))


def _named(name: str, setting: Any) -> tuple[str, ...]:
    """The word for mixed_precision that has a field this way."""
    if name == "fp8_recipe" and (matmul := precision.SCALINGS.get(str(setting))):
        return tuple(
            spell("mixed_precision", one)
            for one, formats in precision.PRESETS.items()
            if formats.matmul == matmul and formats.compute == "bf16" and one.startswith("bf16")
        )
    if name == "fp8" and setting:
        return (spell("mixed_precision", "bf16_with_fp8_current_scaling_mixed"),)
    return ()


def _text(setting: Any) -> str:
    return spell("x", setting)[2:]


def _two_formats(ctx: RuleContext) -> Iterator[Problem]:
    for first, second in (("fp8", "fp4"), ("bf16", "fp16")):
        for section in ("mixed_precision", "model", "optimizer"):
            keys_ = f"{section}.{first}", f"{section}.{second}"
            if all(value(ctx.parsed.settings, key) for key in keys_):
                yield Problem(f"{keys_[0]} and {keys_[1]} exclude each other", (spell(keys_[1], None),), key=keys_[1])


def _mxfp8_buffer(ctx: RuleContext) -> Problem | None:
    settings, key = ctx.parsed.settings, "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"
    formats = ctx.recipe.precision
    if formats.matmul != "mxfp8" or not formats.fp8_gather or ctx.recipe.layout.strategy == "megatron_fsdp":
        return None
    row = shipped(ctx)
    before = row.recipe().precision if row else None
    switched = any(ctx.is_set(f"mixed_precision.{name}") for name in ("fp8_recipe", "fp8_param_gather", "fp8_param"))
    ready = before is not None and before.matmul == "mxfp8" and before.fp8_gather
    if value(settings, key) is True or (key not in settings and (ready or not switched)):
        return None
    return Problem("8-bit parameters in mxfp8 are gathered through the gradient buffer", (spell(key, True),), key=key)


DTYPES = ("optimizer.main_grads_dtype", "optimizer.main_params_dtype", "optimizer.exp_avg_dtype")


def _needs_precision_aware(ctx: RuleContext) -> Iterator[Problem]:
    row, key = shipped(ctx), "optimizer.use_precision_aware_optimizer"
    if value(ctx.parsed.settings, key, row is not None and row.precision_aware) is True:
        return
    for dtype in DTYPES:
        setting = str(value(ctx.parsed.settings, dtype, ""))
        if setting and "float32" not in setting and setting not in ("fp32", "None"):
            yield Problem(f"{dtype}={setting} needs the precision-aware optimizer", (spell(key, True),), key=dtype)


RULES = (
    rule(
        "precision-is-a-word", "error", (), _precision_inside_name,
        "could not override mixed_precision",
        "recipes hold either the name of a precision or an object with fields",
    ),
    rule(
        "precision-overwrites", "warning", tuple(precision.OVERWRITTEN), _precision_overwrites,
        "a line in the debug log, and the other value in use",
        "mixed_precision is applied to model, optimizer and ddp after all overrides",
    ),
    rule(
        "two-formats", "error", (), _two_formats,
        "ValueError or an assertion before the model is built",
        "one format at a time",
    ),
    rule(
        "mxfp8-buffer", "error", ("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",), _mxfp8_buffer,
        "an assertion from mixed_precision",
        "parameters in mxfp8 have no contiguous buffer of their own",
    ),
    rule(
        "precision-aware", "error", DTYPES, _needs_precision_aware,
        "an assertion from the optimizer's config",
        "only the precision-aware optimizer keeps its state in other formats",
    ),
)  # fmt: skip

"""Rules for precision: what mixed_precision sets and overwrites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge import precision
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.parsed_config import get_value
from meshwright.frameworks.megatron_bridge.rules.common import bridge_recipe, rule, uses_runner


def _precision_field_of_preset(ctx: RuleContext) -> Iterator[Problem]:
    row = bridge_recipe(ctx)
    if row is None or not row.precision_is_a_name or not uses_runner(ctx) or ctx.is_set("mixed_precision"):
        return
    for key in ctx.keys_under("mixed_precision"):
        if "." in key:
            yield Problem(
                f"mixed_precision is a preset name in {ctx.parsed.name}: {key} does not exist",
                (format_override("mixed_precision", "bf16_mixed"),),
                key=key,
            )


def _precision_overwrites(ctx: RuleContext) -> Iterator[Problem]:
    settings = ctx.parsed.settings
    if get_value(settings, "mixed_precision", "") is None or not (uses_runner(ctx) or ctx.is_set("recipe")):
        return  # a saved config lists both values
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
    row = bridge_recipe(ctx)
    inside = row is not None and not row.precision_is_a_name and not ctx.is_set("mixed_precision")
    for key, name in precision.OVERWRITTEN.items():
        if key not in settings or settings[key].unresolved or name not in wanted or not _is_precision_known(ctx):
            continue
        value, effective = settings[key].value, wanted[name]
        same = bool(value) == effective if isinstance(effective, bool) else str(value) == effective
        if not same:
            fix = (
                (format_override(f"mixed_precision.{name}", value),)
                if inside or not uses_runner(ctx)
                else _presets_with(name, value)
            )
            yield Problem(f"{key}={_text(value)} is overwritten by mixed_precision", fix, key=key)


def _is_precision_known(ctx: RuleContext) -> bool:
    """Return whether the effective precision is known, from a recipe or a setting."""
    return bridge_recipe(ctx) is not None or bool(ctx.keys_under("mixed_precision"))


def _presets_with(name: str, value: Any) -> tuple[str, ...]:
    """Return the mixed_precision presets with this field value."""
    if name == "fp8_recipe" and (matmul := precision.SCALINGS.get(str(value))):
        return tuple(
            format_override("mixed_precision", one)
            for one, formats in precision.PRESETS.items()
            if formats.matmul == matmul and formats.compute == "bf16" and one.startswith("bf16")
        )
    if name == "fp8" and value:
        return (format_override("mixed_precision", "bf16_with_fp8_current_scaling_mixed"),)
    return ()


def _text(value: Any) -> str:
    return format_override("x", value)[2:]


def _two_formats(ctx: RuleContext) -> Iterator[Problem]:
    for first, second in (("fp8", "fp4"), ("bf16", "fp16")):
        for section in ("mixed_precision", "model", "optimizer"):
            keys_ = f"{section}.{first}", f"{section}.{second}"
            if all(get_value(ctx.parsed.settings, key) for key in keys_):
                yield Problem(
                    f"{keys_[0]} and {keys_[1]} are exclusive", (format_override(keys_[1], None),), key=keys_[1]
                )


def _mxfp8_buffer(ctx: RuleContext) -> Problem | None:
    settings, key = ctx.parsed.settings, "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"
    formats = ctx.recipe.precision
    if formats.matmul != "mxfp8" or not formats.fp8_gather or ctx.recipe.layout.strategy == "megatron_fsdp":
        return None
    row = bridge_recipe(ctx)
    before = row.recipe().precision if row else None
    switched = any(ctx.is_set(f"mixed_precision.{name}") for name in ("fp8_recipe", "fp8_param_gather", "fp8_param"))
    ready = before is not None and before.matmul == "mxfp8" and before.fp8_gather
    if get_value(settings, key) is True or (key not in settings and (ready or not switched)):
        return None
    return Problem(
        "MXFP8 parameters are gathered through the gradient buffer: reuse_grad_buf_for_mxfp8_param_ag must be true",
        (format_override(key, True),),
        key=key,
    )


DTYPES = ("optimizer.main_grads_dtype", "optimizer.main_params_dtype", "optimizer.exp_avg_dtype")


def _needs_precision_aware(ctx: RuleContext) -> Iterator[Problem]:
    row, key = bridge_recipe(ctx), "optimizer.use_precision_aware_optimizer"
    if get_value(ctx.parsed.settings, key, row is not None and row.precision_aware) is True:
        return
    for dtype in DTYPES:
        state_dtype = str(get_value(ctx.parsed.settings, dtype, ""))
        if state_dtype and "float32" not in state_dtype and state_dtype not in ("fp32", "None"):
            yield Problem(
                f"{dtype}={state_dtype} needs optimizer.use_precision_aware_optimizer",
                (format_override(key, True),),
                key=dtype,
            )


RULES = (
    rule(
        "precision-preset-only", "error", (), _precision_field_of_preset,
        "could not override mixed_precision",
        "mixed_precision is either a preset name or an object with fields",
    ),
    rule(
        "precision-overwrites", "warning", tuple(precision.OVERWRITTEN), _precision_overwrites,
        "a line in the debug log; the mixed_precision value is used",
        "mixed_precision is applied to model, optimizer and ddp after all overrides",
    ),
    rule(
        "two-formats", "error", (), _two_formats,
        "ValueError or AssertionError before the model is built",
        "only one format can be enabled",
    ),
    rule(
        "mxfp8-buffer", "error", ("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",), _mxfp8_buffer,
        "AssertionError from mixed_precision",
        "MXFP8 parameters have no contiguous buffer of their own",
    ),
    rule(
        "precision-aware", "error", DTYPES, _needs_precision_aware,
        "AssertionError from the optimizer config",
        "only the precision-aware optimizer stores states in formats other than fp32",
    ),
)  # fmt: skip

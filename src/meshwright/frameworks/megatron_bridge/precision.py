"""mixed_precision presets; they overwrite the same settings of model, optimizer and ddp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.frameworks.types import Settings
from meshwright.recipes.types import Precision

BF16 = Precision()
PRESETS: Mapping[str, Precision] = {
    "bf16_mixed": BF16,
    "fp16_mixed": Precision(compute="fp16", reduce="bf16", grads="bf16"),
    "bf16_with_fp8_delayed_scaling_mixed": Precision(matmul="fp8_delayed", fp8_gather=True),
    "fp16_with_fp8_delayed_scaling_mixed": Precision(
        compute="fp16", matmul="fp8_delayed", fp8_gather=True, reduce="bf16", grads="bf16"
    ),
    "bf16_with_fp8_current_scaling_mixed": Precision(matmul="fp8_tensor", fp8_gather=True, first_last_bf16=True),
    "fp16_with_fp8_current_scaling_mixed": Precision(
        compute="fp16", matmul="fp8_tensor", fp8_gather=True, first_last_bf16=True, reduce="bf16", grads="bf16"
    ),
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": Precision(
        matmul="fp8_tensor", fp8_gather=True, first_last_bf16=True
    ),
    "nanov2_bf16_with_fp8_current_scaling_mixed": Precision(matmul="fp8_block", fp8_gather=True, first_last_bf16=True),
    "bf16_with_fp8_subchannel_scaling_mixed": Precision(matmul="fp8_block"),
    "fp16_with_fp8_subchannel_scaling_mixed": Precision(
        compute="fp16", matmul="fp8_block", reduce="bf16", grads="bf16"
    ),
    "bf16_with_mxfp8_mixed": Precision(matmul="mxfp8", fp8_gather=True),
    "fp16_with_mxfp8_mixed": Precision(compute="fp16", matmul="mxfp8", fp8_gather=True, reduce="bf16", grads="bf16"),
    "bf16_with_nvfp4_mixed": Precision(matmul="nvfp4"),
}
"""Preset names with their formats; reduce is fp32 or bf16."""
SCALINGS = {"tensorwise": "fp8_tensor", "delayed": "fp8_delayed", "blockwise": "fp8_block", "mxfp8": "mxfp8"}
RECIPES = {ours: theirs for theirs, ours in SCALINGS.items()}
SECTION = "mixed_precision"
OVERWRITTEN = {
    "ddp.grad_reduce_in_fp32": "grad_reduce_in_fp32",
    "ddp.fp8_param_gather": "fp8_param_gather",
    "ddp.reuse_grad_buf_for_mxfp8_param_ag": "reuse_grad_buf_for_mxfp8_param_ag",
    "model.first_last_layers_bf16": "first_last_layers_bf16",
    "model.fp8": "fp8",
    "model.fp8_recipe": "fp8_recipe",
    "model.fp4": "fp4",
    "model.bf16": "bf16",
    "model.fp16": "fp16",
    "optimizer.bf16": "bf16",
    "optimizer.fp16": "fp16",
}
"""Settings overwritten by the field of the same name in mixed_precision."""


def preset(name: Any) -> Precision | None:
    """Return the formats of a preset; dashes equal underscores."""
    return PRESETS.get(str(name).replace("-", "_"))


def effective(settings: Settings, start: Precision) -> Precision:
    """Return the effective formats: those of the recipe with the overrides applied."""
    named = settings.get(SECTION)
    found = start
    if named is not None and not named.unresolved:
        found = preset(named.value) or start
        found = msgspec.structs.replace(found, master=start.master, moments=start.moments)
    inside = {key.split(".")[1]: settings[key].value for key in settings if _is_inside(key, settings)}
    changes: dict[str, Any] = {}
    if inside.get("fp16") is True:
        changes["compute"] = "fp16"
    elif inside.get("fp32") is True:
        changes["compute"] = "fp32"
    elif inside.get("bf16") is True:
        changes["compute"] = "bf16"
    changes |= _matmul_format(inside, found)
    gather = inside.get("fp8_param_gather", inside.get("fp8_param"))
    if isinstance(gather, bool):
        changes["fp8_gather"] = gather
    if isinstance(inside.get("first_last_layers_bf16"), bool):
        changes["first_last_bf16"] = inside["first_last_layers_bf16"]
    if isinstance(inside.get("grad_reduce_in_fp32"), bool):
        changes["reduce"] = "fp32" if inside["grad_reduce_in_fp32"] else "bf16"
    found = msgspec.structs.replace(found, **changes)
    # Gradients accumulate in the buffer that is reduced across ranks.
    if found.reduce != start.reduce:
        found = msgspec.structs.replace(found, grads=found.reduce)
    return found


def _is_inside(key: str, settings: Settings) -> bool:
    return key.startswith(f"{SECTION}.") and not settings[key].unresolved


def _matmul_format(inside: Mapping[str, Any], found: Precision) -> dict[str, Any]:
    """Return the GEMM format: fp4 takes precedence over fp8 and its scaling."""
    if inside.get("fp4"):
        return {"matmul": "nvfp4"}
    if "fp8" in inside and not inside["fp8"]:
        return {} if "fp4" not in inside and found.matmul == "nvfp4" else {"matmul": "same"}
    if inside.get("fp8") or "fp8_recipe" in inside:
        eight = inside.get("fp8") or found.matmul not in ("same", "nvfp4")
        scaling = SCALINGS.get(str(inside.get("fp8_recipe", RECIPES.get(found.matmul, "tensorwise"))))
        return {"matmul": scaling} if eight and scaling else {}
    return {}

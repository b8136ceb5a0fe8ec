"""Dtype in which a front end trains all weights, by its own source: what from_pretrained gets, and what is upcast.

Axolotl: resolve_dtype of utils/config. LLaMA-Factory: init_adapter of model/adapter.py, and core/model_engine.py of v1.
ms-swift: _init_torch_dtype of arguments/base_args/model_args.py. TRL: dtype of trainer/model_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshwright.frameworks.types import Settings

AUTO = "auto"  # the dtype of the checkpoint's config.json


NO_DTYPE = "TRL's dtype is float32 by default"


class WeightDtype(NamedTuple):
    """The dtype of trained weights, and the setting that it follows from."""

    name: str  # as torch names it, or AUTO
    source: str  # for notes
    key: str = ""  # of the file, if it states it


def _is_on(values: Mapping[str, Any], key: str) -> bool:
    return str(values.get(key)).lower() == "true"


def axolotl_weights(values: Mapping[str, Any]) -> WeightDtype:
    """Return torch_dtype of Axolotl; bf16 is auto by default, which is bf16 on every GPU since Ampere."""
    is_fp16 = next((key for key in ("fp16", "float16") if _is_on(values, key)), "")
    for key in ("bf16", "bfloat16"):
        if str(values.get(key)).lower() in ("true", "full") or (values.get(key) == AUTO and not is_fp16):
            return WeightDtype("bfloat16", f"{key}: {str(values[key]).lower()}", key)
    if is_fp16:
        return WeightDtype("float16", f"{is_fp16}: true", is_fp16)
    if "bf16" in values:
        return WeightDtype("float32", f"bf16: {str(values['bf16']).lower()}", "bf16")
    return WeightDtype("bfloat16", "bf16 is auto by default")


def llama_factory_weights(values: Mapping[str, Any]) -> WeightDtype:
    """Return fp32, to which LLaMA-Factory casts trainable weights, unless a setting leaves them as loaded."""
    key = next((key for key in ("pure_bf16", "use_badam") if _is_on(values, key)), "")
    if key:
        return WeightDtype("bfloat16", f"{key}: true", key)
    return WeightDtype("float32", "LLaMA-Factory casts trainable weights to fp32")


def ms_swift_weights(values: Mapping[str, Any]) -> WeightDtype:
    """Return torch_dtype of ms-swift: the checkpoint's without one."""
    named = values.get("torch_dtype")
    if named:
        return WeightDtype(str(named), f"torch_dtype {named}", "torch_dtype")
    return WeightDtype(AUTO, "no torch_dtype is set")


def trl_weights(values: Mapping[str, Any]) -> WeightDtype:
    """Return dtype of TRL: float32 by default."""
    key = next((key for key in ("dtype", "torch_dtype") if values.get(key)), "")
    return WeightDtype(str(values[key]), f"{key}: {values[key]}", key) if key else WeightDtype("float32", NO_DTYPE)


KEYS = ("torch_dtype", "dtype", "bf16", "bfloat16", "pure_bf16")
"""Keys that name the dtype in some front end."""


def weights_of(read: Callable[[Mapping[str, Any]], WeightDtype], settings: Settings) -> WeightDtype:
    """Return the dtype by the settings of a file; if it is known only at run time, the one that needs least memory."""
    opened = next((key for key in KEYS if key in settings and settings[key].unresolved), "")
    if opened:
        return WeightDtype(AUTO, f"{opened} is known only when it runs", opened)
    return read({key: one.value for key, one in settings.items()})


def weight_note(found: WeightDtype, master: str, frozen: str = "") -> str:
    """Return what follows for the memory from weights that are trained in 16 bits, or frozen in fp32; else empty."""
    if frozen == "fp32":
        return f"{found.source}: the frozen weights take 4 bytes each; bfloat16 halves them"
    if master != "bf16":
        return ""
    verb = "are assumed to be, as in most checkpoints," if found.name == AUTO else "are"
    shown = "fp16, counted as bf16" if found.name == "float16" else "bf16"
    return (
        f"{found.source}: weights, gradients and optimizer states {verb} in {shown}; updates that are small against a "
        "weight are rounded away"
    )

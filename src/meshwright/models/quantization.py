"""The quantization of a model folder, as its config.json describes it, and whether its weights can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

KEYS = ("quantization_config", "compression_config")
UNQUANTIZED = "use a folder of the same model with bf16 weights"
QLORA = "for 4-bit fine-tuning use that folder with peft.method=qlora, which quantizes it as it is loaded"


class Quantization(msgspec.Struct, frozen=True):
    """How the weights in a folder are quantized; `reason` is set if they cannot be dequantized."""

    method: str
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: one scale per row or tensor
    reason: str = ""

    @property
    def fix(self) -> tuple[str, ...]:
        return (UNQUANTIZED, QLORA) if self.reason else ()


# Methods whose rounding needs their own library to undo.
LIBRARIES = {
    "bitsandbytes": "bitsandbytes codes are not read",
    "gptq": "GPTQ's grouped integers are not read",
    "awq": "AWQ's grouped integers are not read",
}
READABLE = "only mxfp4 and fp8 weights are dequantized"


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization of a config.json; None for plain weights."""
    inner = config.get("text_config")
    sections = (config, inner if isinstance(inner, Mapping) else {})
    found = next((section[key] for section in sections for key in KEYS if section.get(key)), None)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        return Quantization("unknown", reason="its quantization_config is not an object")
    method = str(found.get("quant_method") or "unknown")
    if method == "mxfp4":
        return Quantization(method)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization(method, _block(found.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(found)
    return Quantization(method, reason=f"{LIBRARIES.get(method, f'{method} is not read')}; {READABLE}")


def _compressed(found: Mapping[str, Any]) -> Quantization:
    """Return the quantization of a compressed-tensors config: readable if every group's weights are 8-bit floats."""
    method, groups = "compressed-tensors", found.get("config_groups")
    weights = [_weights(group) for group in groups.values()] if isinstance(groups, Mapping) else []
    blocks = {_block(one.get("block_structure")) for one in weights}
    sparsity = found.get("sparsity_config")
    sparse = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"
    if not weights or any((one.get("type"), one.get("num_bits")) != ("float", 8) for one in weights):
        return Quantization(method, reason=f"its weights are not 8-bit floats ({found.get('format')}); {READABLE}")
    if sparse or len(blocks) != 1:
        return Quantization(method, reason="sparse weights and several block sizes are not read")
    return Quantization(method, blocks.pop())


def _weights(group: Any) -> Mapping[str, Any]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _block(value: Any) -> tuple[int, int] | None:
    """Return rows and columns of a block; None if there are no blocks."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, int) and one > 0 for one in value):
        return value[0], value[1]
    return None

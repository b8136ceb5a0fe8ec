"""Builds a diffusers transformer on the meta device, and records how its weights are initialized."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from meshwright.engine.diffusion.config import CLASS, DenoiserConfig
from meshwright.engine.diffusion.denoiser import DENOISERS, Denoiser
from meshwright.engine.model.init import InitSpec
from meshwright.engine.patching import symbol
from meshwright.errors import MeshwrightError

TABLE = "scale_shift_table"


def build_denoiser(config: DenoiserConfig, dtype: torch.dtype, compute: torch.dtype) -> Denoiser:
    """Build the transformer of a config on the meta device; weights are allocated after sharding."""
    with torch.device("meta"):
        model = diffusers_model(config)
    for parameter in model.parameters():  # not the rotary tables
        parameter.data = parameter.data.to(dtype)
    return DENOISERS[config.model_type](model, config, compute).train()


def diffusers_model(config: DenoiserConfig) -> Any:
    """Build the diffusers model."""
    values = {key: value for key, value in config.values.items() if key != CLASS}
    return symbol("diffusers", config.class_name)(**values)


def record_initial(model: Denoiser) -> dict[str, InitSpec]:
    """Return the initialization of every parameter and buffer: that of diffusers' constructors, which is torch's."""
    found: dict[str, InitSpec] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found[f"{path}.{name}".lstrip(".")] = _init_spec(module, name, parameter)
    return found | _rotary_tables(model)


def _init_spec(module: nn.Module, name: str, parameter: torch.Tensor) -> InitSpec:
    if name == TABLE:
        return InitSpec("normal", 0.0, 1 / math.sqrt(parameter.shape[-1]))
    if isinstance(module, (nn.Linear, nn.Conv3d)):
        weight: Any = module.weight
        bound = 1 / math.sqrt(weight[0].numel())
        return InitSpec("uniform", -bound, bound)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return InitSpec("constant", 1.0 if name == "weight" else 0.0)
    raise MeshwrightError(f"unknown initialization of {name} in {type(module).__name__}", field="model")


def _rotary_tables(model: Denoiser) -> dict[str, InitSpec]:
    """Return the rotary tables, rebuilt off the meta device."""
    rope: Any = getattr(model, "rope", None)
    if rope is None:
        return {}
    with torch.device("cpu"):
        rope_on_cpu = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
    return {f"rope.{name}": InitSpec("values", values=buffer) for name, buffer in rope_on_cpu.named_buffers()}

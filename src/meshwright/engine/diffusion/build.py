"""Builds a diffusers transformer on the meta device, and says how each of its weights starts."""

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
    """The transformer of a config on the meta device: no weight exists until it is known who holds it."""
    with torch.device("meta"):
        model = diffusers_model(config)
    for parameter in model.parameters():  # and not the tables of cosines and sines
        parameter.data = parameter.data.to(dtype)
    return DENOISERS[config.model_type](model, config, compute).train()


def diffusers_model(config: DenoiserConfig) -> Any:
    """The model as diffusers builds it."""
    values = {key: value for key, value in config.values.items() if key != CLASS}
    return symbol("diffusers", config.class_name)(**values)


def record_initial(model: Denoiser) -> dict[str, InitSpec]:
    """How every parameter and buffer starts: as diffusers' constructors have it, which are those of torch."""
    found: dict[str, InitSpec] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found[f"{path}.{name}".lstrip(".")] = _start(module, name, parameter)
    return found | _rotary_tables(model)


def _start(module: nn.Module, name: str, parameter: torch.Tensor) -> InitSpec:
    if name == TABLE:
        return InitSpec("normal", 0.0, 1 / math.sqrt(parameter.shape[-1]))
    if isinstance(module, (nn.Linear, nn.Conv3d)):
        weight: Any = module.weight
        bound = 1 / math.sqrt(weight[0].numel())
        return InitSpec("uniform", -bound, bound)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return InitSpec("constant", 1.0 if name == "weight" else 0.0)
    raise MeshwrightError(f"it is not known how {name} of a {type(module).__name__} starts", field="model")


def _rotary_tables(model: Denoiser) -> dict[str, InitSpec]:
    """Buffers of cosines and sines, made once more off the meta device."""
    rope: Any = getattr(model, "rope", None)
    if rope is None:
        return {}
    with torch.device("cpu"):
        made = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
    return {f"rope.{name}": InitSpec("values", values=buffer) for name, buffer in made.named_buffers()}

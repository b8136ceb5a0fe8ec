"""Four-bit weights of a stage: declared before sharding, filled one matrix at a time.

A packed weight is two frozen parameters, `base_codes` and `base_scales` of a linear layer (with a number suffix where
the weight is split into segments), or `…_codes` and `…_scales` of stacked experts. They are sharded like any other
parameter; shards along the last dimension do not split blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.engine.experts.expert_params import unpacked_shape
from meshwright.engine.kernels.device_caps import has_data
from meshwright.engine.kernels.nf4 import pack, packed_shapes
from meshwright.errors import InputError

CODES, SCALES = "base_codes", "base_scales"
_PACKED = re.compile(r"(base|_proj)_(codes|scales)(_\d+)?$")


def pack_linear(linear: Any, path: str) -> None:
    """Replace the weight of a linear layer by codes and scales."""
    weight = linear.weight
    if weight.shape[-1] % 2:
        raise InputError(
            f"{path} has rows of {weight.shape[-1]} values, an odd number; two values share a byte",
            field="peft.method",
            value="qlora",
            fix=("peft.method=lora",),
        )
    for name, shape, dtype in zip(
        (CODES, SCALES), packed_shapes(tuple(weight.shape)), (torch.uint8, weight.dtype), strict=True
    ):
        empty = torch.empty(shape, dtype=dtype, device=weight.device)
        linear.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    linear.register_parameter("weight", None)


def weights_to_fill(stage: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter under the model's name; fill it in place before taking the next.

    A packed one is yielded as an unpacked matrix in the dtype of its scales, sharded like its codes, and is packed when
    the next is taken: there is never more than one unpacked matrix in memory.
    """
    for name, parameter, module in _owned(stage):
        if not _PACKED.search(name):
            yield name, parameter
            continue
        scales = module.get_parameter(name.rpartition(".")[2].replace("_codes", "_scales"))
        unpacked = _unpacked_like(module, name, parameter, scales.dtype)
        yield _model_name(name), unpacked
        _pack(unpacked, parameter, scales)


def shapes_to_fill(stage: nn.Module) -> dict[str, torch.Size]:
    """Return the full shape of every parameter by the model's name."""
    return {
        _model_name(name) if _PACKED.search(name) else name: torch.Size(_full_shape(module, name, parameter))
        for name, parameter, module in _owned(stage)
    }


def _owned(stage: nn.Module) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    """Yield all parameters except scales, with their module."""
    for name, parameter in list(stage.named_parameters()):
        found = _PACKED.search(name)
        if found is None or found.group(2) == "codes":
            yield name, parameter, stage.get_submodule(name.rpartition(".")[0])


def _model_name(name: str) -> str:
    """Return the model's name of a weight from the name of its codes."""
    return re.sub(r"_codes(_\d+)?$", r"\1", name).replace(".base", ".weight")


def _full_shape(module: Any, name: str, codes: torch.Tensor) -> tuple[int, ...]:
    if not _PACKED.search(name):
        return tuple(codes.shape)
    if hasattr(module, "is_concatenated"):
        return unpacked_shape(module, name.rpartition(".")[2], tuple(codes.shape))
    return (*codes.shape[:-1], 2 * codes.shape[-1])


def _unpacked_like(module: nn.Module, name: str, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty unpacked weight, sharded like the codes."""
    shape = _full_shape(module, name, codes)
    if not isinstance(codes, DTensor):
        return torch.empty(shape, dtype=dtype, device=codes.device)
    local = codes.to_local()
    flat = torch.empty((local.numel() * 2,), dtype=dtype, device=local.device)
    shard = flat.view(_full_shape(module, name, local))
    stride = tuple(torch.empty(shape, device="meta").stride())
    return DTensor.from_local(
        shard, codes.device_mesh, codes.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _pack(unpacked: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    weight, into, with_scales = (
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (unpacked, codes, scales)
    )
    if into.numel() and has_data(into):
        pack(weight, into, with_scales)

"""Storage of expert parameters, so that ep and etp each shard one plain dimension.

Models fuse an expert's gate and up matrices into one dimension of 2·I. Sharded over etp, one rank would get all gates
and another all ups. Here it becomes two dimensions, 2 and I, of the same bytes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.engine.kernels.nf4 import packed_shapes

ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class ExpertShardSpec:
    """The dimension that each axis shards; None where a parameter is replicated over etp."""

    ep_dim: int
    etp_dim: int | None


@dataclass(frozen=True)
class ExpertBlock:
    """A mixture-of-experts block of a model."""

    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module


def expert_blocks(model: nn.Module) -> Iterator[ExpertBlock]:
    """Yield all blocks whose experts run through transformers' experts interface."""
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        router = next((getattr(block, one) for one in ROUTER_NAMES if hasattr(block, one)), None)
        if isinstance(experts, nn.Module) and hasattr(experts, "is_concatenated") and isinstance(router, nn.Module):
            yield ExpertBlock(name, block, router, experts)


def first_proj(experts: Any) -> str:
    """Return the name of the first projection: gate and up fused, or up alone."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def parameter_names(experts: Any) -> tuple[str, ...]:
    """Return the names of the experts' parameters in order of use."""
    names = (first_proj(experts), "down_proj")
    return tuple(part for name in names for part in ((name, f"{name}_bias") if experts.has_bias else (name,)))


def reshape_experts(experts: nn.Module) -> None:
    """Split the fused dimension of gate and up in place; names and bytes stay, a second call changes nothing."""
    for name in parameter_names(experts):
        parameter = getattr(experts, name)
        if parameter is None or not _is_fused_pair(experts, name) or parameter.ndim == _split_ndim(name):
            continue
        at = _inner_dim(experts, name)
        pair = (2, -1) if experts.is_concatenated else (-1, 2)
        split = nn.Parameter(parameter.data.unflatten(at, pair), requires_grad=parameter.requires_grad)
        split.__dict__.update(parameter.__dict__)  # attributes that loaders set on the parameter
        setattr(experts, name, split)


def fused_shape(experts: nn.Module, name: str) -> tuple[int, ...]:
    """Return the shape of a parameter in checkpoint files, for `parameter.view(...)` on export."""
    shape = tuple(getattr(experts, name).shape)
    if not _is_fused_pair(experts, name) or len(shape) != _split_ndim(name):
        return shape
    at = _inner_dim(experts, name)
    return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])


def down_proj_widths(experts: Any) -> tuple[int, int]:
    """Return the widths of the inputs and the outputs of the down projection, also if it is packed."""
    packed = packed_experts(experts, "down_proj")
    shape = tuple(experts.down_proj.shape) if packed is None else unpacked_shape(experts, "down_proj", packed[0].shape)
    return (shape[-2], shape[-1]) if experts.is_transposed else (shape[-1], shape[-2])


def shard_specs(experts: nn.Module) -> dict[str, ExpertShardSpec]:
    """Return the dimensions that ep and etp shard, by parameter, after `reshape_experts`."""
    stored = (part for name in parameter_names(experts) for part in (name, *packed_names(name)))
    present = (name for name in stored if getattr(experts, name, None) is not None)
    return {name: ExpertShardSpec(0, _etp_dim(experts, name)) for name in present} | _adapter_specs(experts)


def packed_names(name: str) -> tuple[str, str]:
    """Return the names of the codes and scales of a four-bit projection."""
    return f"{name}_codes", f"{name}_scales"


def pack_expert(experts: Any, name: str) -> None:
    """Store one projection of all experts as codes and scales, in the order of the model's own weights."""
    reshape_experts(experts)
    weight = getattr(experts, name)
    shape = tuple(weight.shape)
    if _is_interleaved(experts, name):  # interleaved gate and up: the two halves of a byte
        shape = (*shape[:-2], 2 * shape[-2])
    for part, packed, dtype in zip(packed_names(name), packed_shapes(shape), (torch.uint8, weight.dtype), strict=True):
        empty = torch.empty(packed, dtype=dtype, device=weight.device)
        experts.register_parameter(part, nn.Parameter(empty, requires_grad=False))
    experts.register_parameter(name, None)


def packed_experts(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's codes and scales of a projection with gate and up fused; None if it is not packed."""
    if getattr(experts, name) is not None:
        return None
    codes, scales = (_local(getattr(experts, part)) for part in packed_names(name))
    if not _is_fused_pair(experts, name) or _is_interleaved(experts, name):
        return codes, scales
    at = _inner_dim(experts, name)
    return codes.flatten(at, at + 1), scales.flatten(at, at + 1)


def unpacked_shape(experts: Any, name: str, codes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a projection that is stored as codes of this shape."""
    return (*codes, 2) if _is_interleaved(experts, name) else (*codes[:-1], 2 * codes[-1])


def _is_interleaved(experts: Any, name: str) -> bool:
    return _is_fused_pair(experts, name) and not experts.is_concatenated and bool(experts.is_transposed)


def add_expert_adapter(experts: Any, name: str, rank: int, scale: float, dtype: torch.dtype) -> int:
    """Add low-rank adapters A [E, rank, in] and B [E, out, rank] to one projection; return the width of `in`.

    Gate and up share A; the outputs of B are split into two dimensions like the weight's.
    """
    count, *widths = fused_shape(experts, name)
    inputs, outputs = widths if experts.is_transposed else reversed(widths)
    pair = (2, outputs // 2) if experts.is_concatenated else (outputs // 2, 2)
    split = pair if _is_fused_pair(experts, name) else (outputs,)
    device = getattr(experts, name).device
    for part, shape in (("A", (count, rank, inputs)), ("B", (count, *split, rank))):
        empty = torch.empty(shape, dtype=dtype, device=device)
        experts.register_parameter(f"{name}_lora_{part}", nn.Parameter(empty))
    experts.lora_scale = scale
    return int(inputs)


def adapter_of(experts: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's shards of a projection's A [E, rank, in] and B [E, out, rank]; None without adapter."""
    if not hasattr(experts, f"{name}_lora_A"):
        return None
    first, second = (_local(getattr(experts, f"{name}_lora_{part}")) for part in "AB")
    return first, second.flatten(1, -2)


def replicated_adapters(experts: nn.Module) -> list[nn.Parameter]:
    """Return the adapters that are replicated over etp: each rank computes a partial gradient of them."""
    return [getattr(experts, name) for name, spec in _adapter_specs(experts).items() if spec.etp_dim is None]


def _adapter_specs(experts: Any) -> dict[str, ExpertShardSpec]:
    first = first_proj(experts)
    after_the_pair = _is_fused_pair(experts, first) and experts.is_concatenated
    possible = {
        f"{first}_lora_A": ExpertShardSpec(0, None),
        f"{first}_lora_B": ExpertShardSpec(0, 2 if after_the_pair else 1),
        "down_proj_lora_A": ExpertShardSpec(0, 2),
        "down_proj_lora_B": ExpertShardSpec(0, None),
    }
    return {name: spec for name, spec in possible.items() if hasattr(experts, name)}


def fused(experts: nn.Module, name: str) -> torch.Tensor:
    """Return this rank's shard of a parameter as a plain tensor with gate and up fused."""
    local = _local(getattr(experts, name))
    if _is_fused_pair(experts, name) and local.ndim == _split_ndim(name):
        at = _inner_dim(experts, name)
        return local.flatten(at, at + 1)
    return local


def _local(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _is_fused_pair(experts: Any, name: str) -> bool:
    return bool(experts.has_gate) and not name.startswith("down_proj")


def _split_ndim(name: str) -> int:
    return 3 if name.endswith("_bias") else 4


def _inner_dim(experts: Any, name: str) -> int:
    """Return the dimension of the fused parameter that is the experts' inner width."""
    if name.endswith("_bias"):
        return 1
    columns_last = bool(experts.is_transposed)  # stored [in, out] rather than [out, in]
    return 2 if columns_last != name.startswith("down_proj") else 1


def _etp_dim(experts: Any, name: str) -> int | None:
    if name == "down_proj_bias":
        return None
    after_the_pair = _is_fused_pair(experts, name) and experts.is_concatenated
    return _inner_dim(experts, name) + int(after_the_pair)

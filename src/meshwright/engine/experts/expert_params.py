"""How experts' parameters are stored, so that ep and etp each cut one plain dimension.

Models fuse an expert's gate and up matrices into one dimension of 2·I. A cut of that dimension over etp would give one
rank all gates and another all ups; here it becomes two dimensions, 2 and I, of the same bytes in the same order.
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
    """The dimension of a parameter that each axis cuts; None where every rank of the axis holds all of it."""

    ep_dim: int
    etp_dim: int | None


@dataclass(frozen=True)
class ExpertBlock:
    """A mixture-of-experts block of a model: its name, the block, its router and its experts."""

    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module


def expert_blocks(model: nn.Module) -> Iterator[ExpertBlock]:
    """All blocks of a model whose experts run through the experts interface."""
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        router = next((getattr(block, one) for one in ROUTER_NAMES if hasattr(block, one)), None)
        if isinstance(experts, nn.Module) and hasattr(experts, "is_concatenated") and isinstance(router, nn.Module):
            yield ExpertBlock(name, block, router, experts)


def first_proj(experts: Any) -> str:
    """The name of the first projection: gate and up together, or up alone."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def parameter_names(experts: Any) -> tuple[str, ...]:
    """The experts' parameters in the order in which they are used."""
    names = (first_proj(experts), "down_proj")
    return tuple(part for name in names for part in ((name, f"{name}_bias") if experts.has_bias else (name,)))


def reshape_experts(experts: nn.Module) -> None:
    """Splits the fused dimension of gate and up, in place; names and bytes stay, a second call changes nothing."""
    for name in parameter_names(experts):
        parameter = getattr(experts, name)
        if parameter is None or not _holds_pairs(experts, name) or parameter.ndim == _split_ndim(name):
            continue
        at = _inner_dim(experts, name)
        pair = (2, -1) if experts.is_concatenated else (-1, 2)
        split = nn.Parameter(parameter.data.unflatten(at, pair), requires_grad=parameter.requires_grad)
        split.__dict__.update(parameter.__dict__)  # what loaders noted on the parameter stays true of it
        setattr(experts, name, split)


def fused_shape(experts: nn.Module, name: str) -> tuple[int, ...]:
    """The shape a parameter has in the model's own files, for `parameter.view(...)` on export."""
    shape = tuple(getattr(experts, name).shape)
    if not _holds_pairs(experts, name) or len(shape) != _split_ndim(name):
        return shape
    at = _inner_dim(experts, name)
    return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])


def shard_specs(experts: nn.Module) -> dict[str, ExpertShardSpec]:
    """On which dimension ep and etp cut each parameter, after `reshape_experts`."""
    stored = (part for name in parameter_names(experts) for part in (name, *packed_names(name)))
    held = (name for name in stored if getattr(experts, name, None) is not None)
    return {name: ExpertShardSpec(0, _etp_dim(experts, name)) for name in held} | _adapter_cuts(experts)


def packed_names(name: str) -> tuple[str, str]:
    """What the codes and scales of a projection in four bits are called."""
    return f"{name}_codes", f"{name}_scales"


def pack_expert(experts: Any, name: str) -> None:
    """Stores one projection of all experts as codes and scales, in the order of the model's own numbers."""
    reshape_experts(experts)
    weight = getattr(experts, name)
    shape = tuple(weight.shape)
    if _ends_in_pairs(experts, name):  # gate and up of one place side by side: both halves of a byte
        shape = (*shape[:-2], 2 * shape[-2])
    for part, packed, dtype in zip(packed_names(name), packed_shapes(shape), (torch.uint8, weight.dtype), strict=True):
        empty = torch.empty(packed, dtype=dtype, device=weight.device)
        experts.register_parameter(part, nn.Parameter(empty, requires_grad=False))
    experts.register_parameter(name, None)


def packed_experts(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """This rank's codes and scales of a projection, gate and up in one dimension; None where it is not packed."""
    if getattr(experts, name) is not None:
        return None
    codes, scales = (_local(getattr(experts, part)) for part in packed_names(name))
    if not _holds_pairs(experts, name) or _ends_in_pairs(experts, name):
        return codes, scales
    at = _inner_dim(experts, name)
    return codes.flatten(at, at + 1), scales.flatten(at, at + 1)


def unpacked_shape(experts: Any, name: str, codes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a projection that is stored as codes of this shape."""
    return (*codes, 2) if _ends_in_pairs(experts, name) else (*codes[:-1], 2 * codes[-1])


def _ends_in_pairs(experts: Any, name: str) -> bool:
    return _holds_pairs(experts, name) and not experts.is_concatenated and bool(experts.is_transposed)


def add_expert_adapter(experts: Any, name: str, rank: int, scale: float, dtype: torch.dtype) -> int:
    """Gives one projection of all experts low-rank adapters, A [E, rank, in] and B [E, out, rank]; says how wide in is.

    Of a gate and up projection the two share A, and B's outputs are two dimensions like the weight's.
    """
    count, *widths = fused_shape(experts, name)
    inputs, outputs = widths if experts.is_transposed else reversed(widths)
    pair = (2, outputs // 2) if experts.is_concatenated else (outputs // 2, 2)
    split = pair if _holds_pairs(experts, name) else (outputs,)
    device = getattr(experts, name).device
    for part, shape in (("A", (count, rank, inputs)), ("B", (count, *split, rank))):
        empty = torch.empty(shape, dtype=dtype, device=device)
        experts.register_parameter(f"{name}_lora_{part}", nn.Parameter(empty))
    experts.lora_scale = scale
    return int(inputs)


def adapter_of(experts: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """This rank's slices of a projection's A [E, rank, in] and B [E, out, rank]; None where it has no adapter."""
    if not hasattr(experts, f"{name}_lora_A"):
        return None
    first, second = (_local(getattr(experts, f"{name}_lora_{part}")) for part in "AB")
    return first, second.flatten(1, -2)


def replicated_adapters(experts: nn.Module) -> list[nn.Parameter]:
    """Adapters that every etp rank holds whole; each computes a part of their gradients."""
    return [getattr(experts, name) for name, cut in _adapter_cuts(experts).items() if cut.etp_dim is None]


def _adapter_cuts(experts: Any) -> dict[str, ExpertShardSpec]:
    first = first_proj(experts)
    behind_the_pair = _holds_pairs(experts, first) and experts.is_concatenated
    possible = {
        f"{first}_lora_A": ExpertShardSpec(0, None),
        f"{first}_lora_B": ExpertShardSpec(0, 2 if behind_the_pair else 1),
        "down_proj_lora_A": ExpertShardSpec(0, 2),
        "down_proj_lora_B": ExpertShardSpec(0, None),
    }
    return {name: cut for name, cut in possible.items() if hasattr(experts, name)}


def fused(experts: nn.Module, name: str) -> torch.Tensor:
    """This rank's slice of a parameter as a plain tensor, gate and up in one dimension again."""
    local = _local(getattr(experts, name))
    if _holds_pairs(experts, name) and local.ndim == _split_ndim(name):
        at = _inner_dim(experts, name)
        return local.flatten(at, at + 1)
    return local


def _local(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _holds_pairs(experts: Any, name: str) -> bool:
    return bool(experts.has_gate) and not name.startswith("down_proj")


def _split_ndim(name: str) -> int:
    return 3 if name.endswith("_bias") else 4


def _inner_dim(experts: Any, name: str) -> int:
    """Where the fused parameter holds the experts' inner width."""
    if name.endswith("_bias"):
        return 1
    columns_last = bool(experts.is_transposed)  # stored [in, out] rather than [out, in]
    return 2 if columns_last != name.startswith("down_proj") else 1


def _etp_dim(experts: Any, name: str) -> int | None:
    if name == "down_proj_bias":
        return None
    behind_the_pair = _holds_pairs(experts, name) and experts.is_concatenated
    return _inner_dim(experts, name) + int(behind_the_pair)

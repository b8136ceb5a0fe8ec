"""FSDP gathers the weights of fp8 linear layers in fp8: each rank casts its shard before the all-gather.

All shards of a weight are cast with one scale, so the ranks first agree on its largest magnitude: one small all-reduce
(MAX) for all weights of a stage, before every forward pass. Stored, trained and saved weights do not change, and the
result equals that of gathering first and casting then.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.engine.kernels.device_caps import has_data
from meshwright.engine.kernels.fp8 import ACTIVATION, cast_scaled, scale_for
from meshwright.engine.kernels.fp8_weight import Fp8Weight
from meshwright.engine.kernels.linears import Fp8Linear
from meshwright.engine.mesh import Mesh
from meshwright.engine.parallelize.fsdp import DTYPES
from meshwright.recipes.types import Recipe

ALIGNED = 4  # fp32 numbers between units: cuBLAS takes scales at multiples of 16 bytes only


class Fp8Shard(torch.Tensor):
    """This rank's shard of a weight, with FSDP2's hooks around the all-gather."""

    scale: Tensor  # factor before the cast, the same on all ranks
    unit: Tensor  # its reciprocal

    # Without it every result of an operation would be an Fp8Shard too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        """Return the tensors to gather and the metadata for `fsdp_post_all_gather`."""
        shard = self.to(policy.param_dtype or self.dtype)
        codes = cast_scaled(shard, self.scale, ACTIVATION)
        # The unit is not made here: memory of FSDP's stream is reused before the compute stream has read it.
        return (codes.view(torch.uint8),), (self.unit,)  # not every backend supports fp8 dtypes

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the full weight; later calls reuse its buffer and only update the scale."""
        (codes,), (unit,) = outputs, metadata
        if out is None:
            return Fp8Weight(codes.view(ACTIVATION), unit, dtype), (codes,)
        weight: Any = out._local_tensor if isinstance(out, DTensor) else out
        weight.unit = unit
        return None


def gather_in_fp8(stage: nn.Module, mesh: Mesh, recipe: Recipe) -> list[str]:
    """Gather the weights of a stage's fp8 linear layers in fp8; return their names.

    Call it after the weights are allocated. Weights with uneven shards, with offload, with more than one scale, or that
    are read outside the GEMM (dora) are gathered as usual.
    """
    if not recipe.precision.fp8_gather or recipe.layout.offload in ("params", "optimizer"):
        return []
    weights = {
        f"{name}.weight": module.weight
        for name, module in stage.named_modules()
        if isinstance(module, Fp8Linear) and _can_gather_in_fp8(module)
    }
    shards = [_as_fp8_shard(parameter) for parameter in weights.values()]
    if shards:
        dtype, group = DTYPES[recipe.precision.compute], mesh.state["fsdp"].get_group()
        # Before FSDP's own hook, in which its streams wait for the compute stream: they read the scales.
        stage.register_forward_pre_hook(lambda *_: sync_scales(shards, dtype, group), prepend=True)
        _sync_before_unshard(stage, lambda: sync_scales(shards, dtype, group))
    return list(weights)


def _sync_before_unshard(stage: Any, sync: Callable[[], None]) -> None:
    """Sync the scales also where a pipeline schedule gathers a stage's weights before its first forward pass."""
    unshard = stage.unshard

    def synced(*args: Any, **kwargs: Any) -> Any:
        sync()
        return unshard(*args, **kwargs)

    stage.unshard = synced


def _can_gather_in_fp8(linear: Fp8Linear) -> bool:
    weight = linear._parameters.get("weight")  # absent where it is split into segments
    if linear.scaling != "tensor" or not isinstance(weight, DTensor) or hasattr(linear, "lora_magnitude"):
        return False
    parts = 1
    for size, place in zip(weight.device_mesh.shape, weight.placements, strict=True):
        parts *= size if getattr(place, "dim", None) == 0 else 1
    return weight.shape[0] % parts == 0


def _as_fp8_shard(parameter: Any) -> Fp8Shard:
    if not has_data(parameter._local_tensor):
        return _with_hooks(parameter._local_tensor)
    shard: Fp8Shard = torch.Tensor._make_subclass(Fp8Shard, parameter._local_tensor)
    parameter._local_tensor = shard
    return shard


def _with_hooks(local: Any) -> Fp8Shard:
    """Add the hooks to a tensor without data, which must keep its own class."""
    for method in (Fp8Shard.fsdp_pre_all_gather, Fp8Shard.fsdp_post_all_gather):
        setattr(local, method.__name__, MethodType(method, local))
    return local  # type: ignore[no-any-return]  # it has what FSDP calls


@torch.no_grad()
def sync_scales(shards: list[Fp8Shard], dtype: torch.dtype, group: Any) -> None:
    """Set the scales of all shards from the largest magnitudes over the ranks of the group."""
    # The maximum of what is cast, weights in the compute dtype: rounding is monotonic, so the maximum can be rounded.
    largest = torch.stack(torch._foreach_norm(tuple(shards), ord=float("inf"))).to(dtype).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    scales = scale_for(largest, ACTIVATION)
    units = scales.reciprocal()[:, None].repeat(1, ALIGNED)[:, 0]
    for shard, scale, unit in zip(shards, scales.unbind(), units.unbind(), strict=True):
        shard.scale, shard.unit = scale, unit

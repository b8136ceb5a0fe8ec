"""Weights of 8-bit linear layers travel in 8 bits: sharding casts each rank's part before it gathers the whole.

All parts of a weight are cast with one scale, so the ranks first agree on the largest magnitude of each: one small sum
(a maximum) for all weights of a stage, before every forward pass. What is stored, trained and saved stays as it was,
and the numbers are those of a weight gathered first and cast then.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.engine.kernels.device_caps import has_data
from meshwright.engine.kernels.fp8 import ACTIVATION, scale_for, scaled
from meshwright.engine.kernels.fp8_weight import Fp8Weight
from meshwright.engine.kernels.linears import Fp8Linear
from meshwright.engine.mesh import Mesh
from meshwright.engine.parallelize.fsdp import DTYPES
from meshwright.recipes.types import Recipe


class Fp8Shard(torch.Tensor):
    """This rank's part of a weight: a plain tensor that tells sharding how it wants to be gathered."""

    scale: Tensor  # what its numbers are multiplied by before the cast, the same on all ranks

    # Without it every result of an operation would be an Fp8Shard too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        """What to send, and what the receiver needs to know."""
        computing = self.to(policy.param_dtype or self.dtype)
        codes = scaled(computing, self.scale, ACTIVATION)
        return (codes.view(torch.uint8),), (self.scale.reciprocal(),)  # not every backend knows 8-bit floats

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], known: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight; on later calls only its scale is new, its codes lie where they lay."""
        (codes,), (unit,) = outputs, known
        if out is None:
            return Fp8Weight(codes.view(ACTIVATION), unit, dtype), (codes,)
        weight: Any = out._local_tensor if isinstance(out, DTensor) else out
        weight.unit = unit
        return None


def gather_in_fp8(stage: nn.Module, mesh: Mesh, recipe: Recipe) -> list[str]:
    """Lets the weights of a stage's 8-bit linear layers travel in 8 bits; the names of those that do.

    Call it when the weights exist. Weights that the ranks hold unequal parts of are gathered as before, and so are
    those that wait in host memory, have more than one scale, or that something else than a product looks at (dora).
    """
    if not recipe.precision.fp8_gather or recipe.layout.offload in ("params", "optimizer"):
        return []
    found = {
        f"{name}.weight": module.weight
        for name, module in stage.named_modules()
        if isinstance(module, Fp8Linear) and _travels(module)
    }
    shards = [_mark(parameter) for parameter in found.values()]
    if shards:
        dtype, group = DTYPES[recipe.precision.compute], mesh.state["fsdp"].get_group()
        stage.register_forward_pre_hook(lambda *_: sync_scales(shards, dtype, group))
    return list(found)


def _travels(linear: Fp8Linear) -> bool:
    weight = linear._parameters.get("weight")  # stored in several parts where a cut asks for it
    if linear.scaling != "tensor" or not isinstance(weight, DTensor) or hasattr(linear, "lora_magnitude"):
        return False
    parts = 1
    for size, place in zip(weight.device_mesh.shape, weight.placements, strict=True):
        parts *= size if getattr(place, "dim", None) == 0 else 1
    return weight.shape[0] % parts == 0


def _mark(parameter: Any) -> Fp8Shard:
    if not has_data(parameter._local_tensor):
        return _mark_dry(parameter._local_tensor)
    shard: Fp8Shard = torch.Tensor._make_subclass(Fp8Shard, parameter._local_tensor)
    parameter._local_tensor = shard
    return shard


def _mark_dry(local: Any) -> Fp8Shard:
    """The same for a tensor without data, which has a class of its own and keeps it."""
    for method in (Fp8Shard.fsdp_pre_all_gather, Fp8Shard.fsdp_post_all_gather):
        setattr(local, method.__name__, MethodType(method, local))
    return local  # type: ignore[no-any-return]  # in all that sharding asks of it


@torch.no_grad()
def sync_scales(shards: list[Fp8Shard], dtype: torch.dtype, group: Any) -> None:
    """Sets the scales of all shards by the largest magnitudes over the ranks that share them."""
    # Maxima of what is cast: weights in the format of computation. Rounding to it keeps the order of numbers.
    largest = torch.stack(torch._foreach_norm(tuple(shards), ord=float("inf"))).to(dtype).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    for shard, scale in zip(shards, scale_for(largest, ACTIVATION).unbind(), strict=True):
        shard.scale = scale

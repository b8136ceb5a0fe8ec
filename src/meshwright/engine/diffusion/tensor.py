"""Tensor and sequence parallelism of diffusers' blocks: attention heads and feed-forward columns are sharded.

Weights are stored as sharded DTensors and used as plain local tensors. With sequence parallelism every rank has a part
of the tokens between the linear layers: inputs are all-gathered, outputs are reduce-scattered. Without it, inputs are
replicated and outputs all-reduced. The projections of shifts, scales and gates are not sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.engine.collectives import copy_in, gather, sum_out, sum_scatter
from meshwright.engine.mesh import SOLO, GroupInfo
from meshwright.engine.parallelize.tensor_parallel import check_divisible, shard_parameter
from meshwright.engine.patching import Patch, apply, base_class

TOKEN_DIM = 1  # the token dimension of hidden states


@dataclass(frozen=True)
class ActivationSharding:
    """How hidden states are distributed over tp ranks between linear layers: replicated, or with sp split by tokens."""

    tp: GroupInfo = SOLO
    sp: bool = False

    def gather_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return all tokens, for layers that compute a part of the outputs."""
        return gather(x, self.tp, TOKEN_DIM) if self.sp else copy_in(x, self.tp)

    def reduce_output(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce the ranks' partial outputs."""
        return sum_scatter(x, self.tp, TOKEN_DIM) if self.sp else sum_out(x, self.tp)

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is replicated even with sp; there its gradient stays partial, as for all weights."""
        return x if self.sp else copy_in(x, self.tp)


def local(parameter: Any) -> Any:
    """Return the local part of a parameter; None stays None."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Patches of modules whose weights are sharded over tp; each module has its `sharding`.


class OutputShardedLinear(Patch):
    """A linear layer that computes this rank's outputs."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight), local(self.bias))


class InputShardedLinear(Patch):
    """A linear layer that computes a partial sum from this rank's inputs and reduces it over the ranks."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.sharding.reduce_output(F.linear(x, local(self.weight)))
        return out if self.bias is None else out + self.bias


class TwoInputLinear(Patch):
    """A linear layer of two concatenated inputs that are never concatenated; also without tensor parallelism."""

    tag = "TwoInputs"

    def forward(self: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.sharding.reduce_output(
            F.linear(first, local(self.weight_0)) + F.linear(second, local(self.weight_1))
        )
        bias: torch.Tensor = self.bias
        return out + bias


class ShardedHeadsNorm(Patch):
    """An RMS norm over all heads, which are sharded: the mean square is reduced over the ranks."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        tp, wide = self.sharding.tp, x.float()
        squares = sum_out(copy_in(wide.square().sum(-1, keepdim=True), tp), tp)
        normed = wide * torch.rsqrt(squares / (x.shape[-1] * tp.size) + self.eps)
        weight: torch.Tensor = local(self.weight)
        return (normed * weight).to(x.dtype)


class GatheredInput(Patch):
    """A module whose input is gathered (or copied) for sharded layers inside it."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.sharding.gather_input(x), *args, **kwargs)


class GatheredOutput(Patch):
    """The norm of a FLUX single block: attention and feed-forward share its gathered output."""

    tag = "TP"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x, gate = super().forward(*args, **kwargs)
        return self.sharding.gather_input(x), gate


@dataclass(frozen=True)
class Role:
    """How a module of a block is sharded: its patch, and the shard dimension of each weight."""

    patch: type[Patch]
    shard_dims: dict[str, int]


OUTPUT_SHARDED = Role(OutputShardedLinear, {"weight": 0, "bias": 0})
INPUT_SHARDED = Role(InputShardedLinear, {"weight": 1})
TWO_INPUTS = Role(TwoInputLinear, {"weight_0": 1, "weight_1": 1})
HEADS_NORM = Role(ShardedHeadsNorm, {"weight": 0})
GATHERED_INPUT = Role(GatheredInput, {})
GATHERED_OUTPUT = Role(GatheredOutput, {})

FEED_FORWARD = {"": GATHERED_INPUT, "net.0.proj": OUTPUT_SHARDED, "net.2": INPUT_SHARDED}


def _prefixed(path: str, roles: dict[str, Role]) -> dict[str, Role]:
    return {f"{path}.{name}" if name else path: role for name, role in roles.items()}


WAN_ATTENTION = {
    "to_q": OUTPUT_SHARDED,
    "to_k": OUTPUT_SHARDED,
    "to_v": OUTPUT_SHARDED,
    "norm_q": HEADS_NORM,
    "norm_k": HEADS_NORM,
    "to_out.0": INPUT_SHARDED,
}
QKV = {"to_q": OUTPUT_SHARDED, "to_k": OUTPUT_SHARDED, "to_v": OUTPUT_SHARDED}
JOINT_QKV = {**QKV, "add_q_proj": OUTPUT_SHARDED, "add_k_proj": OUTPUT_SHARDED, "add_v_proj": OUTPUT_SHARDED}
# Module paths inside each type of block.
BLOCKS: dict[str, dict[str, Role]] = {
    "WanTransformerBlock": {
        **_prefixed("attn1", WAN_ATTENTION),
        **_prefixed("attn2", WAN_ATTENTION),
        **_prefixed("ffn", FEED_FORWARD),
    },
    "FluxTransformerBlock": {
        **_prefixed("attn", {**JOINT_QKV, "to_out.0": INPUT_SHARDED, "to_add_out": INPUT_SHARDED}),
        **_prefixed("ff", FEED_FORWARD),
        **_prefixed("ff_context", FEED_FORWARD),
    },
    "FluxSingleTransformerBlock": {
        **_prefixed("attn", QKV),
        "norm": GATHERED_OUTPUT,
        "proj_mlp": OUTPUT_SHARDED,
        "proj_out": TWO_INPUTS,
    },
}
# Per-head norms: replicated, but each rank only has the gradient of its own heads.
HEAD_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class SingleSequenceBlock(Patch):
    """A FLUX single block on text and image as one sequence that is kept from block to block."""

    tag = "SingleSequence"

    def forward(self: Any, hidden: torch.Tensor, time: torch.Tensor, tables: Any) -> torch.Tensor:
        normed, gate = self.norm(hidden, emb=time)
        update = self.proj_out(self.attn(normed, image_rotary_emb=tables), self.act_mlp(self.proj_mlp(normed)))
        out: torch.Tensor = hidden + gate.unsqueeze(1) * update
        return out.clip(-65504, 65504) if out.dtype == torch.float16 else out  # the range of fp16, as in diffusers


def split_output_projection(block: nn.Module) -> None:
    """Split a FLUX single block's output projection in two, for attention and feed-forward; in every layout."""
    if base_class(block).__name__ != "FluxSingleTransformerBlock":
        return
    linear: Any = block.proj_out
    widths = linear.out_features, linear.in_features - linear.out_features
    for i, part in enumerate(linear.weight.data.split(widths, 1)):
        linear.register_parameter(f"weight_{i}", nn.Parameter(part.contiguous()))
    linear.register_parameter("weight", None)
    linear.sharding = ActivationSharding()
    apply(linear, TwoInputLinear)
    apply(block, SingleSequenceBlock)


def shard_block(block: Any, sharding: ActivationSharding, state: DeviceMesh) -> None:
    """Shard a block's weights over the tp ranks."""
    if sharding.tp.size == 1:
        return
    block_name = base_class(block).__name__
    for path, role in BLOCKS[block_name].items():
        module = block.get_submodule(path)
        module.sharding = sharding
        for name, dim in role.shard_dims.items():
            if getattr(module, name, None) is not None:
                check_divisible(getattr(module, name), dim, sharding.tp, f"{block_name}.{path}")
                shard_parameter(module, name, state["tp"], dim)
        if role is not TWO_INPUTS:  # patched already, by prepare_block
            apply(module, role.patch)


def partial_grad_names(model: nn.Module, sharding: ActivationSharding) -> frozenset[str]:
    """Return the parameters with partial gradients: with sp all replicated ones, otherwise the per-head norms."""
    if sharding.tp.size == 1:
        return frozenset()
    replicated = (name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor))
    return frozenset(name for name in replicated if sharding.sp or name.split(".")[-2:][0] in HEAD_NORMS)

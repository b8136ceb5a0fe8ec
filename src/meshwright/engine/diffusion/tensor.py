"""Tensor and sequence parallelism of diffusers' blocks: heads and feed-forward columns, each rank its own.

Weights are stored as DTensors cut over the ranks and computed with as plain local tensors. With sequence parallelism
every rank holds a part of the tokens between the linear layers: what enters is gathered, what leaves is summed and
scattered. Without, it is copied and summed. The projections that make shifts, scales and gates are not cut.
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

TOKENS = 1  # the dimension of hidden states that counts tokens


@dataclass(frozen=True)
class Spread:
    """How hidden states lie over the tp ranks between linear layers: copied, or with sp a part of the tokens each."""

    tp: GroupInfo = SOLO
    sp: bool = False

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, for layers that compute a part of the columns."""
        return gather(x, self.tp, TOKENS) if self.sp else copy_in(x, self.tp)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks' columns."""
        return sum_scatter(x, self.tp, TOKENS) if self.sp else sum_out(x, self.tp)

    def condition(self, x: torch.Tensor) -> torch.Tensor:
        """What every rank holds whole also with sp: there its gradient stays partial, like that of all weights."""
        return x if self.sp else copy_in(x, self.tp)


def local(parameter: Any) -> Any:
    """The part of a parameter to compute with; None stays None."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Patches of modules whose weights are sharded over tp; each module has its `spread`.


class OutputShardedLinear(Patch):
    """A linear layer that computes this rank's outputs."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight), local(self.bias))


class InputShardedLinear(Patch):
    """A linear layer that computes a partial sum from this rank's inputs and reduces it over the ranks."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.spread.leave(F.linear(x, local(self.weight)))
        return out if self.bias is None else out + self.bias


class TwoInputLinear(Patch):
    """A linear layer of two concatenated inputs that are never concatenated; also without tensor parallelism."""

    tag = "TwoInputs"

    def forward(self: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.spread.leave(
            F.linear(first, local(self.weight_0)) + F.linear(second, local(self.weight_1))
        )
        bias: torch.Tensor = self.bias
        return out + bias


class ShardedHeadsNorm(Patch):
    """An RMS norm over all heads, which are sharded: the mean square is reduced over the ranks."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        tp, wide = self.spread.tp, x.float()
        squares = sum_out(copy_in(wide.square().sum(-1, keepdim=True), tp), tp)
        normed = wide * torch.rsqrt(squares / (x.shape[-1] * tp.size) + self.eps)
        weight: torch.Tensor = local(self.weight)
        return (normed * weight).to(x.dtype)


class GatheredInput(Patch):
    """A module whose input is gathered (or copied) for sharded layers inside it."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.spread.enter(x), *args, **kwargs)


class GatheredOutput(Patch):
    """The norm of a FLUX single block: attention and feed-forward share its gathered output."""

    tag = "TP"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x, gate = super().forward(*args, **kwargs)
        return self.spread.enter(x), gate


@dataclass(frozen=True)
class Role:
    """How a module of a block is sharded: its patch, and the dimension along which each weight is cut."""

    patch: type[Patch]
    cut: dict[str, int]


ROWS = Role(OutputShardedLinear, {"weight": 0, "bias": 0})
COLUMNS = Role(InputShardedLinear, {"weight": 1})
PACKED = Role(TwoInputLinear, {"weight_0": 1, "weight_1": 1})
HEADS_NORM = Role(ShardedHeadsNorm, {"weight": 0})
ENTERED = Role(GatheredInput, {})
ENTERING = Role(GatheredOutput, {})

FEED_FORWARD = {"": ENTERED, "net.0.proj": ROWS, "net.2": COLUMNS}


def _inside(path: str, roles: dict[str, Role]) -> dict[str, Role]:
    return {f"{path}.{name}" if name else path: role for name, role in roles.items()}


WAN_ATTENTION = {
    "to_q": ROWS,
    "to_k": ROWS,
    "to_v": ROWS,
    "norm_q": HEADS_NORM,
    "norm_k": HEADS_NORM,
    "to_out.0": COLUMNS,
}
QKV = {"to_q": ROWS, "to_k": ROWS, "to_v": ROWS}
JOINT_QKV = {**QKV, "add_q_proj": ROWS, "add_k_proj": ROWS, "add_v_proj": ROWS}
# Paths inside a block of each kind.
BLOCKS: dict[str, dict[str, Role]] = {
    "WanTransformerBlock": {
        **_inside("attn1", WAN_ATTENTION),
        **_inside("attn2", WAN_ATTENTION),
        **_inside("ffn", FEED_FORWARD),
    },
    "FluxTransformerBlock": {
        **_inside("attn", {**JOINT_QKV, "to_out.0": COLUMNS, "to_add_out": COLUMNS}),
        **_inside("ff", FEED_FORWARD),
        **_inside("ff_context", FEED_FORWARD),
    },
    "FluxSingleTransformerBlock": {**_inside("attn", QKV), "norm": ENTERING, "proj_mlp": ROWS, "proj_out": PACKED},
}
# Norms of single heads: every rank holds them whole and sees the gradient of its own heads.
HEAD_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class SingleSequenceBlock(Patch):
    """A FLUX single block on text and image as the one sequence that they stay from block to block."""

    tag = "SingleSequence"

    def forward(self: Any, hidden: torch.Tensor, time: torch.Tensor, tables: Any) -> torch.Tensor:
        normed, gate = self.norm(hidden, emb=time)
        found = self.proj_out(self.attn(normed, image_rotary_emb=tables), self.act_mlp(self.proj_mlp(normed)))
        out: torch.Tensor = hidden + gate.unsqueeze(1) * found
        return out.clip(-65504, 65504) if out.dtype == torch.float16 else out  # the range of fp16, as in diffusers


def prepare_block(block: nn.Module) -> None:
    """A FLUX single block's output projection becomes two, of attention and feed-forward; in every layout."""
    if base_class(block).__name__ != "FluxSingleTransformerBlock":
        return
    linear: Any = block.proj_out
    widths = linear.out_features, linear.in_features - linear.out_features
    for i, part in enumerate(linear.weight.data.split(widths, 1)):
        linear.register_parameter(f"weight_{i}", nn.Parameter(part.contiguous()))
    linear.register_parameter("weight", None)
    linear.spread = Spread()
    apply(linear, TwoInputLinear)
    apply(block, SingleSequenceBlock)


def cut_block(block: Any, spread: Spread, state: DeviceMesh) -> None:
    """Cuts a block's weights over the tp ranks."""
    if spread.tp.size == 1:
        return
    name_of_block = base_class(block).__name__
    for path, role in BLOCKS[name_of_block].items():
        module = block.get_submodule(path)
        module.spread = spread
        for name, dim in role.cut.items():
            if getattr(module, name, None) is not None:
                check_divisible(getattr(module, name), dim, spread.tp, f"{name_of_block}.{path}")
                shard_parameter(module, name, state["tp"], dim)
        if role is not PACKED:  # patched already, by prepare_block
            apply(module, role.patch)


def partial_names(model: nn.Module, spread: Spread) -> frozenset[str]:
    """Parameters whose gradients are partial sums: with sp all that are not cut, without the norms of single heads."""
    if spread.tp.size == 1:
        return frozenset()
    uncut = (name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor))
    return frozenset(name for name in uncut if spread.sp or name.split(".")[-2:][0] in HEAD_NORMS)

"""Tensor and sequence parallelism: regions of the model computed by heads or columns, each rank its own.

Parameters are stored as DTensors cut over the ranks and computed with as plain local tensors. With sequence
parallelism what enters a region is gathered along the sequence and what leaves it is summed and scattered; without, it
is copied and summed. What was gathered is not kept: the backward pass gathers it again (see recompute.py). Parameters
that are not cut get a part of their gradient on every rank: they are marked, and the step sums them at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.engine.collectives import copy_in, gather, sum_out, sum_scatter
from meshwright.engine.experts import expert_blocks
from meshwright.engine.mesh import SOLO, GroupInfo, Mesh
from meshwright.engine.parallelize.tp_plan import KV_ROWS, ShardSpec, TPModule, adapter_shards, tp_module_of
from meshwright.engine.patching import Patch, apply, base_class
from meshwright.errors import InputError

TOKENS = -2  # the dimension of hidden states that counts tokens


@dataclass(frozen=True)
class SequenceLayout:
    """How the sequence is spread inside a stage: over tp between regions, and over cp everywhere."""

    tp: GroupInfo = SOLO
    sp: bool = False
    cp: GroupInfo = SOLO
    order: torch.Tensor | None = None  # the position of every token when the cp ranks' parts are put side by side

    @property
    def gathers(self) -> bool:
        """Whether what enters a region is larger than what this rank holds of it."""
        return self.cp.size > 1 or (self.sp and self.tp.size > 1)


@dataclass(frozen=True)
class LocalParam:
    """How the tensor that a module computes with is made from what is stored.

    local  this rank's part of a cut parameter (cut once more over cp where the region mixes tokens)
    rows   some rows of a parameter that every rank holds whole
    once   the parameter on one rank, nothing on the others
    """

    how: str
    child: str  # the module that has the parameter, by its name in the region; empty: the region itself
    attribute: str
    stored: tuple[str, ...]  # parameters of that module: one, or one for each segment
    dim: int = 0
    cp: GroupInfo = SOLO
    first: int = 0
    count: int = 0
    mine: bool = True

    def make(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor to compute with."""
        if self.how == "rows":
            return parameter.narrow(0, self.first, self.count)
        if self.how == "once":
            return parameter if self.mine else parameter * 0
        return _local(parameter, self.dim, self.cp)


def shard_layer(layer: nn.Module, mesh: Mesh, sequence: SequenceLayout) -> None:
    """Cuts every region of a layer over the tp ranks; state-space mixers over the cp ranks too."""
    for module in list(layer.modules()):
        region = tp_module_of(module)
        if region is not None:
            _shard_module(module, region, mesh.state, sequence)


def partial_grad_names(stage: Any, sequence: SequenceLayout) -> frozenset[str]:
    """Parameters whose gradients are partial sums: with sp all that are not cut, without those in regions.

    Experts are left out: they are cut and summed over ranks of their own. Vision parts are no regions: every rank
    computes them whole, and with sp each uses what is seen in the places of its own tokens.
    """
    if sequence.tp.size == 1:
        return frozenset()
    inside = (module for layer in stage.layers.values() for module in layer.modules())
    regions = {id(p) for m in inside if tp_module_of(m) is not None for p in m.parameters()}
    routed = {id(p) for block in expert_blocks(stage) for p in block.experts.parameters()}
    return frozenset(
        name
        for name, p in stage.named_parameters()
        if not isinstance(p, DTensor) and id(p) not in routed and (sequence.sp or id(p) in regions)
    )


def split_fused_params(layer: nn.Module) -> None:
    """Stores a parameter made of several parts as several, so that each can be cut by itself; in every layout alike."""
    for module in list(layer.modules()):
        region = tp_module_of(module)
        for path, cut in list(_shard_specs(module, region)) if region is not None else ():
            child, _, name = path.rpartition(".")
            owner = _child(module, child)
            whole = getattr(owner, name, None) if owner is not None else None
            if whole is None or not isinstance(cut, ShardSpec) or cut.segments is None:
                continue
            assert owner is not None
            for i, part in enumerate(whole.data.split(cut.segments(module), cut.dim)):
                owner.register_parameter(f"{name}_{i}", nn.Parameter(part.contiguous(), whole.requires_grad))
            owner.register_parameter(name, None)


def _shard_module(module: nn.Module, region: TPModule, state: DeviceMesh, sequence: SequenceLayout) -> None:
    tp = sequence.tp
    cp = sequence.cp if region.mixes_tokens else SOLO
    uses = [
        use for path, cut in _shard_specs(module, region) for use in _local_params(module, path, cut, state, tp, cp)
    ]
    if not uses:
        return
    for name in region.local:
        setattr(module, name, getattr(module, name) // (tp.size * cp.size))
    for child, names in region.inner.items():
        for name in names:
            owner = getattr(module, child)
            setattr(owner, name, getattr(owner, name) // (tp.size * cp.size))
    if tp.size * cp.size > 1:
        _shard_norms(module, tp)
        for path, _ in adapter_shards(module, region):
            if path.endswith("lora_A"):  # rows of the weight are cut: their norm is taken over all parts
                getattr(module, path.rpartition(".")[0]).lora_axes = (tp, cp)
    _wrap(module, uses, sequence if cp.size > 1 else SequenceLayout(tp, sequence.sp))


def _shard_specs(module: nn.Module, region: TPModule) -> Iterator[tuple[str, ShardSpec | str]]:
    yield from region.cuts.items()
    yield from adapter_shards(module, region)
    for name in _full_width_norms(module):
        yield f"{name}.weight", KV_ROWS if name == "k_norm" else ShardSpec(0)


def _full_width_norms(module: nn.Module) -> list[str]:
    """Norms over the whole width of queries or keys (OLMoE), not over one head."""
    head = getattr(module, "head_dim", None)
    norms: dict[str, Any] = {name: getattr(module, name, None) for name in ("q_norm", "k_norm")}
    return [name for name, norm in norms.items() if norm is not None and norm.weight.numel() != head]


def _shard_norms(module: nn.Module, tp: GroupInfo) -> None:
    for name in _full_width_norms(module):
        norm: Any = getattr(module, name)
        norm.tp = tp
        apply(norm, ShardedNorm)


class ShardedNorm(Patch):
    """An RMS norm over a sharded width: the mean square is taken over all tensor-parallel ranks."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        tp: GroupInfo = self.tp
        weight: torch.Tensor = self.weight
        wide = x.float()
        squares = sum_out(copy_in(wide.pow(2).sum(-1, keepdim=True), tp), tp)
        normed = wide * torch.rsqrt(squares / (x.shape[-1] * tp.size) + self.variance_epsilon)
        return (weight * normed.to(x.dtype)).to(x.dtype)


def _local_params(
    module: nn.Module, path: str, cut: ShardSpec | str, state: DeviceMesh, tp: GroupInfo, cp: GroupInfo
) -> Iterator[LocalParam]:
    child, _, name = path.rpartition(".")
    owner = _child(module, child)
    parts = _stored_names(owner, name) if owner is not None else ()
    if owner is None or not parts:
        return
    if isinstance(cut, str):
        if tp.size * cp.size > 1:
            yield LocalParam("once", child, name, parts, mine=tp.rank == 0 and cp.rank == 0)
        return
    if _kv_replicas(module, cut, tp) > 1:
        first, count = _kv_rows(module, getattr(owner, name), tp)
        yield LocalParam("rows", child, name, parts, first=first, count=count)
        return
    if tp.size > 1:
        for part in parts:
            check_divisible(getattr(owner, part), cut.dim, tp, f"{base_class(module).__name__}.{path}")
            shard_parameter(owner, part, state["tp"], cut.dim)
    if tp.size > 1 or cp.size > 1 or len(parts) > 1:
        yield LocalParam("local", child, name, parts, cut.dim, cp)


def _local(parameter: torch.Tensor, dim: int, cp: GroupInfo) -> torch.Tensor:
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part if cp.size == 1 else part.chunk(cp.size, dim)[cp.rank]


def shard_parameter(owner: nn.Module, name: str, mesh: DeviceMesh, *dims: int | None) -> None:
    """Stores a parameter cut along one dimension for each axis of a mesh (None: not along that axis)."""
    from torch.distributed.tensor import Replicate

    parameter = getattr(owner, name)
    places = [Replicate() if dim is None else Shard(dim) for dim in dims]
    cut = distribute_tensor(parameter.data, mesh, places, src_data_rank=None)
    setattr(owner, name, nn.Parameter(cut, parameter.requires_grad))


def check_divisible(parameter: torch.Tensor, dim: int, tp: GroupInfo, what: str) -> None:
    """Refuses a cut into unequal parts: sharding would have to cut them once more."""
    if parameter.shape[dim] % tp.size:
        raise InputError(
            f"{what} of width {parameter.shape[dim]} cannot be shared by {tp.size} ranks",
            field="layout.tp",
            value=tp.size,
        )


def _kv_replicas(module: nn.Module, cut: ShardSpec, tp: GroupInfo) -> int:
    """Ranks that hold the same key/value head."""
    if cut.heads != "kv":
        return 1
    return max(1, tp.size // _kv_heads(module))


def _kv_heads(module: nn.Module) -> int:
    config: Any = module.config
    return int(config.num_key_value_heads)


def _kv_rows(module: nn.Module, parameter: torch.Tensor, tp: GroupInfo) -> tuple[int, int]:
    """The rows of the one key/value head that this rank computes with."""
    width = parameter.shape[0] // _kv_heads(module)
    return (tp.rank * _kv_heads(module) // tp.size) * width, width


def _child(module: Any, name: str) -> nn.Module | None:
    return getattr(module, name, None) if name else module


def _stored_names(owner: nn.Module, name: str) -> tuple[str, ...]:
    """The parameter, or the parameters it was split into; none where the layer has no such thing (a bias)."""
    if getattr(owner, name, None) is not None:
        return (name,)
    return tuple(n for n, _ in owner.named_parameters(recurse=False) if n.rpartition("_")[0] == name)


def _wrap(module: Any, uses: list[LocalParam], sequence: SequenceLayout) -> None:
    """Runs the module's own forward on local parameters, between the collectives that the region needs."""
    module.region_uses, module.region_sequence = tuple(uses), sequence
    apply(module, TensorParallel)


class TensorParallel(Patch):
    """A module that computes with this rank's shards, between a gather of its input and a reduction of its output."""

    tag = "TP"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        sequence = self.region_sequence
        args, kwargs = _map_hidden(args, kwargs, self.enter)
        with _local_parameters(self, self.region_uses):
            out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (_reduce_output(out[0], sequence), *out[1:])
        return _reduce_output(out, sequence)

    def enter(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return _gather_input(hidden, self.region_sequence)


def _map_hidden(args: Any, kwargs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else "x"
    return args, {**kwargs, name: change(kwargs[name])}


@contextmanager
def _local_parameters(module: nn.Module, uses: tuple[LocalParam, ...]) -> Iterator[None]:
    """The module's parameters replaced by the tensors made from what is stored."""
    owners: list[Any] = [_child(module, use.child) for use in uses]
    before = [owner._parameters.get(use.attribute) for owner, use in zip(owners, uses, strict=True)]
    try:
        for owner, use in zip(owners, uses, strict=True):
            made = [use.make(owner._parameters[part]) for part in use.stored]
            owner._parameters[use.attribute] = made[0] if len(made) == 1 else torch.cat(made, use.dim)
        yield
    finally:
        for owner, use, stored in zip(owners, uses, before, strict=True):
            owner._parameters[use.attribute] = stored


def _gather_input(hidden: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
    tp, cp = sequence.tp, sequence.cp
    hidden = gather(hidden, tp, hidden.dim() + TOKENS) if sequence.sp else copy_in(hidden, tp)
    if cp.size > 1:
        assert sequence.order is not None
        hidden = gather(hidden, cp, hidden.dim() + TOKENS)
        hidden = hidden.index_select(TOKENS, sequence.order.argsort().to(hidden.device))
    return hidden


def _reduce_output(out: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
    tp, cp = sequence.tp, sequence.cp
    if cp.size > 1:
        assert sequence.order is not None
        out = sum_scatter(out.index_select(TOKENS, sequence.order.to(out.device)), cp, out.dim() + TOKENS)
    return sum_scatter(out, tp, out.dim() + TOKENS) if sequence.sp else sum_out(out, tp)


def shard_embedding(embedding: Any, mesh: Mesh, sp: bool) -> None:
    """A vocabulary cut over the ranks: each looks up its own tokens, and the sum is everybody's."""
    tp = mesh.tp
    check_divisible(embedding.weight, 0, tp, "the vocabulary")
    rows = embedding.weight.shape[0] // tp.size
    embedding.vocab_range = (tp.rank * rows, (tp.rank + 1) * rows)
    shard_parameter(embedding, "weight", mesh.state["tp"], 0)
    embedding.region_uses, embedding.sequence = (
        (LocalParam("local", "", "weight", ("weight",)),),
        SequenceLayout(tp, sp),
    )
    apply(embedding, VocabParallelEmbedding)


class VocabParallelEmbedding(Patch):
    """An embedding that looks up the tokens of this rank's rows; the sum over the ranks has all of them."""

    tag = "TP"

    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        first, last = self.vocab_range
        elsewhere = (tokens < first) | (tokens >= last)
        with _local_parameters(self, self.region_uses):
            found = super().forward((tokens - first).masked_fill(elsewhere, 0))
        return _reduce_output(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.sequence)

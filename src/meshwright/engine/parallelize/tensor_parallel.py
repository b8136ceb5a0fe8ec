"""Tensor and sequence parallelism: attention, feed-forward and mixer modules compute this rank's heads or columns.

`tp_plan.py` lists the modules and how their parameters are sharded. Parameters are stored as DTensors and computed with
as plain local tensors, so the modules' own code runs unchanged. With sequence parallelism a module's input is gathered
along the sequence and its output is reduce-scattered; without, the input is copied and the output all-reduced. The
gathered input is not saved: the backward pass gathers it again (recompute.py). A parameter that is not sharded gets a
partial gradient on every rank; `partial_grad_names` lists these, and the step all-reduces them at its end.
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

TOKENS = -2  # the token dimension of hidden states


@dataclass(frozen=True)
class SequenceLayout:
    """How the sequence is sharded: over tp between tensor-parallel modules (with sp), over cp everywhere."""

    tp: GroupInfo = SOLO
    sp: bool = False
    cp: GroupInfo = SOLO
    order: torch.Tensor | None = None  # positions of all tokens when the cp ranks' shards are concatenated

    @property
    def gathers(self) -> bool:
        """Whether the input of a tensor-parallel module is gathered from other ranks."""
        return self.cp.size > 1 or (self.sp and self.tp.size > 1)


@dataclass(frozen=True)
class LocalParam:
    """How the local tensor of one parameter is made from what is stored.

    shard  this rank's shard (over cp too where the module mixes tokens)
    rows   some rows of a replicated parameter: kv heads, where there are fewer than ranks
    once   the parameter on the first rank and zeros on the others: a bias after the partial sum
    """

    method: str
    child: str  # name of the submodule that owns the parameter; empty: the module itself
    attribute: str
    stored: tuple[str, ...]  # the owner's parameters: one, or one per segment of a fused parameter
    dim: int = 0
    cp: GroupInfo = SOLO
    first: int = 0
    count: int = 0
    is_first_rank: bool = True

    def make(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor to compute with."""
        if self.method == "rows":
            return parameter.narrow(0, self.first, self.count)
        if self.method == "once":
            return parameter if self.is_first_rank else parameter * 0
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return local if self.cp.size == 1 else local.chunk(self.cp.size, self.dim)[self.cp.rank]


def shard_layer(layer: nn.Module, mesh: Mesh, sequence: SequenceLayout) -> None:
    """Shard every tensor-parallel module of a layer over the tp ranks; state-space mixers over the cp ranks too."""
    for module in list(layer.modules()):
        plan = tp_module_of(module)
        if plan is not None:
            _shard_module(module, plan, mesh.state, sequence)


def partial_grad_names(stage: Any, sequence: SequenceLayout) -> frozenset[str]:
    """Return the parameters whose gradients are partial sums over tp.

    With sp these are all replicated parameters, without sp those in tensor-parallel modules. Experts have gradient
    groups of their own. The vision encoder is replicated; with sp each rank uses its output at its own tokens.
    """
    if sequence.tp.size == 1:
        return frozenset()
    modules = (module for layer in stage.layers.values() for module in layer.modules())
    inside = {id(p) for m in modules if tp_module_of(m) is not None for p in m.parameters()}
    routed = {id(p) for block in expert_blocks(stage) for p in block.experts.parameters()}
    return frozenset(
        name
        for name, p in stage.named_parameters()
        if not isinstance(p, DTensor) and id(p) not in routed and (sequence.sp or id(p) in inside)
    )


def split_fused_params(layer: nn.Module) -> None:
    """Store a fused parameter (such as qkv) as one parameter per segment, each of which can be sharded.

    Done in every layout, so that checkpoints do not depend on tp.
    """
    for module in list(layer.modules()):
        plan = tp_module_of(module)
        for path, spec in list(_shard_specs(module, plan)) if plan is not None else ():
            child, _, name = path.rpartition(".")
            owner = _child(module, child)
            fused = getattr(owner, name, None) if owner is not None else None
            if fused is None or not isinstance(spec, ShardSpec) or spec.segments is None:
                continue
            assert owner is not None
            for i, segment in enumerate(fused.data.split(spec.segments(module), spec.dim)):
                owner.register_parameter(f"{name}_{i}", nn.Parameter(segment.contiguous(), fused.requires_grad))
            owner.register_parameter(name, None)


def _shard_module(module: Any, plan: TPModule, state: DeviceMesh, sequence: SequenceLayout) -> None:
    tp = sequence.tp
    # A mixer's state runs along the sequence: cp ranks gather all tokens and share the heads, as tp ranks do.
    cp = sequence.cp if plan.mixes_tokens else SOLO
    params = [
        param for path, spec in _shard_specs(module, plan) for param in _local_params(module, path, spec, state, tp, cp)
    ]
    if not params:
        return
    for name in plan.divided:
        setattr(module, name, getattr(module, name) // (tp.size * cp.size))
    for child, names in plan.child_divided.items():
        for name in names:
            owner = getattr(module, child)
            setattr(owner, name, getattr(owner, name) // (tp.size * cp.size))
    if tp.size * cp.size > 1:
        for name in _full_width_norms(module):
            norm: Any = getattr(module, name)
            norm.tp = tp
            apply(norm, ShardedNorm)
        for path, _ in adapter_shards(module, plan):
            if path.endswith("lora_A"):  # the weight's rows are sharded: dora reduces their norms over these groups
                getattr(module, path.rpartition(".")[0]).lora_axes = (tp, cp)
    module.tp_params = tuple(params)
    module.tp_sequence = sequence if cp.size > 1 else SequenceLayout(tp, sequence.sp)
    apply(module, TensorParallel)


def _shard_specs(module: nn.Module, plan: TPModule) -> Iterator[tuple[str, ShardSpec | str]]:
    yield from plan.shards.items()
    yield from adapter_shards(module, plan)
    for name in _full_width_norms(module):
        yield f"{name}.weight", KV_ROWS if name == "k_norm" else ShardSpec(0)


def _full_width_norms(module: nn.Module) -> list[str]:
    """Return the names of norms over all query or key heads together (OLMoE), not per head."""
    head = getattr(module, "head_dim", None)
    norms: dict[str, Any] = {name: getattr(module, name, None) for name in ("q_norm", "k_norm")}
    return [name for name, norm in norms.items() if norm is not None and norm.weight.numel() != head]


class ShardedNorm(Patch):
    """An RMS norm over a sharded width: the mean square is reduced over the tensor-parallel ranks."""

    tag = "TP"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        tp: GroupInfo = self.tp
        weight: torch.Tensor = self.weight
        wide = x.float()
        squares = sum_out(copy_in(wide.pow(2).sum(-1, keepdim=True), tp), tp)
        normed = wide * torch.rsqrt(squares / (x.shape[-1] * tp.size) + self.variance_epsilon)
        return (weight * normed.to(x.dtype)).to(x.dtype)


def _local_params(
    module: nn.Module, path: str, spec: ShardSpec | str, state: DeviceMesh, tp: GroupInfo, cp: GroupInfo
) -> Iterator[LocalParam]:
    child, _, name = path.rpartition(".")
    owner = _child(module, child)
    stored = _stored_names(owner, name) if owner is not None else ()
    if owner is None or not stored:
        return
    if isinstance(spec, str):
        if tp.size * cp.size > 1:
            yield LocalParam("once", child, name, stored, is_first_rank=tp.rank == 0 and cp.rank == 0)
        return
    if _kv_replicas(module, spec, tp) > 1:
        first, count = _kv_rows(module, getattr(owner, name), tp)
        yield LocalParam("rows", child, name, stored, first=first, count=count)
        return
    if tp.size > 1:
        for part in stored:
            check_divisible(getattr(owner, part), spec.dim, tp, f"{base_class(module).__name__}.{path}")
            shard_parameter(owner, part, state["tp"], spec.dim)
    if tp.size > 1 or cp.size > 1 or len(stored) > 1:
        yield LocalParam("shard", child, name, stored, spec.dim, cp)


def shard_parameter(owner: nn.Module, name: str, mesh: DeviceMesh, *dims: int | None) -> None:
    """Replace a parameter by a DTensor sharded along one dimension per mesh axis (None: replicated on that axis)."""
    from torch.distributed.tensor import Replicate

    parameter = getattr(owner, name)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    sharded = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
    setattr(owner, name, nn.Parameter(sharded, parameter.requires_grad))


def check_divisible(parameter: torch.Tensor, dim: int, tp: GroupInfo, what: str) -> None:
    """Raise if shards would be uneven: FSDP, which shards them once more, needs equal ones."""
    if parameter.shape[dim] % tp.size:
        raise InputError(
            f"{what} has {parameter.shape[dim]} rows or columns, which {tp.size} tensor-parallel ranks do not divide",
            field="layout.tp",
            value=tp.size,
        )


def _kv_replicas(module: nn.Module, spec: ShardSpec, tp: GroupInfo) -> int:
    """Return how many ranks compute with the same key/value head."""
    if spec.heads != "kv":
        return 1
    return max(1, tp.size // _kv_heads(module))


def _kv_heads(module: nn.Module) -> int:
    config: Any = module.config
    return int(config.num_key_value_heads)


def _kv_rows(module: nn.Module, parameter: torch.Tensor, tp: GroupInfo) -> tuple[int, int]:
    """Return the first row and the number of rows of this rank's key/value head."""
    width = parameter.shape[0] // _kv_heads(module)
    return (tp.rank * _kv_heads(module) // tp.size) * width, width


def _child(module: Any, name: str) -> nn.Module | None:
    return getattr(module, name, None) if name else module


def _stored_names(owner: nn.Module, name: str) -> tuple[str, ...]:
    """Return the parameter, or the segments it was split into; nothing if the owner has none (a bias)."""
    if getattr(owner, name, None) is not None:
        return (name,)
    return tuple(n for n, _ in owner.named_parameters(recurse=False) if n.rpartition("_")[0] == name)


class TensorParallel(Patch):
    """A module that computes with this rank's shards, between a gather of its input and a reduction of its output."""

    tag = "TP"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        sequence = self.tp_sequence
        args, kwargs = _map_hidden(args, kwargs, self.gather_input)
        with _local_parameters(self, self.tp_params):
            out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (_reduce_output(out[0], sequence), *out[1:])
        return _reduce_output(out, sequence)

    def gather_input(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Gather or copy the input; `RecomputedGather` overrides it."""
        return _gather_input(hidden, self.tp_sequence)


def _map_hidden(args: Any, kwargs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else "x"
    return args, {**kwargs, name: change(kwargs[name])}


@contextmanager
def _local_parameters(module: nn.Module, params: tuple[LocalParam, ...]) -> Iterator[None]:
    """Replace the module's parameters by local tensors, and restore them afterwards.

    The local tensors come from differentiable operations, so gradients reach the stored parameters.
    """
    owners: list[Any] = [_child(module, param.child) for param in params]
    before = [owner._parameters.get(param.attribute) for owner, param in zip(owners, params, strict=True)]
    try:
        for owner, param in zip(owners, params, strict=True):
            local = [param.make(owner._parameters[name]) for name in param.stored]
            owner._parameters[param.attribute] = local[0] if len(local) == 1 else torch.cat(local, param.dim)
        yield
    finally:
        for owner, param, stored in zip(owners, params, before, strict=True):
            owner._parameters[param.attribute] = stored


def _gather_input(hidden: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
    tp, cp = sequence.tp, sequence.cp
    hidden = gather(hidden, tp, hidden.dim() + TOKENS) if sequence.sp else copy_in(hidden, tp)
    if cp.size > 1:
        # cp ranks hold an early and a late chunk each; a mixer needs the tokens in sequence order.
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
    """Shard the embedding over the vocabulary."""
    tp = mesh.tp
    check_divisible(embedding.weight, 0, tp, "the vocabulary")
    rows = embedding.weight.shape[0] // tp.size
    embedding.vocab_range = (tp.rank * rows, (tp.rank + 1) * rows)
    shard_parameter(embedding, "weight", mesh.state["tp"], 0)
    embedding.tp_params, embedding.tp_sequence = (
        (LocalParam("shard", "", "weight", ("weight",)),),
        SequenceLayout(tp, sp),
    )
    apply(embedding, VocabParallelEmbedding)


class VocabParallelEmbedding(Patch):
    """An embedding that looks up tokens in this rank's rows and zeros elsewhere; the reduction has all tokens."""

    tag = "TP"

    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        first, last = self.vocab_range
        elsewhere = (tokens < first) | (tokens >= last)
        with _local_parameters(self, self.tp_params):
            found = super().forward((tokens - first).masked_fill(elsewhere, 0))
        return _reduce_output(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp_sequence)

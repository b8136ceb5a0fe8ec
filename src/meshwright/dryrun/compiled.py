"""What compiling a block does to memory, without a compiler: which tensors a compiled block makes, and which it keeps.

torch's own tracing and partitioning run on tensors without data, so what a block keeps for its backward pass is what it
keeps on a GPU. The two graphs that come out are not compiled. They are played back: inductor gives memory to products,
attention, collectives and other calls, to reductions, to what those read and to what leaves the graph. Everything in
between lives in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_iter, tree_map_only

from meshwright.dryrun.pretend import NoData, Stream
from meshwright.engine.kernels import _where

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# Operations that inductor writes into one kernel with what surrounds them, beside those that torch marks as pointwise.
FUSED = frozenset(
    """
    arange bernoulli bucketize cat clone constant_pad_nd contiguous convert_element_type copy copysign diagonal_scatter
    dropout embedding empty_like flip full full_like gather index index_select inductor_lookup_seed inductor_random
    inductor_seeds iota lift_fresh_copy masked_fill native_dropout new_empty new_full new_ones new_zeros one_hot ones
    ones_like permute_copy rand randn repeat roll scalar_tensor select_scatter slice_scatter split_with_sizes_copy
    stack tril triu where zeros zeros_like _to_copy _unsafe_index _unsafe_masked_index as_strided_scatter broadcast_in_dim
    """.split()
)
REDUCTIONS = frozenset(
    """
    all amax amin any argmax argmin logsumexp max mean min norm prod std sum var var_mean linalg_vector_norm _softmax
    _log_softmax
    """.split()
)
VIEWS = frozenset(
    """
    _reshape_alias _unsafe_view alias as_strided detach diagonal expand permute reshape select slice split
    split_with_sizes squeeze t transpose unbind unfold unsqueeze view view_as wait_tensor
    """.split()
)
# Calls that write into what they are given where nobody else reads it.
IN_PLACE = frozenset(("all_reduce",))
SHORTER = 64  # more graphs of one function than torch allows by default: a dry run has few shapes and many layers


class Slot(NamedTuple):
    """A buffer of a graph: one of the results of a node."""

    node: fx.Node
    result: int = 0


class Shape(NamedTuple):
    """What a buffer needs."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """What the elements take, from the first to the last."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return 0 if 0 in self.size else (last + 1) * self.dtype.itemsize

    def make(self) -> Tensor:
        """A buffer of this shape."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class Call:
    """One kernel of a compiled graph: what it makes, whose memory it takes over, and what nobody reads after it."""

    operation: Any
    args: Any
    kwargs: Any
    makes: dict[Slot, Shape]
    reads: set[Slot]
    takes: dict[Slot, Slot] = field(default_factory=dict)
    ends: list[Slot] = field(default_factory=list)


@contextmanager
def compiling_as_inductor_would() -> Iterator[None]:
    """Inside, modules that are compiled give and keep the memory that inductor's code would; nothing is compiled."""
    import torch._dynamo

    compile_module: Any = nn.Module.compile

    def compile_for_memory(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **{**kwargs, "backend": play_back})

    capability: Any = _where.capability
    with ExitStack() as undo:
        undo.callback(torch._dynamo.reset)
        # Shapes stay numbers; a graph with symbols for them would have to be asked again at every call.
        undo.enter_context(
            torch._dynamo.config.patch(  # type: ignore[no-untyped-call]
                automatic_dynamic_shapes=False, recompile_limit=SHORTER, accumulated_recompile_limit=16 * SHORTER
            )
        )
        undo.callback(setattr, nn.Module, "compile", compile_module)
        nn.Module.compile = compile_for_memory  # type: ignore[method-assign]
        # Tracing asks where the current stream is.
        Stream.device = torch.device(_where.DRY, 0)  # type: ignore[attr-defined]
        undo.callback(delattr, Stream, "device")
        # What the pretended GPU can do is known when a block is traced.
        capability._dynamo_marked_constant = True
        undo.callback(delattr, capability, "_dynamo_marked_constant")
        yield


def play_back(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of torch.compile: inductor's decompositions and partition, and memory in place of kernels."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=_memory_of,
        bw_compiler=_memory_of,
        inference_compiler=_memory_of,
        partition_fn=_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    made: Callable[..., Any] = backend(graph, inputs)
    return made


def _partition(graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward graph as inductor has them cut, where what changes nothing is left out first."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(graph.graph)  # a name for a tensor would pass for another tensor to keep
    return min_cut_rematerialization_partition(graph, inputs, **settings)


def _memory_of(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
    """A function with a graph's inputs and outputs that allocates and frees what the graph's kernels would."""
    plan = Plan(graph.graph)

    def run(args: list[Any]) -> list[Any]:
        held: dict[Slot, Any] = dict(zip(plan.inputs, args, strict=True))
        args.clear()  # what only the graph holds ends with its last reader
        seen = _book()
        for slot in plan.never_read:
            held.pop(slot)
        for call in plan.calls:
            _carry_out(call, held, seen)
        return [_result(one, held) for one in plan.results]

    run._boxed_call = True  # type: ignore[attr-defined]  # torch asks for it
    return run


def _carry_out(call: Call, held: dict[Slot, Any], seen: Any) -> None:
    for slot, source in call.takes.items():
        held[slot] = held.pop(source)
    made = [held[slot] if slot in call.takes else shape.make() for slot, shape in call.makes.items()]
    held.update(zip(call.makes, made, strict=True))
    if seen is not None:
        seen(call.operation, call.args, call.kwargs, made[0] if len(made) == 1 else tuple(made))
    for slot in call.ends:
        held.pop(slot, None)


def _book() -> Any:
    """Who is told of operations on the pretended device."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return next((mode.seen for mode in _get_current_dispatch_mode_stack() if isinstance(mode, NoData)), None)


def _result(one: Any, held: dict[Slot, Any]) -> Any:
    if not isinstance(one, tuple):
        return one
    slot, value = one
    whole = held[slot]
    if not isinstance(value, Tensor):
        return whole
    whole = whole if whole.dtype == value.dtype else whole.view(value.dtype)
    if whole.shape == value.shape and whole.stride() == value.stride():
        return whole
    return whole.as_strided(value.size(), value.stride(), value.storage_offset())


class Plan:
    """The kernels of a graph in order, each with the buffers that it makes and ends."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        self.inputs = [Slot(node) for node in nodes if node.op == "placeholder"]
        output = next(node for node in nodes if node.op == "output")
        self._stored = _stored(nodes)
        self._reads: dict[fx.Node, frozenset[Slot]] = {}
        self.calls: list[Call] = []
        for node in nodes:
            self._add(node)
        leaving = output.args[0]
        self.results = [self._leaves(one) for one in leaving if True]  # type: ignore[union-attr]
        kept = {one[0] for one in self.results if isinstance(one, tuple)}
        self.never_read = self._end_buffers(kept)

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._reads[node] = frozenset((Slot(node),))
        elif node.op == "call_function" and _is_tensor(node):
            read = frozenset(slot for one in node.all_input_nodes for slot in self._reads.get(one, ()))
            if _is_item(node):
                self._reads[node] = self._item(node, read)
                return
            if node not in self._stored:
                self._reads[node] = read
                return
            makes = {Slot(node, i): shape for i, shape in _shapes(node.meta["val"])}
            if _name(node) == "copy_":
                makes = {}
                self._reads[node] = self._reads[node.all_input_nodes[0]]
            else:
                self._reads[node] = frozenset(makes)
            self.calls.append(Call(node.target, *_told(node), makes, set(read)))

    def _item(self, node: fx.Node, read: frozenset[Slot]) -> frozenset[Slot]:
        source, index = node.args
        assert isinstance(source, fx.Node)
        own = Slot(source, index)  # type: ignore[arg-type]  # an index of a result
        return frozenset((own,)) if own in read else read

    def _leaves(self, one: Any) -> Any:
        """What leaves the graph: a buffer and how it is seen, or a value."""
        if not isinstance(one, fx.Node):
            return one
        reads = self._reads.get(one)
        if not reads:
            return one.meta["val"]
        return next(iter(reads)), one.meta["val"]

    def _end_buffers(self, kept: set[Slot]) -> list[Slot]:
        """Notes after which kernel each buffer is free; says which inputs are free at once."""
        waiting: set[Slot] = set(kept)
        made = {slot: shape for call in self.calls for slot, shape in call.makes.items()}
        for call in reversed(self.calls):
            last = (call.reads | set(call.makes)) - waiting
            call.ends = sorted(last, key=lambda slot: (slot.node.name, slot.result))
            waiting |= last
            if _may_overwrite(call):
                _overwrite(call, made, last)
        return [slot for slot in self.inputs if slot not in waiting]


def _may_overwrite(call: Call) -> bool:
    return _short(call.operation) in IN_PLACE or _is_fused(call.operation)


def _overwrite(call: Call, made: dict[Slot, Shape], last: set[Slot]) -> None:
    """A pointwise kernel writes into a buffer of its graph that it reads for the last time, where sizes agree."""
    free = [slot for slot in call.ends if slot in made and slot not in call.makes]
    for slot, shape in call.makes.items():
        fit = next((s for s in free if (made[s].bytes, made[s].dtype) == (shape.bytes, shape.dtype)), None)
        if fit is not None:
            call.takes[slot] = fit
            free.remove(fit)
            call.ends.remove(fit)


def _stored(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes whose results are given memory."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "output" or (node.op == "call_function" and not _is_written_along(node)):
            if node.op != "output":
                found.add(node)
            if node.op == "output" or not _is_reduction(node.target):
                found.update(_source(one) for one in node.all_input_nodes)
    return {node for node in found if node.op == "call_function" and _is_tensor(node)}


def _source(node: fx.Node) -> fx.Node:
    """Where the memory of a view is."""
    while node.op == "call_function" and (_is_view(node.target) or _is_item(node)):
        node = node.all_input_nodes[0]
    return node


def _is_written_along(node: fx.Node) -> bool:
    """Whether a node alone needs no memory: it is a view or part of a kernel."""
    return _is_item(node) or _is_view(node.target) or _is_fused(node.target) or not _is_tensor(node)


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_view(operation: Any) -> bool:
    return _short(operation) in VIEWS


def _is_fused(operation: Any) -> bool:
    return torch.Tag.pointwise in getattr(operation, "tags", ()) or _short(operation) in FUSED


def _is_reduction(operation: Any) -> bool:
    return _short(operation) in REDUCTIONS


def _short(operation: Any) -> str:
    namespace = getattr(operation, "namespace", "")
    known = namespace in ("aten", "prims", "_c10d_functional", "inductor_prims")
    return operation._schema.name.split("::")[1] if known else ""


def _name(node: fx.Node) -> str:
    return _short(node.target)


def _is_tensor(node: fx.Node) -> bool:
    return any(isinstance(one, Tensor) for one in tree_iter(node.meta.get("val")))


def _shapes(value: Any) -> Iterator[tuple[int, Shape]]:
    several = value if isinstance(value, (tuple, list)) else (value,)
    for index, one in enumerate(several):
        if isinstance(one, Tensor):
            yield index, Shape(tuple(one.shape), tuple(one.stride()), one.dtype, one.device)


def _told(node: fx.Node) -> tuple[Any, Any]:
    """A node's arguments with shapes in place of nodes."""
    args, kwargs = tree_map_only(fx.Node, lambda one: one.meta.get("val"), (node.args, node.kwargs))
    return args, kwargs

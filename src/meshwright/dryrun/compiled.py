"""What compiling a block does to memory, without a compiler: which tensors a compiled block makes, and which it keeps.

torch's own tracing and partitioning run on tensors without data, so what a block keeps for its backward pass is what it
keeps on a GPU. The two graphs that come out are not compiled. They are played back: inductor gives memory to products,
attention, collectives and other calls, to reductions, to what those read and to what leaves the graph. Everything in
between lives in registers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_iter, tree_map_only

from meshwright.dryrun.fake_device import NoDataMode, Stream
from meshwright.engine.kernels import device_caps

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that inductor writes into one kernel with what surrounds them, beside those that torch marks as pointwise.
FUSED = _names("""
    arange bernoulli bucketize cat clone constant_pad_nd contiguous convert_element_type copy copysign diagonal_scatter
    dropout embedding empty_like flip full full_like gather index index_select inductor_lookup_seed inductor_random
    inductor_seeds iota lift_fresh_copy masked_fill native_dropout new_empty new_full new_ones new_zeros one_hot ones
    ones_like permute_copy rand randn repeat roll scalar_tensor select_scatter slice_scatter split_with_sizes_copy
    stack tril triu where zeros zeros_like _to_copy _unsafe_index _unsafe_masked_index
    as_strided_scatter broadcast_in_dim
""")
REDUCTIONS = _names("""
    all amax amin any argmax argmin logsumexp max mean min norm prod std sum var var_mean linalg_vector_norm _softmax
    _log_softmax
""")
VIEWS = _names("""
    _reshape_alias _unsafe_view alias as_strided detach diagonal expand permute reshape select slice split
    split_with_sizes squeeze t transpose unbind unfold unsqueeze view view_as wait_tensor
""")
# Calls that write into what they are given where nobody else reads it.
IN_PLACE = frozenset(("all_reduce",))
SHORTER = 64  # more graphs of one function than torch allows by default: a dry run has few shapes and many layers


class Slot(NamedTuple):
    """A buffer of a graph: one of the results of a node."""

    node: fx.Node
    result: int = 0


class Use(NamedTuple):
    """A buffer as something with this shape."""

    slot: Slot
    value: Any


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


@dataclass(frozen=True)
class Call:
    """One operation of a graph that reads and makes buffers."""

    operation: Any
    args: Any
    kwargs: Any
    makes: dict[Slot, Shape]
    reads: frozenset[Slot]
    space: tuple[int, ...] = ()  # elements that its kernel goes through; operations with as many share a kernel


@dataclass
class Kernel:
    """Operations that run as one: whose memory they take over, and what nobody reads after them."""

    calls: list[Call]
    unmade: set[Slot] = field(default_factory=set)  # what is read inside alone
    takes: dict[Slot, Slot] = field(default_factory=dict)
    ends: list[Slot] = field(default_factory=list)

    @property
    def makes(self) -> dict[Slot, Shape]:
        """The buffers that there are after it."""
        return {slot: shape for call in self.calls for slot, shape in call.makes.items() if slot not in self.unmade}

    @property
    def reads(self) -> set[Slot]:
        """The buffers that there are before it."""
        own = {slot for call in self.calls for slot in call.makes}
        return {slot for call in self.calls for slot in call.reads} - own


@contextmanager
def compiling_as_inductor_would() -> Iterator[None]:
    """Inside, modules that are compiled give and keep the memory that inductor's code would; nothing is compiled."""
    import torch._dynamo

    compile_module: Any = nn.Module.compile

    def compile_for_memory(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **{**kwargs, "backend": play_back})

    capability: Any = device_caps.capability
    with ExitStack() as undo:
        undo.callback(torch._dynamo.reset)
        # Shapes stay numbers; a graph with symbols for them would have to be asked again at every call.
        undo.enter_context(
            torch._dynamo.config.patch(
                automatic_dynamic_shapes=False, recompile_limit=SHORTER, accumulated_recompile_limit=16 * SHORTER
            )
        )
        undo.callback(setattr, nn.Module, "compile", compile_module)
        nn.Module.compile = compile_for_memory  # type: ignore[method-assign, assignment]
        # Tracing asks where the current stream is.
        Stream.device = torch.device(device_caps.DRY, 0)  # type: ignore[attr-defined]
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
        seen = _pretending().seen
        for slot in plan.never_read:
            held.pop(slot)
        for kernel in plan.kernels:
            _carry_out(kernel, held, seen)
        return [_seen_as(one, held) if _is_use(one) else one for one in plan.results]

    run._boxed_call = True  # type: ignore[attr-defined]  # torch asks for it
    return run


def _carry_out(kernel: Kernel, held: dict[Slot, Any], seen: Any) -> None:
    taken = {slot: held.pop(source) for slot, source in kernel.takes.items()}
    for call in kernel.calls:
        made = _made(call, kernel, taken, held)
        held.update(made)
        if seen is not None and call.operation not in device_caps.STEPS and (made or not _is_fused(call.operation)):
            seen(call.operation, call.args, call.kwargs, tuple(made.values()))
    for slot in kernel.ends:
        held.pop(slot, None)


def _made(call: Call, kernel: Kernel, taken: dict[Slot, Any], held: dict[Slot, Any]) -> dict[Slot, Any]:
    """The buffers that an operation writes; the book hears of them with the operation."""
    if call.operation in device_caps.STEPS:  # it makes more on its way
        args, kwargs = tree_map_only(Use, lambda one: _seen_as(one, held), (call.args, call.kwargs), is_leaf=_is_use)
        results = device_caps.STEPS[call.operation](*args, **kwargs)
        several = results if isinstance(results, tuple) else (results,)
        return {slot: several[slot.result] for slot in call.makes}
    mode = _pretending()
    seen, mode.seen = mode.seen, None
    try:
        return {
            slot: taken[slot] if slot in taken else shape.make()
            for slot, shape in call.makes.items()
            if slot not in kernel.unmade
        }
    finally:
        mode.seen = seen


def _pretending() -> NoDataMode:
    """The mode that is told of operations on the pretended device."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, NoDataMode))


def _is_use(value: Any) -> bool:
    return isinstance(value, Use)


def _seen_as(use: Use, held: dict[Slot, Any]) -> Any:
    """A buffer in the shape in which it is used."""
    whole, value = held[use.slot], use.value
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
        leaving: Any = output.args[0]
        self.results = [self._leaves(one) for one in leaving]
        kept = {one.slot for one in self.results if _is_use(one)}
        self.kernels = _fuse(self.calls)
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
            told = self._leaves if node.target in device_caps.STEPS else _value
            args, kwargs = tree_map_only(fx.Node, told, (node.args, node.kwargs))
            self.calls.append(Call(node.target, args, kwargs, makes, read, _space(node)))

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
        return Use(next(iter(reads)), one.meta["val"])

    def _end_buffers(self, kept: set[Slot]) -> list[Slot]:
        """Notes after which kernel each buffer is free; says which inputs are free at once."""
        made = {slot: shape for call in self.calls for slot, shape in call.makes.items()}
        waiting: set[Slot] = set(kept)
        for kernel in reversed(self.kernels):
            own = {slot for call in kernel.calls for slot in call.makes}
            inside = {slot for call in kernel.calls for slot in call.reads} & own
            kernel.unmade = inside - waiting
            last = (kernel.reads | set(kernel.makes)) - waiting
            kernel.ends = sorted(last, key=lambda slot: (slot.node.name, slot.result))
            waiting |= last
            _overwrite(kernel, made)
        return [slot for slot in self.inputs if slot not in waiting]


def _overwrite(kernel: Kernel, made: dict[Slot, Shape]) -> None:
    """A kernel writes into a buffer of its graph that one of its operations reads for the last time, if sizes agree."""
    free = [slot for slot in kernel.ends if slot in made and sum(slot in call.reads for call in kernel.calls) == 1]
    for call in kernel.calls:
        if not (_is_fused(call.operation) or _short(call.operation) in IN_PLACE):
            continue
        for slot, shape in call.makes.items():
            fits = (s for s in free if s in call.reads and _room(made[s]) == _room(shape))
            fit = next(fits, None)
            if fit is not None and slot not in kernel.unmade:
                kernel.takes[slot] = fit
                free.remove(fit)
                kernel.ends.remove(fit)


def _room(shape: Shape) -> tuple[int, torch.dtype]:
    return shape.bytes, shape.dtype


def _fuse(calls: list[Call]) -> list[Kernel]:
    """Operations that go through equally many elements and share what they read run as one, where the order allows it.

    Such a kernel holds all that its operations read and make at once, which is where a layer's memory peaks.
    """
    maker = {slot: number for number, call in enumerate(calls) for slot in call.makes}
    before = [0] * len(calls)  # bits: what has to run before each
    for number, call in enumerate(calls):
        for slot in call.reads & maker.keys():
            before[number] |= before[maker[slot]] | 1 << maker[slot]
    kernels: dict[int, list[int]] = {number: [number] for number in range(len(calls))}
    reads = {number: set(call.reads) | set(call.makes) for number, call in enumerate(calls)}
    for first in range(len(calls)):
        for second in range(first + 1, len(calls)):
            if first not in kernels or second not in kernels or not calls[first].space:
                continue
            if calls[first].space != calls[second].space or not reads[first] & reads[second]:
                continue
            if _is_between(first, second, before, kernels) or _is_between(second, first, before, kernels):
                continue
            kernels[first] += kernels.pop(second)
            reads[first] |= reads.pop(second)
            _join(first, second, before, kernels)
    return [Kernel([calls[number] for number in sorted(kernels[one])]) for one in _in_order(kernels, before)]


def _is_between(first: int, last: int, before: list[int], kernels: dict[int, list[int]]) -> bool:
    """Whether something has to run after the one and before the other."""
    return any(k not in (first, last) and before[last] >> k & 1 and before[k] >> first & 1 for k in kernels)


def _join(first: int, second: int, before: list[int], kernels: dict[int, list[int]]) -> None:
    """What has to run before either of two runs before both, and both before what waits for either."""
    both = 1 << first | 1 << second
    before[first] = (before[first] | before[second]) & ~both
    for number in kernels:
        if number != first and before[number] & both:
            before[number] |= before[first] | 1 << first


def _in_order(kernels: dict[int, list[int]], before: list[int]) -> Iterator[int]:
    """The kernels by their first operation, each after what it waits for."""
    done = 0

    def visit(number: int) -> Iterator[int]:
        nonlocal done
        if done >> number & 1:
            return
        done |= 1 << number
        for other in kernels:
            if before[number] >> other & 1:
                yield from visit(other)
        yield number

    for number in kernels:
        yield from visit(number)


def _space(node: fx.Node) -> tuple[int, ...]:
    """How many elements the kernel of a node goes through; none where the node is a call of its own."""
    if _is_fused(node.target):
        return (max(math.prod(shape.size) for _, shape in _shapes(node.meta["val"])),)
    if _is_reduction(node.target):
        value = node.all_input_nodes[0].meta["val"]
        return (value.numel(),)
    return ()


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


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")

"""What torch.compile does to memory, without compiling: which buffers a compiled block allocates and which it saves.

torch's tracing and partitioning run on fake tensors, so what a block saves for its backward pass is what it saves on a
GPU. The two resulting graphs are not compiled but interpreted: inductor allocates buffers for matrix products,
attention, collectives and other extern calls, for reductions, for their inputs, and for graph outputs. Everything else
is fused and lives in registers.
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


# Operations that inductor fuses with their neighbors, in addition to those that torch tags as pointwise.
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
# Calls that overwrite their input if nothing else reads it.
IN_PLACE = frozenset(("all_reduce",))
RECOMPILE_LIMIT = 64  # above torch's default of 8: a dry run has few shapes and many layers


class Slot(NamedTuple):
    """A buffer of a graph: one output of a node."""

    node: fx.Node
    result: int = 0


class Use(NamedTuple):
    """A buffer viewed with this shape."""

    slot: Slot
    value: Any


class BufferShape(NamedTuple):
    """What is needed to allocate a buffer."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Bytes from the first to the last element."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return 0 if 0 in self.size else (last + 1) * self.dtype.itemsize

    def make(self) -> Tensor:
        """Allocate a buffer of this shape."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Call:
    """One operation of a graph with its input and output buffers."""

    operation: Any
    args: Any
    kwargs: Any
    outputs: dict[Slot, BufferShape]
    inputs: frozenset[Slot]
    numel: tuple[int, ...] = ()  # elements its kernel iterates over; equal ones can share a kernel


@dataclass
class Kernel:
    """Operations that run as one kernel, the buffers it reuses, and those it frees."""

    calls: list[Call]
    fused_away: set[Slot] = field(default_factory=set)  # outputs read only inside the kernel: never allocated
    reuses: dict[Slot, Slot] = field(default_factory=dict)
    frees: list[Slot] = field(default_factory=list)

    @property
    def outputs(self) -> dict[Slot, BufferShape]:
        """The buffers that the kernel writes."""
        every = {slot: shape for call in self.calls for slot, shape in call.outputs.items()}
        return {slot: shape for slot, shape in every.items() if slot not in self.fused_away}

    @property
    def inputs(self) -> set[Slot]:
        """The buffers that the kernel reads."""
        own = {slot for call in self.calls for slot in call.outputs}
        return {slot for call in self.calls for slot in call.inputs} - own


@contextmanager
def simulate_inductor() -> Iterator[None]:
    """Make compiled modules allocate and save what inductor's code would; nothing is compiled."""
    import torch._dynamo

    compile_module: Any = nn.Module.compile

    def compile_without_kernels(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **{**kwargs, "backend": play_back})

    capability: Any = device_caps.capability
    with ExitStack() as undo:
        undo.callback(torch._dynamo.reset)
        # Static shapes: a graph with symbolic ones would have to be evaluated at every call.
        undo.enter_context(
            torch._dynamo.config.patch(
                automatic_dynamic_shapes=False,
                recompile_limit=RECOMPILE_LIMIT,
                accumulated_recompile_limit=16 * RECOMPILE_LIMIT,
            )
        )
        undo.callback(setattr, nn.Module, "compile", compile_module)
        nn.Module.compile = compile_without_kernels  # type: ignore[method-assign, assignment]
        # Dynamo reads the device of the current stream.
        Stream.device = torch.device(device_caps.DRY, 0)  # type: ignore[attr-defined]
        undo.callback(delattr, Stream, "device")
        # The fake GPU's capability is a constant while a block is traced.
        capability._dynamo_marked_constant = True
        undo.callback(delattr, capability, "_dynamo_marked_constant")
        yield


def play_back(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A torch.compile backend: inductor's decompositions and partition, with allocations in place of kernels."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=_allocate_only,
        bw_compiler=_allocate_only,
        inference_compiler=_allocate_only,
        partition_fn=_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(graph, inputs)
    return compiled


def _partition(graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split forward and backward as inductor does, after removing operations that do nothing."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(graph.graph)  # an alias would count as another tensor to save
    return min_cut_rematerialization_partition(graph, inputs, **settings)


def _allocate_only(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
    """Return a function with a graph's inputs and outputs that allocates and frees what its kernels would."""
    plan = BufferPlan(graph.graph)

    def run(args: list[Any]) -> list[Any]:
        buffers: dict[Slot, Any] = dict(zip(plan.inputs, args, strict=True))
        args.clear()  # a buffer that only the graph references is freed after its last reader
        on_op = _fake_mode().on_op
        for slot in plan.never_read:
            buffers.pop(slot)
        for kernel in plan.kernels:
            _run_kernel(kernel, buffers, on_op)
        return [_view_as(one, buffers) if _is_use(one) else one for one in plan.results]

    run._boxed_call = True  # type: ignore[attr-defined]  # torch's calling convention
    return run


def _run_kernel(kernel: Kernel, buffers: dict[Slot, Any], on_op: Any) -> None:
    reused = {slot: buffers.pop(source) for slot, source in kernel.reuses.items()}
    for call in kernel.calls:
        outputs = _allocate_outputs(call, kernel, reused, buffers)
        buffers.update(outputs)
        decomposed = call.operation in device_caps.DECOMPOSITIONS
        if on_op is not None and not decomposed and (outputs or not _is_fused(call.operation)):
            on_op(call.operation, call.args, call.kwargs, tuple(outputs.values()))
    for slot in kernel.frees:
        buffers.pop(slot, None)


def _allocate_outputs(call: Call, kernel: Kernel, reused: dict[Slot, Any], buffers: dict[Slot, Any]) -> dict[Slot, Any]:
    """Allocate the outputs of an operation; the log records them with the operation, not here."""
    if call.operation in device_caps.DECOMPOSITIONS:  # a composite operation allocates intermediates too
        args, kwargs = tree_map_only(Use, lambda one: _view_as(one, buffers), (call.args, call.kwargs), is_leaf=_is_use)
        results = device_caps.DECOMPOSITIONS[call.operation](*args, **kwargs)
        several = results if isinstance(results, tuple) else (results,)
        return {slot: several[slot.result] for slot in call.outputs}
    mode = _fake_mode()
    on_op, mode.on_op = mode.on_op, None
    try:
        return {
            slot: reused[slot] if slot in reused else shape.make()
            for slot, shape in call.outputs.items()
            if slot not in kernel.fused_away
        }
    finally:
        mode.on_op = on_op


def _fake_mode() -> NoDataMode:
    """Return the active mode that intercepts operations on the fake device."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, NoDataMode))


def _is_use(value: Any) -> bool:
    return isinstance(value, Use)


def _view_as(use: Use, buffers: dict[Slot, Any]) -> Any:
    """Return a buffer in the shape in which it is used."""
    buffer, value = buffers[use.slot], use.value
    if not isinstance(value, Tensor):
        return buffer
    buffer = buffer if buffer.dtype == value.dtype else buffer.view(value.dtype)
    if buffer.shape == value.shape and buffer.stride() == value.stride():
        return buffer
    return buffer.as_strided(value.size(), value.stride(), value.storage_offset())


class BufferPlan:
    """The kernels of a graph in order, each with the buffers it allocates and frees."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        self.inputs = [Slot(node) for node in nodes if node.op == "placeholder"]
        output = next(node for node in nodes if node.op == "output")
        self._materialized = _materialized(nodes)
        self._reads: dict[fx.Node, frozenset[Slot]] = {}
        self.calls: list[Call] = []
        for node in nodes:
            self._add(node)
        leaving: Any = output.args[0]
        self.results = [self._output(one) for one in leaving]
        kept = {one.slot for one in self.results if _is_use(one)}
        self.kernels = _fuse(self.calls)
        self.never_read = self._assign_frees(kept)

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._reads[node] = frozenset((Slot(node),))
        elif node.op == "call_function" and _is_tensor(node):
            read = frozenset(slot for one in node.all_input_nodes for slot in self._reads.get(one, ()))
            if _is_item(node):
                self._reads[node] = self._item(node, read)
                return
            if node not in self._materialized:
                self._reads[node] = read
                return
            outputs = {Slot(node, i): shape for i, shape in _shapes(node.meta["val"])}
            if _node_op_name(node) == "copy_":
                outputs = {}
                self._reads[node] = self._reads[node.all_input_nodes[0]]
            else:
                self._reads[node] = frozenset(outputs)
            to_value = self._output if node.target in device_caps.DECOMPOSITIONS else _value
            args, kwargs = tree_map_only(fx.Node, to_value, (node.args, node.kwargs))
            self.calls.append(Call(node.target, args, kwargs, outputs, read, _numel(node)))

    def _item(self, node: fx.Node, read: frozenset[Slot]) -> frozenset[Slot]:
        source, index = node.args
        assert isinstance(source, fx.Node)
        own = Slot(source, index)  # type: ignore[arg-type]  # an index of an output
        return frozenset((own,)) if own in read else read

    def _output(self, one: Any) -> Any:
        """Return an output of the graph: a buffer and its view, or a plain value."""
        if not isinstance(one, fx.Node):
            return one
        slots = self._reads.get(one)
        if not slots:
            return one.meta["val"]
        return Use(next(iter(slots)), one.meta["val"])

    def _assign_frees(self, kept: set[Slot]) -> list[Slot]:
        """Set which buffers each kernel frees; return the inputs that no kernel reads."""
        made = {slot: shape for call in self.calls for slot, shape in call.outputs.items()}
        used_later: set[Slot] = set(kept)
        for kernel in reversed(self.kernels):
            own = {slot for call in kernel.calls for slot in call.outputs}
            inside = {slot for call in kernel.calls for slot in call.inputs} & own
            kernel.fused_away = inside - used_later
            last = (kernel.inputs | set(kernel.outputs)) - used_later
            kernel.frees = sorted(last, key=lambda slot: (slot.node.name, slot.result))
            used_later |= last
            _reuse_inputs(kernel, made)
        return [slot for slot in self.inputs if slot not in used_later]


def _reuse_inputs(kernel: Kernel, made: dict[Slot, BufferShape]) -> None:
    """Let a kernel write into a buffer of its graph that it reads last, if the sizes agree."""
    free = [slot for slot in kernel.frees if slot in made and sum(slot in call.inputs for call in kernel.calls) == 1]
    for call in kernel.calls:
        if not (_is_fused(call.operation) or _op_name(call.operation) in IN_PLACE):
            continue
        for slot, shape in call.outputs.items():
            fits = (s for s in free if s in call.inputs and _layout(made[s]) == _layout(shape))
            fit = next(fits, None)
            if fit is not None and slot not in kernel.fused_away:
                kernel.reuses[slot] = fit
                free.remove(fit)
                kernel.frees.remove(fit)


def _layout(shape: BufferShape) -> tuple[int, torch.dtype]:
    return shape.bytes, shape.dtype


def _fuse(calls: list[Call]) -> list[Kernel]:
    """Merge operations over equally many elements that share a buffer, if the order allows it.

    A fused kernel holds the inputs and outputs of all its operations at the same time: this is where a layer's memory
    peaks.
    """
    maker = {slot: number for number, call in enumerate(calls) for slot in call.outputs}
    before = [0] * len(calls)  # bit masks: the calls that must run before each
    for number, call in enumerate(calls):
        for slot in call.inputs & maker.keys():
            before[number] |= before[maker[slot]] | 1 << maker[slot]
    kernels: dict[int, list[int]] = {number: [number] for number in range(len(calls))}
    buffers = {number: set(call.inputs) | set(call.outputs) for number, call in enumerate(calls)}
    for first in range(len(calls)):
        for second in range(first + 1, len(calls)):
            if first not in kernels or second not in kernels or not calls[first].numel:
                continue
            if calls[first].numel != calls[second].numel or not buffers[first] & buffers[second]:
                continue
            if _must_run_between(first, second, before, kernels) or _must_run_between(second, first, before, kernels):
                continue
            kernels[first] += kernels.pop(second)
            buffers[first] |= buffers.pop(second)
            _merge(first, second, before, kernels)
    return [Kernel([calls[number] for number in sorted(kernels[one])]) for one in _topological_order(kernels, before)]


def _must_run_between(first: int, last: int, before: list[int], kernels: dict[int, list[int]]) -> bool:
    """Return whether a kernel must run after the first and before the last."""
    return any(k not in (first, last) and before[last] >> k & 1 and before[k] >> first & 1 for k in kernels)


def _merge(first: int, second: int, before: list[int], kernels: dict[int, list[int]]) -> None:
    """Merge the dependencies of two kernels, and make kernels that depend on one depend on both."""
    both = 1 << first | 1 << second
    before[first] = (before[first] | before[second]) & ~both
    for number in kernels:
        if number != first and before[number] & both:
            before[number] |= before[first] | 1 << first


def _topological_order(kernels: dict[int, list[int]], before: list[int]) -> Iterator[int]:
    """Yield the kernels by their first operation, each after its dependencies."""
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


def _numel(node: fx.Node) -> tuple[int, ...]:
    """Return the number of elements a node's kernel iterates over; empty if the node is an extern call."""
    if _is_fused(node.target):
        return (max(math.prod(shape.size) for _, shape in _shapes(node.meta["val"])),)
    if _is_reduction(node.target):
        value = node.all_input_nodes[0].meta["val"]
        return (value.numel(),)
    return ()


def _materialized(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose outputs are allocated."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "output" or (node.op == "call_function" and not _is_fused_or_view(node)):
            if node.op != "output":
                found.add(node)
            if node.op == "output" or not _is_reduction(node.target):
                found.update(_source(one) for one in node.all_input_nodes)
    return {node for node in found if node.op == "call_function" and _is_tensor(node)}


def _source(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a view."""
    while node.op == "call_function" and (_is_view(node.target) or _is_item(node)):
        node = node.all_input_nodes[0]
    return node


def _is_fused_or_view(node: fx.Node) -> bool:
    """Return whether a node needs no memory of its own: it is a view or fused."""
    return _is_item(node) or _is_view(node.target) or _is_fused(node.target) or not _is_tensor(node)


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_view(operation: Any) -> bool:
    return _op_name(operation) in VIEWS


def _is_fused(operation: Any) -> bool:
    return torch.Tag.pointwise in getattr(operation, "tags", ()) or _op_name(operation) in FUSED


def _is_reduction(operation: Any) -> bool:
    return _op_name(operation) in REDUCTIONS


def _op_name(operation: Any) -> str:
    namespace = getattr(operation, "namespace", "")
    known = namespace in ("aten", "prims", "_c10d_functional", "inductor_prims")
    return operation._schema.name.split("::")[1] if known else ""


def _node_op_name(node: fx.Node) -> str:
    return _op_name(node.target)


def _is_tensor(node: fx.Node) -> bool:
    return any(isinstance(one, Tensor) for one in tree_iter(node.meta.get("val")))


def _shapes(value: Any) -> Iterator[tuple[int, BufferShape]]:
    several = value if isinstance(value, (tuple, list)) else (value,)
    for index, one in enumerate(several):
        if isinstance(one, Tensor):
            yield index, BufferShape(tuple(one.shape), tuple(one.stride()), one.dtype, one.device)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")

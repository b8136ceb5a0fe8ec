"""The scan of Mamba-2 layers by Triton kernels, for bf16 inputs on a GPU; state_space.py has the formula.

A chunk has 64 tokens. Kernels of the forward pass (_triton_state_space.py):

- scan_steps: Δ and the decays since the start of a chunk, from its start and to its end.
- scan_states: the states before all chunks, one after the other; blocks of heads and states run in parallel.
- scan_outputs: ((C·Bᵀ) ∘ decays)·(Δ·x) of a chunk, what its first state adds, and D·x. C·Bᵀ is computed for a group.

The backward pass computes steps and states again and the gradients of the states in reverse; scan_x_gradients,
scan_c_gradients and scan_b_gradients (also of the steps) do the rest. A program sums the gradients of B and C over up
to 8 heads of a group; the sums of a group's programs are added.

Saved are the inputs. The states of a pass are held in the input dtype, state / 64 times the bytes of x; the backward
pass also holds as many gradients of states.

Packed documents: `documents` are ids [rows, tokens]; where they change, the state starts from zero.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.engine.kernels.chunked_scan import left_out
from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, is_dry, launch, on_gpu
from meshwright.engine.kernels.state_space import INPUTS, SETTINGS, Gradients
from meshwright.engine.kernels.state_space import state_space_scan as torch_scan

CHUNK = 64  # tokens; the matrices of a chunk stay in registers
PROGRAM_HEADS = 8  # heads of a group per program, at most: they share C·Bᵀ and the sums of dB and dC
WIDEST_STATE = 256  # a program holds a chunk's B and C, and their gradients, as a whole
STEP_HEADS = 16  # heads per program of scan_steps
# Sizes that were compared with an exact scan on an H200. Triton 3.6 compiled the outputs of heads of 16 with states of
# 32 wrong there, without an error.
MEASURED = {"head_dim": (64, 80, 128), "ssm_state_size": (64, 128, 256)}
KERNELS = "_triton_state_space"


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool = False,
    limits: tuple[float, float] = (0.0, float("inf")),
    documents: Tensor | None = None,
) -> Tensor:
    """Return the same as state_space.state_space_scan; every document starts from a zero state."""
    if not runs(x, b, c):
        return _by_document(x, dt, a, b, c, skip, bias, softplus, limits, documents=documents)
    out: Tensor = _scan(x, dt, a, b, c, skip, bias, documents, softplus, *limits)
    return out


def _by_document(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *more: Any, documents: Tensor | None
) -> Tensor:
    """Run torch operations on each document alone."""
    if documents is None:
        return torch_scan(x, dt, a, b, c, *more)
    rows = []
    for row, ids in enumerate(documents.cpu()):
        ends = [0, *(ids.diff().nonzero().flatten() + 1).tolist(), len(ids)]
        parts = [[one[row : row + 1, i:j] for one in (x, dt, b, c)] for i, j in pairwise(ends)]
        rows.append(torch.cat([torch_scan(part[0], part[1], a, part[2], part[3], *more) for part in parts], 1))
    return torch.cat(rows)


def runs(x: Tensor, b: Tensor, c: Tensor) -> bool:
    """Return whether the kernels run these inputs; other dtypes have torch operations, which are more exact."""
    return on_gpu(x) and x.dtype == b.dtype == c.dtype == torch.bfloat16 and b.shape[-1] <= WIDEST_STATE


def fits(mixer: Any) -> str:
    """Return why the kernels do not run a mixer; empty if they do."""
    for name, sizes in MEASURED.items() if hasattr(mixer, "ssm_state_size") else ():
        if (size := getattr(mixer, name)) not in sizes:
            return f"its {name} is {size}, and the kernels take {', '.join(map(str, sizes))}"
    return ""


class Sizes(NamedTuple):
    """Dimensions of a scan, in the order of the kernels' arguments."""

    tokens: int
    heads: int
    chunks: int
    per_group: int
    width: int
    state: int


class Tiles(NamedTuple):
    """Compile-time sizes of the kernels."""

    heads: int  # per program
    head_block: int
    padded_width: int
    state_block: int
    padded_state: int


def _sizes(x: Tensor, b: Tensor) -> Sizes:
    _, tokens, heads, width = x.shape
    return Sizes(tokens, heads, -(-tokens // CHUNK), heads // b.shape[2], width, b.shape[3])


def _tiles(sizes: Sizes) -> Tiles:
    padded_state = max(16, _power_of_two(sizes.state))
    # Blocks of 32 pad heads of 80 to 96; one power of two would be 128.
    block = min(64, max(16, _power_of_two(sizes.width))) if sizes.width <= 64 or sizes.width % 64 == 0 else 32
    heads = max(n for n in range(1, PROGRAM_HEADS + 1) if sizes.per_group % n == 0)
    return Tiles(heads, block, -(-sizes.width // block) * block, min(64, padded_state), padded_state)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Steps(NamedTuple):
    """The arrays of scan_steps by row, head and token, and the decay across every chunk [rows, heads, chunks]."""

    step: Tensor
    log_decay: Tensor  # fp64
    from_start: Tensor
    to_end: Tensor
    whole: Tensor
    slope: Tensor | None  # the derivative of Δ with respect to dt + bias, in the backward pass


def _steps(
    sizes: Sizes,
    dt: Tensor,
    a: Tensor,
    bias: Tensor | None,
    segments: Tensor | None,
    softplus: bool,
    limits: tuple[float, float],
    backward: bool,
) -> Steps:
    rows = dt.shape[0]
    shape = (rows, sizes.heads, sizes.chunks * CHUNK)
    step, start, end = (dt.new_empty(shape, dtype=torch.float32) for _ in range(3))
    log_decay = dt.new_empty(shape, dtype=torch.float64)
    whole = dt.new_empty(rows, sizes.heads, sizes.chunks, dtype=torch.float32)
    slope = torch.empty_like(step) if backward else None
    launch(
        f"{KERNELS}.scan_steps",
        (rows * sizes.chunks, -(-sizes.heads // STEP_HEADS)),
        *(dt, _or(bias, dt), a.contiguous(), _or(segments, dt), step, log_decay, start, end, whole, _or(slope, step)),
        *(sizes.tokens, sizes.heads, sizes.chunks, *dt.stride(), *limits),
        SOFTPLUS=softplus,
        BIASED=bias is not None,
        PACKED=segments is not None,
        SLOPE=backward,
        T=CHUNK,
        HEADS=STEP_HEADS,
    )
    return Steps(step, log_decay, start, end, whole, slope)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor, or another one for the argument of a kernel that does not read it."""
    return other if tensor is None else tensor.contiguous()


def number_documents(documents: Tensor | None) -> Tensor | None:
    """Return the number of the document of each token in its row."""
    if documents is None:
        return None
    segments = torch.zeros(documents.shape, dtype=torch.int32, device=documents.device)
    torch.cumsum(documents[:, 1:] != documents[:, :-1], 1, dtype=torch.int32, out=segments[:, 1:])
    return segments


def _states(sizes: Sizes, values: Tensor, keys: Tensor, steps: Steps, reverse: bool) -> Tensor:
    """Return the states before chunks, or the gradients of those after them, [rows, chunks, heads, head, state]."""
    rows, tiles = values.shape[0], _tiles(sizes)
    states = values.new_empty(rows, sizes.chunks, sizes.heads, sizes.width, sizes.state)
    blocks = (tiles.padded_width // tiles.head_block, tiles.padded_state // tiles.state_block)
    launch(
        f"{KERNELS}.scan_states",
        (rows * sizes.heads, *blocks),
        *(values, keys, steps.step, steps.from_start if reverse else steps.to_end, steps.whole, states),
        *(*sizes, *values.stride(), *keys.stride()),
        REVERSE=reverse,
        T=CHUNK,
        BP=tiles.head_block,
        BN=tiles.state_block,
        num_warps=4,
        num_stages=3,
    )
    return states


def _scan_forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> Tensor:
    sizes, segments = _sizes(x, b), number_documents(documents)
    tiles = _tiles(sizes)
    steps = _steps(sizes, dt, a, bias, segments, softplus, (low, high), backward=False)
    states = _states(sizes, x, b, steps, reverse=False)
    out = x.new_empty(x.shape)
    launch(
        f"{KERNELS}.scan_outputs",
        (x.shape[0] * sizes.chunks, sizes.heads // tiles.heads),
        *(x, b, c, _or(skip, x), _or(segments, x), steps.step, steps.log_decay, steps.from_start, states, out),
        *(*sizes, *x.stride(), *b.stride(), *c.stride()),
        SKIP=skip is not None,
        PACKED=segments is not None,
        HEADS=tiles.heads,
        WIDTH=tiles.padded_width,
        T=CHUNK,
        BP=tiles.head_block,
        N=tiles.padded_state,
        num_warps=4,
        num_stages=_stages(tiles),
    )
    _count(x, sizes, FORWARD)
    return out


def _scan_backward_impl(
    gradient: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    documents: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> Gradients:
    """Return the gradients of x, dt, a, b, c, skip and bias."""
    sizes, segments = _sizes(x, b), number_documents(documents)
    tiles, rows = _tiles(sizes), x.shape[0]
    steps = _steps(sizes, dt, a, bias, segments, softplus, (low, high), backward=True)
    states = _states(sizes, x, b, steps, reverse=False)
    grad_states = _states(sizes, gradient, c, steps, reverse=True)
    grad_x, grad_dt = (one.new_empty(one.shape) for one in (x, dt))
    programs = sizes.heads // tiles.heads
    grad_inner = x.new_empty(rows * sizes.chunks, programs, CHUNK, CHUNK)
    direct, decayed, own = (torch.empty_like(steps.step) for _ in range(3))
    parts = sizes.per_group // tiles.heads
    grad_b, grad_c = (b.new_empty(parts, *b.shape, dtype=torch.float32) for _ in range(2))
    sums = x.new_empty(3, rows * sizes.chunks, sizes.heads, dtype=torch.float32)
    grid = (rows * sizes.chunks, programs)
    settings = {"HEADS": tiles.heads, "WIDTH": tiles.padded_width, "T": CHUNK, "BP": tiles.head_block}
    settings["N"] = tiles.padded_state
    launch(
        f"{KERNELS}.scan_x_gradients",
        grid,
        *(gradient, x, b, c, _or(skip, x), _or(segments, x), steps.step, steps.log_decay, steps.to_end, grad_states),
        *(grad_x, grad_inner, direct, decayed, own),
        *(*sizes, *gradient.stride(), *x.stride(), *b.stride(), *c.stride()),
        SKIP=skip is not None,
        PACKED=segments is not None,
        num_warps=4,
        num_stages=_stages(tiles),
        **settings,
    )
    launch(
        f"{KERNELS}.scan_c_gradients",
        grid,
        *(gradient, b, c, steps.from_start, states, grad_inner, decayed, grad_c),
        *(rows, *sizes, *gradient.stride(), *b.stride(), *c.stride()),
        num_warps=8,
        num_stages=_stages(tiles),
        **settings,
    )
    launch(
        f"{KERNELS}.scan_b_gradients",
        grid,
        *(x, b, c, a.contiguous(), steps.step, steps.to_end, steps.whole, steps.slope, states, grad_states),
        *(grad_inner, direct, decayed, own, grad_dt, grad_b, sums),
        *(rows, *sizes, *x.stride(), *b.stride(), *c.stride()),
        num_warps=8,
        num_stages=_stages(tiles),
        **settings,
    )
    del states, grad_states, steps, grad_inner, direct, decayed, own
    _count(x, sizes, BACKWARD)
    grad_a, grad_skip, grad_bias = (one.sum(0) for one in sums)
    total_b, total_c = (one.sum(0).to(b.dtype) for one in (grad_b, grad_c))
    return grad_x, grad_dt, grad_a, total_b, total_c, grad_skip, grad_bias


def _stages(tiles: Tiles) -> int:
    """Return the stages of loads; wide states have one, to fit into shared memory."""
    return 2 if tiles.padded_state <= 128 else 1


_ARGUMENTS = f"{INPUTS}, Tensor? documents, {SETTINGS}"
_scan = torch.library.custom_op(
    "meshwright::state_space_scan_triton", _scan_forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor"
)
_scan_backward = torch.library.custom_op(
    "meshwright::state_space_scan_triton_backward",
    _scan_backward_impl,
    mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}) -> ({', '.join(['Tensor'] * 7)})",
)


@_scan.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@_scan_backward.register_fake
def _(gradient: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *_: Any) -> Gradients:
    grad_x, grad_dt, grad_b, grad_c = (one.new_empty(one.shape) for one in (x, dt, b, c))
    grad_a, grad_skip, grad_bias = (a.new_empty(a.shape, dtype=torch.float32) for _ in range(3))
    return grad_x, grad_dt, grad_a, grad_b, grad_c, grad_skip, grad_bias


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.softplus, ctx.low, ctx.high = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    grads = _scan_backward(gradient, *inputs, ctx.softplus, ctx.low, ctx.high)
    fitting = (None if one is None else by.to(one.dtype) for by, one in zip(grads, inputs[:7], strict=True))
    return *fitting, None, None, None, None


_scan.register_autograd(_gradients, setup_context=_save_inputs)
DECOMPOSITIONS[torch.ops.meshwright.state_space_scan_triton.default] = _scan_forward
DECOMPOSITIONS[torch.ops.meshwright.state_space_scan_triton_backward.default] = _scan_backward_impl


class GemmCounts(NamedTuple):
    """Number of GEMMs of each shape in a pass: C·Bᵀ of a program, with the matrix of a chunk, and with states."""

    inner: int
    matrix: int
    states: int


FORWARD, BACKWARD = GemmCounts(1, 1, 2), GemmCounts(3, 2, 5)


def _count(x: Tensor, sizes: Sizes, gemms: GemmCounts) -> None:
    """Account for the FLOPs of the kernels, which a dry run does not launch."""
    if not is_dry(x):
        return
    by_chunk = gemms.inner * sizes.heads // _tiles(sizes).heads * CHUNK**2 * sizes.state
    by_chunk += gemms.matrix * sizes.heads * CHUNK**2 * sizes.width
    by_chunk += gemms.states * sizes.heads * CHUNK * sizes.width * sizes.state
    left_out(x, 2 * x.shape[0] * sizes.chunks * by_chunk)

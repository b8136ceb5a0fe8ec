"""The gated delta rule by Triton kernels, for bf16 inputs on a GPU; delta_rule.py has the formula.

Forward: keys and queries get unit length, the triangular systems of all chunks are solved, states pass from chunk to
chunk, and all outputs follow: four launches. Backward: the same without the outputs, then the gradients of states from
the last chunk to the first, and those of all inputs: six. Heads that share queries and keys read the same ones.

Saved are the inputs and the state before every span of tokens but the first. A span's states take `STATE_BYTES`, and
all its intermediate tensors about six times that, whatever the length.

Packed documents: given document ids [rows, tokens], no decay passes from one document to another, so every document
starts from a zero state. Nothing is padded, and nothing is copied to the host.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.engine.kernels.chunked_scan import Plan, block_plan, empty_states, left_out
from meshwright.engine.kernels.delta_rule import EPSILON, Gradients
from meshwright.engine.kernels.delta_rule import gated_delta_rule as torch_rule
from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, capability, is_dry, launch, on_gpu

CHUNK = 64  # tokens per triangular system; the kernels' inverse is written for it
STATE_BYTES = 2**26  # bf16 states of the chunks of a span
WIDTHS = (64, 128, 256)  # of keys and values: 16 read beyond shared memory on an H200; 256 needs that of Hopper
KERNELS = "_triton_delta"
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool norm, Tensor? documents"
HAS_TRITON = find_spec("triton") is not None
NOTHING_LEFT = -1e4  # log decay: its exponential is zero, and sums of it in fp64 keep ten digits behind the point


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool = False, documents: Tensor | None = None
) -> Tensor:
    """Return the same as delta_rule.gated_delta_rule; with document ids every document starts from a zero state."""
    if not runs(q, k, v):
        return torch_rule(q, k, v, g if documents is None else _forget_at_starts(g, documents), beta, norm)
    # Contiguous: a saved view would keep its larger base tensor alive.
    out, _ = _rule(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous(), norm, documents)
    result: Tensor = out
    return result


def runs(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernels run these inputs; other dtypes have torch operations, which are more exact."""
    if not on_gpu(v) or not (HAS_TRITON or is_dry(v)) or not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        return False
    widths = WIDTHS if capability(v.device) >= (9, 0) else WIDTHS[:-1]
    return k.shape[3] in widths and v.shape[3] in widths


def fits(mixer: Any) -> str:
    """Return why the kernels do not run a mixer; empty if they do."""
    for name in ("head_k_dim", "head_v_dim"):
        if getattr(mixer, name, WIDTHS[0]) not in WIDTHS:
            return f"{name} is {getattr(mixer, name)}, and the kernels take {', '.join(map(str, WIDTHS))}"
    return ""


def _forget_at_starts(g: Tensor, documents: Tensor) -> Tensor:
    """Return log decays that leave nothing of the state at the first token of every document."""
    return torch.where(_starts(documents)[..., None], NOTHING_LEFT, g)


def _starts(documents: Tensor) -> Tensor:
    """Return whether each token is the first of a document, [rows, tokens]; ids may recur."""
    return torch.diff(documents, dim=1, prepend=documents[:, :1] - 1) != 0


def _segments(documents: Tensor | None) -> Tensor | None:
    """Return the number of the document of each token in its row."""
    return None if documents is None else _starts(documents).cumsum(1, dtype=torch.int32)


def plan(rows: int, tokens: int, heads: int, key: int, value: int) -> Plan:
    """Return spans whose states take `STATE_BYTES`."""
    return block_plan(rows, tokens, CHUNK, 2 * heads * key * value, STATE_BYTES)


def _plan(k: Tensor, v: Tensor) -> Plan:
    rows, tokens, heads, value = v.shape
    return plan(rows, tokens, heads, k.shape[3], value)


def _empty_starts(k: Tensor, v: Tensor) -> Tensor:
    rows, _, heads, width = v.shape
    return v.new_empty(rows, _plan(k, v).blocks - 1, heads, k.shape[3], width, dtype=torch.float32)


class Solved(NamedTuple):
    """What both passes compute of a span before states pass through it. t: all its tokens, padded to whole chunks."""

    queries: Tensor  # scaled [rows, groups, t, key]
    keys: Tensor  # [rows, groups, t, key]
    log_decays: Tensor  # since the start of the chunk [rows, heads, t], in fp32
    erased: Tensor  # keys by which the solution subtracts the state before the chunk [rows, heads, t, key]
    written: Tensor  # the solution for a zero state before the chunk [rows, heads, t, value]
    inverses: Tensor  # of the systems [rows, heads, t, CHUNK]; for gradients
    grad_values: Tensor  # of the written values, through attention within chunks [rows, heads, t, value]; likewise


class Span:
    """The kernels on some rows and tokens."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool, segments: Tensor | None, at: slice
    ) -> None:
        self.q, self.k, self.v, self.g, self.beta, self.norm = q, k, v, g, beta, norm
        self.segments = g if segments is None else segments  # any pointer where there are none
        self.rows, self.tokens, self.heads, self.value = v.shape
        self.groups, self.key = k.shape[2:]
        self.first, self.chunks = at.start, -(-(at.stop - at.start) // CHUNK)
        self.packed = segments is not None
        # Wide heads run in blocks of columns: what a program works on must fit into shared memory.
        self.block = min(self.value, 64 if self.key > 128 else 128)

    def empty(self, heads: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor [rows, heads, t, width]."""
        return self.v.new_empty(self.rows, heads, self.chunks * CHUNK, width, dtype=dtype)

    def empty_states(self) -> Tensor:
        """Return an empty tensor of a state per chunk."""
        return self.v.new_empty(self.rows, self.heads, self.chunks, self.key, self.value)

    def of_chunks(self, program: str, across: int, *args: Any, **settings: Any) -> None:
        """Launch a kernel for every chunk of `across` heads or groups."""
        grid = (self.chunks, self.rows * across)
        launch(f"{KERNELS}.{program}", grid, *args, CHUNK=CHUNK, num_stages=1, **settings)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.first, self.tokens, self.chunks

    @property
    def shape(self) -> dict[str, Any]:
        """Return the compile-time constants of the kernels with values."""
        shared = self.heads // self.groups
        return {"SHARED": shared, "KEY": self.key, "VALUE": self.value, "PACKED": self.packed}

    def solve(self, gradient: Tensor | None = None) -> Solved:
        """Solve the systems of all chunks; for gradients, given that of the outputs, with all fields."""
        queries, keys = self.empty(self.groups, self.key), self.empty(self.groups, self.key)
        settings = {"GROUPS": self.groups, "KEY": self.key, "NORM": self.norm, "EPSILON": EPSILON}
        inputs = (self.q, self.k, queries, keys, *self.sizes, self.key**-0.5)
        self.of_chunks("prepare_keys", self.groups, *inputs, **settings, num_warps=4)
        log_decays = self.v.new_empty(self.rows, self.heads, self.chunks * CHUNK, dtype=torch.float32)
        erased, written = self.empty(self.heads, self.key), self.empty(self.heads, self.value)
        inverses, grad_values = erased, written  # any pointers where they are not written
        if gradient is not None:
            inverses, grad_values = self.empty(self.heads, CHUNK), self.empty(self.heads, self.value)
        self.of_chunks(
            "solve_chunks", self.heads, queries, keys, self.v, self.g, self.beta, self.segments,
            self.v if gradient is None else gradient, log_decays, inverses, erased, written, grad_values, *self.sizes,
            HEADS=self.heads, BLOCK=self.block, BACKWARD=gradient is not None, **self.shape, num_warps=4,
        )  # fmt: skip
        return Solved(queries, keys, log_decays, erased, written, inverses, grad_values)

    def along(self, program: str, *args: Any, stages: int) -> None:
        """Launch a kernel that runs through all chunks, for every head and block of value columns."""
        block = min(self.value, 32)  # many blocks: one after another, chunks are bound by latency
        grid = (self.value // block, self.rows * self.heads)
        settings = {"HEADS": self.heads, "BLOCK": block, "CHUNK": CHUNK, "num_warps": 4, "num_stages": stages}
        launch(f"{KERNELS}.{program}", grid, *args, *self.sizes, **self.shape, **settings)

    def pass_states(self, solved: Solved, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states before chunks and the written values; replace the state before the span by the last."""
        before, values = self.empty_states(), self.empty(self.heads, self.value)
        inputs = (solved.keys, solved.erased, solved.written, solved.log_decays, self.segments)
        self.along("pass_states", *inputs, before, values, state, stages=2)
        return before, values

    def write_outputs(self, solved: Solved, before: Tensor, values: Tensor, out: Tensor) -> None:
        inputs = (solved.queries, solved.keys, solved.log_decays, self.segments, before, values, out, *self.sizes)
        settings = {"HEADS": self.heads, "BLOCK": self.block, **self.shape}
        self.of_chunks("write_outputs", self.heads, *inputs, **settings, num_warps=4)

    def gradients(self, gradient: Tensor, state: Tensor, grad_state: Tensor, into: Gradients) -> None:
        """Write the gradients of the inputs; replace that of the state after the span by that of the one before."""
        solved = self.solve(gradient)
        before, values = self.pass_states(solved, state)
        after = self.empty_states()
        inputs = (solved.queries, solved.keys, solved.erased, solved.log_decays, self.segments, gradient)
        self.along("pass_state_gradients", *inputs, solved.grad_values, after, grad_state, stages=2)
        grad_q, grad_k, grad_v, grad_g, grad_beta = into
        grad_keys = self.empty(self.groups, self.key, torch.float32)
        grad_logs = torch.empty_like(solved.log_decays)
        settings = {"GROUPS": self.groups, "BLOCK": self.block, "NORM": self.norm, "EPSILON": EPSILON, **self.shape}
        self.of_chunks(
            "read_gradients", self.groups, self.q, solved.queries, solved.keys, solved.log_decays, self.segments,
            before, after, values, gradient, grad_q, grad_keys, grad_logs, *self.sizes, self.key**-0.5,
            **settings, num_warps=8,
        )  # fmt: skip
        self.of_chunks(
            "system_gradients", self.groups, self.k, self.v, self.beta, solved.keys, solved.log_decays, self.segments,
            solved.inverses, solved.erased, solved.written, before, solved.grad_values, grad_keys, grad_logs,
            grad_k, grad_v, grad_g, grad_beta, *self.sizes, **settings, num_warps=8,
        )  # fmt: skip


def _rule_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the state before every span but the first."""
    blocks, segments = _plan(k, v), _segments(documents)
    out = v.new_empty(v.shape, dtype=q.dtype)
    starts = _empty_starts(k, v)
    for rows in blocks.of_rows():
        state = empty_states(starts, rows)
        for number, tokens in enumerate(blocks.along()):
            if number:
                starts[rows, number - 1] = state
            span = _span(rows, tokens, q, k, v, g, beta, norm, segments)
            solved = span.solve()
            before, values = span.pass_states(solved, state)
            span.write_outputs(solved, before, values, out[rows])
            del solved, before, values  # free them before the next span
    _count(k, v, FORWARD)
    return out, starts


def _span(rows: slice, tokens: slice, *inputs: Any) -> Span:
    given: list[Any] = [one[rows] if isinstance(one, Tensor) else one for one in inputs]
    q, k, v, g, beta, norm, segments = given
    return Span(q, k, v, g, beta, norm, segments, tokens)


_rule = torch.library.custom_op(
    "meshwright::triton_delta_rule", _rule_forward, mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)"
)


@_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape, dtype=q.dtype), _empty_starts(k, v)


def _rule_backward_impl(
    gradient: Tensor,
    starts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    norm: bool,
    documents: Tensor | None,
) -> Gradients:
    """Return the gradients of q, k, v, g and beta."""
    blocks, segments = _plan(k, v), _segments(documents)
    gradient = gradient.contiguous()
    found = _empty_like(q, k, v, g, beta)
    for rows in blocks.of_rows():
        grad_state = empty_states(starts, rows)
        into = tuple(one[rows] for one in found)
        for number, tokens in reversed(list(enumerate(blocks.along()))):
            state = starts[rows, number - 1].clone() if number else empty_states(starts, rows)
            span = _span(rows, tokens, q, k, v, g, beta, norm, segments)
            span.gradients(gradient[rows], state, grad_state, into)  # type: ignore[arg-type]  # five
    _count(k, v, BACKWARD)
    return found


def _empty_like(*inputs: Tensor) -> Gradients:
    grad_q, grad_k, grad_v, grad_g, grad_beta = (one.new_empty(one.shape) for one in inputs)
    return grad_q, grad_k, grad_v, grad_g, grad_beta


_rule_backward = torch.library.custom_op(
    "meshwright::triton_delta_rule_backward",
    _rule_backward_impl,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor starts, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_rule_backward.register_fake
def _(gradient: Tensor, starts: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any) -> Gradients:
    return _empty_like(q, k, v, g, beta)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the states have no gradient
    *tensors, ctx.norm, documents = inputs
    ctx.save_for_backward(output[1], documents, *tensors)


def _gradients(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 7
    starts, documents, *inputs = ctx.saved_tensors  # read once: with recompute every access would recompute them
    return *_rule_backward(gradient, starts, *inputs, ctx.norm, documents), None, None


_rule.register_autograd(_gradients, setup_context=_save_inputs)
DECOMPOSITIONS[torch.ops.meshwright.triton_delta_rule.default] = _rule_forward
DECOMPOSITIONS[torch.ops.meshwright.triton_delta_rule_backward.default] = _rule_backward_impl


class GemmCounts(NamedTuple):
    """Number of GEMMs of each shape that a pass runs for a chunk.

    tokens × tokens over keys per group of heads, over keys and over values per head; and with states per head.
    """

    shared: int
    keys: int
    values: int
    states: int


FORWARD, BACKWARD = GemmCounts(0, 3, 2, 3), GemmCounts(2, 8, 5, 8)


def _count(k: Tensor, v: Tensor, gemms: GemmCounts) -> None:
    """Account for the FLOPs of the kernels, which a dry run does not launch."""
    if not is_dry(v):
        return
    (rows, tokens, heads, value), (groups, key) = v.shape, k.shape[2:]
    by_tokens = gemms.shared * groups * key + heads * (gemms.keys * key + gemms.values * value)
    with_states = gemms.states * heads * CHUNK * key * value
    left_out(v, 2 * rows * -(-tokens // CHUNK) * (CHUNK**2 * by_tokens + with_states))

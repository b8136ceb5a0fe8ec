"""Mamba-2 and gated-delta scans by the Triton kernels of flash-linear-attention (fla, extra `kernels`).

Only fla's public functions are called. They are autograd functions that torch.compile cannot trace, so each is a custom
op here, like our own scans: a compiled layer stays one graph. An op saves its inputs; its backward runs fla's forward
again and then fla's backward.

Packed documents: every op takes the document ids [rows, tokens]. Rows are joined and fla gets the first token of every
document (`cu_seqlens`), where states and convolutions start from zero. Nothing is padded, and shapes do not depend on
the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from meshwright import extras
from meshwright.engine.kernels.cross_entropy import upcast
from meshwright.engine.kernels.device_caps import capability
from meshwright.recipes.types import Kernels

# Whether kernels.scan=auto takes fla where it runs. Off until its speed and gradients are measured on a GPU
# (benchmarks/scan_speed.py, tests/engine/test_scan_gpu.py).
AUTO_FLA = False
WIDEST_HEAD = 256  # of keys and states, in fla's kernels
ACTIVATIONS = ("silu", "swish")  # of fla's convolution
FIELD = "kernels.scan"
# Triton versions that compile fla's gated backward wrongly on Hopper; fla refuses them without tilelang.
WRONG_ON_HOPPER = ((3, 4), (3, 7, 1))


def may_run(kernels: Kernels) -> bool:
    """Return whether a recipe's run may take fla's kernels, if its machine has them."""
    return kernels.scan == "fla" or (kernels.scan == "auto" and AUTO_FLA and not kernels.deterministic)


def fits(mixer: Any) -> str:
    """Return why fla's kernels do not run a mixer; empty if they do."""
    widths = [getattr(mixer, name, 0) for name in ("head_k_dim", "ssm_state_size")]
    if max(widths) > WIDEST_HEAD:
        return f"its state is {max(widths)} wide, and fla's kernels take at most {WIDEST_HEAD}"
    if mixer.activation not in ACTIVATIONS:
        return f"its activation is {mixer.activation}, and fla's convolution has {' and '.join(ACTIVATIONS)} only"
    return ""


def unusable(device_type: str) -> str:
    """Return why fla does not run here; empty if it does."""
    if device_type != "cuda":
        return f"fla's kernels need a CUDA GPU, and this run is on {device_type.upper()}"
    if missing := extras.missing("fla-core"):
        return missing
    low, high = WRONG_ON_HOPPER
    if capability()[0] == 9 and low <= _triton() < high and find_spec("tilelang") is None:
        found, fixed = (".".join(map(str, one)) for one in (_triton(), high))
        return f"Triton {found} computes wrong gradients of fla's kernels on Hopper GPUs; {fixed} is right"
    return ""


def _triton() -> tuple[int, ...]:
    try:
        return extras.version_numbers(version("triton"))
    except PackageNotFoundError:
        return ()


# Documents


class Boundaries(NamedTuple):
    """The first token of every document over all rows, and the number of tokens; on the device and the host."""

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor


_boundaries: Any = WeakIdKeyDictionary()  # by the tensor of document ids, which all layers of a micro batch share


def boundaries(documents: Tensor) -> Boundaries:
    """Return the boundaries of the documents [rows, tokens]; a document does not pass from row to row."""
    found: Boundaries | None = _boundaries.get(documents)
    if found is None:
        ids = documents.cpu()  # the one copy to the host per micro batch
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        first = starts.flatten().nonzero().flatten()
        ends = torch.cat([first, first.new_tensor([ids.numel()])])
        # fla caches what it derives from these by identity: the same objects for every layer.
        found = _boundaries[documents] = Boundaries(ends.to(documents.device), ends)
    return found


def _joined(documents: Tensor | None, *tensors: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return tensors [rows, tokens, ...] as one row with the boundaries for fla; unchanged without documents."""
    if documents is None:
        return tensors, {}
    return tuple(one.flatten(0, 1)[None] for one in tensors), boundaries(documents)._asdict()


# The functions, each as fla's forward


@cache
def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool, documents: Tensor | None) -> Tensor:
    rule = _function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    joined, packed = _joined(documents, q, k, v, g, beta)
    out, _ = rule(*joined, scale=q.shape[-1] ** -0.5, use_qk_l2norm_in_kernel=norm, **packed)
    result: Tensor = out.reshape(v.shape)
    return result


def _state_space(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
    documents: Tensor | None,
) -> Tensor:
    """The scan as linear attention with a decay per head: C are queries, B keys, Δ·x values."""
    scan = _function("fla.ops.simple_gla", "chunk_simple_gla")
    raw = upcast(dt) if bias is None else upcast(dt) + bias
    step = (functional.softplus(raw) if softplus else raw).clamp(low, high)
    values = (x * step[..., None]).to(x.dtype)
    # The kernel wants keys and queries for every head; the groups' gradients are their sums.
    b, c = (one.repeat_interleave(x.shape[2] // one.shape[2], 2) for one in (b, c))
    joined, packed = _joined(documents, c, b, values, step * a)
    out, _ = scan(*joined, scale=1.0, **packed)
    out = out.reshape(x.shape)
    result: Tensor = out if skip is None else (out + x * skip[:, None]).to(x.dtype)
    return result


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Tensor | None
) -> Tensor:
    convolution = _function("fla.modules.causal_conv1d", "causal_conv1d")
    (joined,), packed = _joined(documents, x)
    out, _ = convolution(joined, weight, bias, activation=activation, **packed)
    result: Tensor = out.reshape(x.shape)
    return result


# The same as custom ops


def _custom_op(name: str, arguments: str, function: Callable[..., Tensor], output: int) -> Callable[..., Tensor]:
    """Return a function as a custom op with gradients; its result has the shape of argument number `output`."""

    def forward(*inputs: Any) -> Tensor:
        return function(*inputs).contiguous()

    def backward(gradient: Tensor, needed: list[bool], *inputs: Any) -> list[Tensor]:
        with _recorded():
            given = [one.detach().requires_grad_() if need else one for one, need in zip(inputs, needed, strict=True)]
            wanted = [one for one, need in zip(given, needed, strict=True) if need]
            grads = torch.autograd.grad(function(*given), wanted, gradient)
        return [one.contiguous() for one in grads]

    forward_op = torch.library.custom_op(
        f"meshwright::{name}", forward, mutates_args=(), schema=f"({arguments}) -> Tensor"
    )
    backward_op = torch.library.custom_op(
        f"meshwright::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor gradient, bool[] needed, {arguments}) -> Tensor[]",
    )

    def saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.at = [i for i, one in enumerate(inputs) if isinstance(one, Tensor)]
        ctx.others = [None if isinstance(one, Tensor) else one for one in inputs]
        ctx.save_for_backward(*(inputs[i] for i in ctx.at))

    def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = list(ctx.others)
        for i, one in zip(ctx.at, ctx.saved_tensors, strict=True):
            inputs[i] = one
        needed = list(ctx.needs_input_grad[: len(inputs)])
        found = iter(backward_op(gradient, needed, *inputs))
        return tuple(next(found) if need else None for need in needed)

    forward_op.register_fake(lambda *inputs: inputs[output].new_empty(inputs[output].shape))
    backward_op.register_fake(
        lambda _, needed, *inputs: [one.new_empty(one.shape) for one, need in zip(inputs, needed, strict=True) if need]
    )
    forward_op.register_autograd(gradients, setup_context=saved)
    op: Callable[..., Tensor] = forward_op
    return op


@contextmanager
def _recorded() -> Iterator[None]:
    """Let autograd record what runs inside a custom op, which runs below it."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


_delta_op = _custom_op(
    "fla_delta_rule", "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool norm, Tensor? documents", _delta, 2
)
_state_space_op = _custom_op(
    "fla_state_space",
    "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor? bias, "
    "bool softplus, float low, float high, Tensor? documents",
    _state_space,
    0,
)
_convolution_op = _custom_op(
    "fla_causal_conv", "Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor? documents", _convolution, 0
)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool = False, documents: Tensor | None = None
) -> Tensor:
    """Return the same as delta_rule.gated_delta_rule, by fla; every document starts from a zero state."""
    # Contiguous: a saved view would keep its larger base tensor alive.
    return _delta_op(q.contiguous(), k.contiguous(), v.contiguous(), g, beta, norm, documents)


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
    """Return the same as state_space.state_space_scan, by fla; every document starts from a zero state."""
    return _state_space_op(x, dt, a, b, c, skip, bias, softplus, *limits, documents)


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Tensor | None = None
) -> Tensor:
    """Return the causal convolution of x [rows, tokens, channels] with a filter [channels, width] per channel."""
    return _convolution_op(x, weight, bias, activation, documents)

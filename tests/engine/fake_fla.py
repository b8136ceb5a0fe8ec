"""A module `fla` for machines without Triton: the documented functions as token-by-token recurrences in fp64.

They refuse what the real ones refuse (a batch with cu_seqlens) and take the same arguments by the same names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CALLS: list[tuple[str, dict[str, Any]]] = []


def _documents(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> list[slice]:
    """The tokens of each document; all of them without boundaries."""
    if cu_seqlens is None:
        return [slice(0, x.shape[1])]
    if x.shape[0] != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {x.shape[0]} when using `cu_seqlens`.")
    assert cu_seqlens_cpu is not None
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    ends = cu_seqlens.tolist()
    assert (ends[0], ends[-1]) == (0, x.shape[1])
    return [slice(first, last) for first, last in pairwise(ends)]


def _scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, documents: list[slice]) -> Tensor:
    """Gated linear attention (without beta) or the gated delta rule of [rows, tokens, heads, ...]."""
    out = []
    for tokens in documents:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        for t in range(tokens.start, tokens.stop):
            state = state * g[:, t].exp()[..., None, None]
            written = v[:, t]
            if beta is not None:
                written = beta[:, t, :, None] * (written - torch.einsum("rhk,rhkv->rhv", k[:, t], state))
            state = state + torch.einsum("rhk,rhv->rhkv", k[:, t], written)
            out.append(torch.einsum("rhk,rhkv->rhv", q[:, t], state))
    return torch.stack(out, 1)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """As fla.ops.gated_delta_rule.chunk_gated_delta_rule; v may have more heads than q and k."""
    assert not any((output_final_state, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first))
    assert initial_state is None
    CALLS.append(("delta", {"heads": (q.shape[2], v.shape[2]), "cu_seqlens": cu_seqlens}))
    low, copies = q.dtype, v.shape[2] // q.shape[2]
    q, k, v, g, beta = (one.double() for one in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (one.repeat_interleave(copies, 2) for one in (q, k))
    return _scan(q, k, v, g, beta, _documents(q, cu_seqlens, cu_seqlens_cpu)).to(low), None


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """As fla.ops.simple_gla.chunk_simple_gla, which wants as many heads of q and k as of v."""
    assert g is not None
    assert g_gamma is None
    assert initial_state is None
    assert not any((output_final_state, state_v_first))
    assert q.shape[2] == k.shape[2] == v.shape[2] == g.shape[2]
    CALLS.append(("state space", {"heads": q.shape[2], "cu_seqlens": cu_seqlens}))
    low = q.dtype
    q, k, v, g = (one.double() for one in (q, k, v, g))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    return _scan(q, k, v, g, None, _documents(q, cu_seqlens, cu_seqlens_cpu)).to(low), None


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """As fla.modules.causal_conv1d.causal_conv1d: x [rows, tokens, channels], weight [channels, width]."""
    assert weight is not None
    assert residual is None
    assert initial_state is None
    assert not output_final_state
    assert backend == "triton"
    assert activation in ("silu", "swish", None)
    CALLS.append(("convolution", {"cu_seqlens": cu_seqlens}))
    out = []
    for tokens in _documents(x, cu_seqlens, cu_seqlens_cpu):
        padded = functional.pad(x[:, tokens].double().transpose(1, 2), (weight.shape[1] - 1, 0))
        kernel, shift = weight.double()[:, None], None if bias is None else bias.double()
        out.append(functional.conv1d(padded, kernel, shift, groups=x.shape[2]).transpose(1, 2))
    joined = torch.cat(out, 1)
    return (functional.silu(joined) if activation else joined).to(x.dtype), None


@contextmanager
def installed() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Put the functions under fla's names; yield the list of calls."""
    from meshwright.engine.kernels import fla_scan

    modules = {
        "fla": {},
        "fla.ops": {},
        "fla.modules": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "fla.ops.simple_gla": {"chunk_simple_gla": chunk_simple_gla},
        "fla.modules.causal_conv1d": {"causal_conv1d": causal_conv1d},
    }
    before = {name: sys.modules.get(name) for name in modules}
    for name, functions in modules.items():
        module: Any = ModuleType(name)
        vars(module).update(functions, __path__=[])
        sys.modules[name] = module
    fla_scan._function.cache_clear()
    CALLS.clear()
    try:
        yield CALLS
    finally:
        fla_scan._function.cache_clear()
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module

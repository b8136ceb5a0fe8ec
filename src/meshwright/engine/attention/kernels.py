"""Block kernels: attention of some queries to some keys as a mergeable (output, log-sum-exp), and its backward pass.

The backward pass of a block takes the output and log-sum-exp of the FULL row (all blocks, and the sink), because a
probability is exp(score - lse) in whichever block it is. `math` computes any block; `flash` full and triangular ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor

from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.kernels.device_caps import capability, on_gpu

aten = torch.ops.aten

# Log-sum-exp of an empty row. Finite, so that merging two empty rows does not compute inf - inf.
EMPTY_LSE = -1e30

Grads = tuple[Tensor, Tensor, Tensor]


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge another block into the running fp32 output and log-sum-exp, in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(more.float(), (more_lse - total).exp_()[..., None])
    lse.copy_(total)


def math_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the fp32 output and log-sum-exp of one block, in plain (differentiable) operations."""
    scores = _capped(_scores(q, k, spec), spec)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True).clamp_min(EMPTY_LSE)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    lse = torch.where(total > 0, total.clamp_min(1e-30).log() + top, EMPTY_LSE)
    weights = F.dropout(weights, dropout) if dropout else weights
    out = _over_keys(weights, v.float()) / total.clamp_min(1e-30).flatten(1, 2)
    return out, lse.flatten(1, 2).squeeze(-1)


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Grads:
    """Return the fp32 gradients of q, k, v from one block; `delta` is the row sum of output x its gradient."""
    raw = _scores(q, k, spec)
    weights = (_capped(raw, spec) - _grouped(lse[..., None], k)).exp()
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None, None], 0.0)
    grad = grad.float()
    slope = weights * (_products(grad, v) - _grouped(delta[..., None], k))
    if spec.softcap is not None:
        slope = slope * (1 - (raw / spec.softcap).tanh().square())
    slope = slope * spec.scale
    return _over_keys(slope, k.float()), _over_queries(slope, q.float()), _over_queries(weights, grad)


def flash_takes(q: Tensor, k: Tensor) -> bool:
    """Return whether the flash kernels of this device support these shapes and this dtype."""
    if not on_gpu(q):
        return True
    if capability(q.device)[0] < 8:  # flash kernels came with Ampere
        return False
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and fp32 log-sum-exp of a full or triangular block, by the flash kernel."""
    width = v.shape[-1]
    v = _pad(v, q.shape[-1])
    if not on_gpu(q):
        k, v = _per_query_head(k, q), _per_query_head(v, q)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        out = out.transpose(1, 2)
    return out[..., :width], lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Grads:
    """Return the gradients of q, k, v from one block, given the full row's output and log-sum-exp."""
    width = v.shape[-1]
    grad, v, out = (_pad(x, q.shape[-1]) for x in (grad, v, out))
    if not on_gpu(q):
        heads = k.shape[1]
        k, v = _per_query_head(k, q), _per_query_head(v, q)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        dk, dv = (torch.unflatten(x, 1, (heads, -1)).sum(2) for x in (dk, dv))
    else:
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is off
        unused = torch.empty(0, device=q.device)
        grads = aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, state, unused,
            scale=scale,
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv[..., :width]


def _pad(x: Tensor, width: int) -> Tensor:
    """Pad with zero columns up to `width`: flash kernels need values as wide as keys (MLA's are narrower)."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key or value heads for every query head: the CPU flash kernel does not support GQA."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


# GQA in the math kernel: the queries of a group are stacked as more rows of their key head, so that keys are not
# repeated: [batch, key heads, group x queries, keys], viewed as [batch, key heads, group, queries, keys].


def _products(q: Tensor, k: Tensor) -> Tensor:
    stacked = torch.unflatten(q.float(), 1, (k.shape[1], -1)).flatten(2, 3)
    return torch.unflatten(stacked @ k.float().transpose(-1, -2), 2, (-1, q.shape[2]))


def _scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    return _products(q, k) * spec.scale


def _capped(scores: Tensor, spec: AttentionSpec) -> Tensor:
    return scores if spec.softcap is None else spec.softcap * (scores / spec.softcap).tanh()


def _grouped(rows: Tensor, k: Tensor) -> Tensor:
    return torch.unflatten(rows, 1, (k.shape[1], -1))


def _over_keys(weights: Tensor, x: Tensor) -> Tensor:
    """Return weights @ x per query: [batch, query heads, queries, width]."""
    return torch.unflatten(weights.flatten(2, 3) @ x, 2, weights.shape[2:4]).flatten(1, 2)


def _over_queries(weights: Tensor, x: Tensor) -> Tensor:
    """Return weights.T @ x per key, summed over the query group: [batch, key heads, keys, width]."""
    return weights.flatten(2, 3).transpose(-1, -2) @ torch.unflatten(x, 1, (weights.shape[1], -1)).flatten(2, 3)

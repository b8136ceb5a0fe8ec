"""Block kernels: attention of some queries to some keys, as (output, log-sum) that merge, and its backward.

The backward of a block takes the output and log-sum of the WHOLE row (all blocks, and the sink): the probabilities are
exp(score - log-sum) whatever block they are in. `math` computes anything; `flash` computes full and triangular blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor

from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.kernels.device_caps import on_gpu

aten = torch.ops.aten

# The log-sum of nothing. Finite, so that merging nothing with nothing has no inf - inf.
EMPTY_LSE = -1e30

Grads = tuple[Tensor, Tensor, Tensor]


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds another block's output to the running fp32 output and log-sum, in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(more.float(), (more_lse - total).exp_()[..., None])
    lse.copy_(total)


def math_forward(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, terms: AttentionSpec, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The fp32 output and log-sum of one block, written out; differentiable by autograd as well."""
    scores = _capped(_scores(q, k, terms), terms)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True).clamp_min(EMPTY_LSE)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    lse = torch.where(total > 0, total.clamp_min(1e-30).log() + top, EMPTY_LSE)
    weights = F.dropout(weights, dropout) if dropout else weights
    out = _over_keys(weights, v.float()) / total.clamp_min(1e-30).flatten(1, 2)
    return out, lse.flatten(1, 2).squeeze(-1)


def math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, seen: Tensor | None, terms: AttentionSpec
) -> Grads:
    """fp32 gradients of q, k, v from one block; `delta` is the row sum of output x its gradient."""
    raw = _scores(q, k, terms)
    weights = (_capped(raw, terms) - _grouped(lse[..., None], k)).exp()
    if seen is not None:
        weights = weights.masked_fill(~seen[:, None, None], 0.0)
    grad = grad.float()
    slope = weights * (_products(grad, v) - _grouped(delta[..., None], k))
    if terms.softcap is not None:
        slope = slope * (1 - (raw / terms.softcap).tanh().square())
    slope = slope * terms.scale
    return _over_keys(slope, k.float()), _over_queries(slope, q.float()), _over_queries(weights, grad)


def flash_takes(q: Tensor, k: Tensor) -> bool:
    """Whether the flash kernels of this device compute these shapes and this precision."""
    if not on_gpu(q):
        return True
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output and fp32 log-sum of a full or triangular block, by the flash kernel."""
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
    """Gradients of q, k, v from one block, given the whole row's output and log-sum, by the flash kernel."""
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
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is never used
        unused = torch.empty(0, device=q.device)
        found = aten._flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, state, unused,
            scale=scale,
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in found)
    return dq, dk, dv[..., :width]


def _pad(x: Tensor, width: int) -> Tensor:
    """Zero columns up to `width`: flash kernels want values as wide as keys (MLA's are narrower)."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Key or value heads repeated for every query head: the CPU's flash kernel knows no groups."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


# The math kernel shares a key head among its group of query heads by stacking the group's queries as more rows, which
# repeats nothing: [batch, key heads, group x queries, keys], seen as [batch, key heads, group, queries, keys].


def _products(q: Tensor, k: Tensor) -> Tensor:
    stacked = torch.unflatten(q.float(), 1, (k.shape[1], -1)).flatten(2, 3)
    return torch.unflatten(stacked @ k.float().transpose(-1, -2), 2, (-1, q.shape[2]))


def _scores(q: Tensor, k: Tensor, terms: AttentionSpec) -> Tensor:
    return _products(q, k) * terms.scale


def _capped(scores: Tensor, terms: AttentionSpec) -> Tensor:
    return scores if terms.softcap is None else terms.softcap * (scores / terms.softcap).tanh()


def _grouped(rows: Tensor, k: Tensor) -> Tensor:
    return torch.unflatten(rows, 1, (k.shape[1], -1))


def _over_keys(weights: Tensor, x: Tensor) -> Tensor:
    """weights @ x, per query: [batch, query heads, queries, width]."""
    return torch.unflatten(weights.flatten(2, 3) @ x, 2, weights.shape[2:4]).flatten(1, 2)


def _over_queries(weights: Tensor, x: Tensor) -> Tensor:
    """weights' transpose @ x, per key and summed over the group: [batch, key heads, keys, width]."""
    return weights.flatten(2, 3).transpose(-1, -2) @ torch.unflatten(x, 1, (weights.shape[1], -1)).flatten(2, 3)

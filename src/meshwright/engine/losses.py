"""The loss of a language-model head, from the last hidden states and the head's weight.

All methods give the same numbers; they differ in what they save for the backward pass and in how often the logits are
computed. With T tokens, V_local rows of the head on this rank and hidden size H:

plain           torch's cross entropy on full fp32 logits [T, V]; saves them
vocab_parallel  cross entropy on this rank's slice; saves one copy of [T, V_local] in the compute dtype
chunked         saves one number per token; the backward pass recomputes the logits, `chunk` tokens at a time
fused_linear    the forward pass already computes the gradients, `chunk` tokens at a time: saves d(hidden) [T, H] in the
                compute dtype and d(weight) [V_local, H] in fp32; the backward pass only scales them

The softmax is computed in fp32 (float64 for float64 inputs). chunked and fused_linear sum the weight's gradient over
chunks in fp32. Under tp each rank holds an equal, contiguous slice of the vocabulary, in rank order; one small
all-gather per chunk (two numbers per token and rank) combines the slices into one softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's convention)
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.engine.collectives import all_gather
from meshwright.engine.kernels.cross_entropy import (
    capped,
    logit_gradient,
    logits_to_gradient_,
    slice_statistics,
    upcast,
)
from meshwright.engine.kernels.device_caps import is_dry, on_gpu, outputs_only
from meshwright.errors import InputError

LossMethod = Literal["vocab_parallel", "plain", "chunked", "fused_linear"]
TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""A user's loss: logits [n, vocab] and labels [n], negative where a token does not count, to one loss per token [n]."""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Loss:
    """A loss and its parts: total = cross_entropy + z; only total carries a gradient."""

    total: Tensor
    cross_entropy: Tensor
    z: Tensor


@dataclass(frozen=True)
class _Terms:
    z_loss: float
    softcap: float | None
    group: dist.ProcessGroup | None
    chunk: int


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    *,
    method: LossMethod = "vocab_parallel",
    z_loss: float = 0.0,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    chunk: int = 4096,
    reduce_hidden: bool = True,
    function: TokenLoss | None = None,
) -> Loss:
    """Return the sum over tokens of weights * (cross entropy + z_loss * log-partition²), on every tp rank.

    `weights` include the global normalizer; tokens with a negative label are ignored. With `reduce_hidden` the gradient
    of `hidden` is summed over `group`; without, each rank returns the contribution of its slice. With `function` and
    the plain method, that function of all logits takes the place of the cross entropy.
    """
    weights = torch.where(labels >= 0, weights, 0.0)
    if group is not None and reduce_hidden:
        hidden = _apply(_SumGradient, hidden, group)
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    terms = _Terms(z_loss, softcap, group, chunk)
    if method == "plain":
        return _plain(F.linear(hidden, weight, bias), labels, weights, terms, function or _cross_entropy)
    # From here on labels are rows of this rank's slice; labels of other slices are out of its range.
    labels = labels - _first_row(weight.shape[0], group)
    if method == "vocab_parallel":
        return Loss(*_apply(_VocabParallel, F.linear(hidden, weight, bias), labels, weights, terms))
    # Without a backward pass both methods are the same, and gradients would be wasted.
    in_chunks = _FusedLinear if method == "fused_linear" and torch.is_grad_enabled() else _Chunked
    return Loss(*_apply(in_chunks, hidden, weight, bias, labels, weights, terms))


def logits_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, z_loss: float = 0.0, function: TokenLoss | None = None
) -> Loss:
    """Return the same sum from all logits [n, vocab] of one rank."""
    terms = _Terms(z_loss, None, None, len(logits))
    return _plain(logits, labels, torch.where(labels >= 0, weights, 0.0), terms, function or _cross_entropy)


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]  # untyped in torch


def _first_row(rows: int, group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else rows * dist.get_rank(group)


# --- arithmetic of one block of logits ---------------------------------------------------------------------------


@cache
def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return torch.compile(function)


def _fast(function: Callable[P, R], like: Tensor) -> Callable[P, R]:
    """Return the function compiled to one kernel on a GPU; unchanged on a CPU."""
    if not on_gpu(like):
        return function
    return partial(outputs_only, function) if is_dry(like) else _compiled(function)


def _statistics(logits: Tensor, labels: Tensor, terms: _Terms) -> Tensor:
    """Return the log-sum-exp over the full vocabulary and the label's logit: [2, n]."""
    local = _fast(slice_statistics, logits)(logits, labels, terms.softcap)
    if terms.group is None:
        return local
    every = _gather_ranks(local, terms.group)
    return torch.stack([torch.logsumexp(every[:, 0], 0), every[:, 1].sum(0)])


def _gather_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    world = dist.get_world_size(group)
    every = tensor.new_empty(world * tensor.shape[0], *tensor.shape[1:])
    all_gather(every, tensor.contiguous(), group=group)
    return every.view(world, *tensor.shape)


def _parts(statistics: Tensor, weights: Tensor, terms: _Terms) -> tuple[Tensor, Tensor, Tensor]:
    log_sum, target = statistics
    cross_entropy = (weights * (log_sum - target)).sum()
    z = (weights * terms.z_loss * log_sum**2).sum()
    return cross_entropy + z, cross_entropy, z


def _blocks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


# --- plain -------------------------------------------------------------------------------------------------------


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.clamp(min=-1), ignore_index=-1, reduction="none")


def _plain(logits: Tensor, labels: Tensor, weights: Tensor, terms: _Terms, function: TokenLoss) -> Loss:
    if terms.group is not None:
        logits = _apply(_GatherVocabulary, logits, terms.group)
    within = capped(logits, terms.softcap)
    per_token = function(within, labels)
    if per_token.shape != labels.shape:
        shapes = f"{list(per_token.shape)}, not {list(labels.shape)}"
        raise InputError(f"must return the loss of every token, but returned shape {shapes}", field="loss")
    # Not a product: what a function returns for a token that does not count may be infinite.
    cross_entropy = torch.where(labels >= 0, weights * per_token, 0.0).sum()
    if not terms.z_loss:
        return Loss(cross_entropy, cross_entropy.detach(), torch.zeros_like(cross_entropy))
    z = (weights * terms.z_loss * torch.logsumexp(within, 1) ** 2).sum()
    return Loss(cross_entropy + z, cross_entropy.detach(), z.detach())


class _GatherVocabulary(torch.autograd.Function):
    """Concatenates the slices of all ranks; every rank computes the same loss, so backward just takes its slice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_ranks(logits, group).movedim(0, 1).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)].contiguous(), None


class _SumGradient(torch.autograd.Function):
    """Identity; sums the gradient over the ranks, each of which has it for its vocabulary slice only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


# --- vocab_parallel ----------------------------------------------------------------------------------------------


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor, terms: _Terms
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics = upcast(logits.new_empty(2, len(logits)))
        for rows in _blocks(len(logits), terms.chunk):
            statistics[:, rows] = _statistics(logits[rows], labels[rows], terms)
        ctx.terms = terms
        ctx.save_for_backward(logits, labels, weights, statistics[0])
        parts = _parts(statistics, weights, terms)
        ctx.mark_non_differentiable(*parts[1:])
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, weights, log_sum = ctx.saved_tensors
        terms: _Terms = ctx.terms
        gradient = torch.empty_like(logits)
        for rows in _blocks(len(logits), terms.chunk):
            gradient[rows] = _fast(logit_gradient, logits)(
                logits[rows], labels[rows], log_sum[rows], weights[rows] * scale, terms.z_loss, terms.softcap
            )
        return gradient, None, None, None


# --- chunked and fused_linear ------------------------------------------------------------------------------------


class _HeadGradients:
    """Gradients of hidden states, weight and bias, accumulated block by block; None where not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(_empty_fp32(weight)) if needed[1] else None
        self.bias = torch.zeros_like(_empty_fp32(bias)) if bias is not None and needed[2] else None

    def add(self, rows: slice, logit_gradient: Tensor, hidden: Tensor, weight: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(logit_gradient, weight, out=self.hidden[rows])
        if self.weight is not None:
            _add_product(self.weight, logit_gradient.t(), hidden)
        if self.bias is not None:
            self.bias += logit_gradient.sum(0, dtype=self.bias.dtype)

    @property
    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden, self.weight, self.bias


def _empty_fp32(like: Tensor) -> Tensor:
    return torch.empty_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the total without rounding the product to the inputs' dtype first."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif is_dry(right):  # same product and memory: older torch has no shape function for the next line
        total.view(right.dtype)[:, : total.shape[1]].addmm_(left, right)
    elif on_gpu(right):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor, terms: _Terms
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics = upcast(hidden.new_empty(2, len(hidden)))
        for rows in _blocks(len(hidden), terms.chunk):
            statistics[:, rows] = _statistics(F.linear(hidden[rows], weight, bias), labels[rows], terms)
        ctx.terms = terms
        ctx.save_for_backward(hidden, weight, bias, labels, weights, statistics[0])
        parts = _parts(statistics, weights, terms)
        ctx.mark_non_differentiable(*parts[1:])
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, weights, log_sum = ctx.saved_tensors
        terms: _Terms = ctx.terms
        gradients = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in _blocks(len(hidden), terms.chunk):
            logits = F.linear(hidden[rows], weight, bias)
            by_logits = _fast(logit_gradient, logits)(
                logits, labels[rows], log_sum[rows], weights[rows] * scale, terms.z_loss, terms.softcap
            )
            gradients.add(rows, by_logits, hidden[rows], weight)
        narrow = (None if one is None else one.to(hidden.dtype) for one in gradients.all)
        return *narrow, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # Converted to fp32 first: torch would round the factor to the gradient's dtype.
    return (upcast(gradient) * factor).to(dtype)


def _statistics_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor, terms: _Terms) -> tuple[Tensor, Tensor]:
    """Return statistics and gradient; on a GPU without tp, the gradient overwrites the logits."""
    if terms.group is None and on_gpu(logits):
        return logits_to_gradient_(logits, labels, weights, terms.z_loss, terms.softcap), logits
    statistics = _statistics(logits, labels, terms)
    gradient = _fast(logit_gradient, logits)(logits, labels, statistics[0], weights, terms.z_loss, terms.softcap)
    return statistics, gradient


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor, terms: _Terms
    ) -> tuple[Tensor, Tensor, Tensor]:
        # 1/tokens underflows in fp16 and the loss scale is not known yet: the largest weight is factored out.
        unit = weights.abs().amax().clamp(min=torch.finfo(weights.dtype).tiny) if len(weights) else weights.new_ones(())
        statistics = upcast(hidden.new_empty(2, len(hidden)))
        gradients = _HeadGradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in _blocks(len(hidden), terms.chunk):
            logits = F.linear(hidden[rows], weight, bias)
            share = weights[rows] / unit
            statistics[:, rows], by_logits = _statistics_and_gradient(logits, labels[rows], share, terms)
            gradients.add(rows, by_logits, hidden[rows], weight)
        ctx.save_for_backward(unit, *gradients.all)
        ctx.dtype = hidden.dtype
        parts = _parts(statistics, weights, terms)
        ctx.mark_non_differentiable(*parts[1:])
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        unit, *gradients = ctx.saved_tensors
        factor = scale * unit
        scaled = (None if one is None else _fast(_scaled, one)(one, factor, ctx.dtype) for one in gradients)
        return *scaled, None, None, None

"""Router balancing losses: their gradient is added to the backward pass without changing the main loss.

A rank computes the part of its own tokens; the sum over the ranks with shards of the same sequences is the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.errors import InputError

Kind = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "bias", "none"]
LOSSES: tuple[Kind, ...] = ("aux_loss", "seq_aux_loss", "global_aux_loss")  # balancing by bias has no loss


@dataclass(frozen=True)
class Balancing:
    """Balancing settings of a layer's router."""

    kind: Kind
    experts: int
    topk: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    aux_loss: float = 0.0  # weight of the balancing loss
    router_z_loss: float = 0.0  # weight of the mean squared log-sum-exp of the logits
    samples: int = 1  # sequences in a micro batch
    group: dist.ProcessGroup | None = None  # ranks with shards of the same sequences: cp and, with sp, tp
    dp_group: dist.ProcessGroup | None = None  # ranks with other sequences, counted by global_aux_loss
    router_in_fp32: bool = True

    @property
    def has_aux_loss(self) -> bool:
        return self.kind in LOSSES and self.aux_loss > 0

    @property
    def has_loss(self) -> bool:
        return self.has_aux_loss or self.router_z_loss > 0


@dataclass(frozen=True)
class RouterMetrics:
    """Router metrics of a micro batch: this rank's contribution to each loss, and statistics of its own tokens."""

    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    counts: torch.Tensor  # [E]: pairs sent to each expert
    entropy: torch.Tensor  # summed over tokens

    @property
    def loss(self) -> torch.Tensor:
        return self.aux_loss + self.z_loss


def router_metrics(
    logits: torch.Tensor, indices: torch.Tensor, settings: Balancing, token_mask: torch.Tensor | None = None
) -> RouterMetrics:
    """Return losses and statistics of a micro batch from the router's logits [T, E] and choices [T, K].

    The losses leave out tokens outside `token_mask` [T] (padding); the statistics count all tokens that are computed.
    """
    samples = settings.samples if settings.kind == "seq_aux_loss" else 1
    logits = _by_sequence(logits.float(), samples, settings.experts)
    probabilities = normalized_scores(logits, settings.score)
    entropy = torch.special.entr(probabilities.detach()).sum()
    counts = _count(indices, samples, settings.experts)
    zero = logits.new_zeros(())
    aux, z = zero, zero
    if settings.has_loss:
        in_loss, mask = counts, None
        if token_mask is not None:
            mask = token_mask.reshape(logits.shape[:-1])
            in_loss = _count(indices, samples, settings.experts, mask)
            probabilities = probabilities * mask[..., None]
        group_counts = _all_reduced(in_loss, settings.group)
        tokens = (group_counts.sum(-1, keepdim=True) / settings.topk).clamp_min(1)  # [samples, 1], over the group
        if settings.has_aux_loss:
            aux = settings.aux_loss * _aux_loss(probabilities, group_counts, tokens, settings)
        if settings.router_z_loss > 0:
            squares = logits.logsumexp(-1).square()
            z = settings.router_z_loss * (squares if mask is None else squares * mask).sum() / tokens.sum()
    return RouterMetrics(aux, z, counts.sum(0), entropy)


def normalized_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Return probabilities over all experts: a softmax, or sigmoids divided by their sum."""
    if score == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)


def _aux_loss(
    probabilities: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor, settings: Balancing
) -> torch.Tensor:
    """Return E · Σ f·P: 1 under perfect balance. f is an expert's fraction of pairs, P its mean probability."""
    if settings.kind == "global_aux_loss":
        counts = _all_reduced(counts, settings.dp_group)
    fraction = counts / counts.sum(-1, keepdim=True).clamp_min(1)
    mean_probability = probabilities.sum(1) / tokens  # sum over this rank's tokens, divided by the group's
    return settings.experts * (fraction * mean_probability).sum(-1).mean()


def _by_sequence(logits: torch.Tensor, samples: int, experts: int) -> torch.Tensor:
    rows = logits.reshape(-1, experts)
    if rows.shape[0] % samples:
        reason = f"the router got {rows.shape[0]} tokens, which are not {samples} sequences of equal length"
        raise InputError(reason, field="micro_batch", value=samples, fix=("moe.balancing=aux_loss",))
    return rows.view(samples, rows.shape[0] // samples, experts)


def _count(indices: torch.Tensor, samples: int, experts: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the pairs of each sequence and expert [samples, E], without tokens outside the mask [samples, tokens]."""
    chosen = indices.detach().reshape(samples, indices.numel() // samples)
    pairs = torch.ones_like(chosen)
    if mask is not None:
        pairs = mask.to(chosen.dtype).repeat_interleave(chosen.shape[1] // mask.shape[1], 1)
    return chosen.new_zeros((samples, experts)).scatter_add_(1, chosen, pairs)


def _all_reduced(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None:
        return counts
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    return counts

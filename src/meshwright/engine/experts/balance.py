"""Losses that keep the experts' loads even: their gradient joins the step without touching the main loss.

A rank adds the share of its own tokens: the sum over the ranks that hold parts of the same sequences is the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.errors import InputError

Kind = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "bias", "none"]
LOSSES: tuple[Kind, ...] = ("aux_loss", "seq_aux_loss", "global_aux_loss")  # a bias balances without a loss


@dataclass(frozen=True)
class Balancing:
    """How a layer's router is kept balanced."""

    kind: Kind
    experts: int
    topk: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    aux_loss: float = 0.0  # weight of the balancing loss
    router_z_loss: float = 0.0  # weight of the mean squared log of the softmax's denominator
    samples: int = 1  # sequences in a micro batch
    group: dist.ProcessGroup | None = None  # ranks with parts of the same sequences: cp and, with sp, tp
    dp_group: dist.ProcessGroup | None = None  # ranks with other sequences: global_aux_loss counts theirs too
    router_in_fp32: bool = True

    @property
    def has_aux_loss(self) -> bool:
        return self.kind in LOSSES and self.aux_loss > 0

    @property
    def has_loss(self) -> bool:
        return self.has_aux_loss or self.router_z_loss > 0


@dataclass(frozen=True)
class RouterMetrics:
    """What one micro batch says about a router: this rank's share of each loss, and its own tokens' figures."""

    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    counts: torch.Tensor  # [E]: pairs sent to each expert
    entropy: torch.Tensor  # summed over tokens

    @property
    def loss(self) -> torch.Tensor:
        return self.aux_loss + self.z_loss


def router_metrics(logits: torch.Tensor, indices: torch.Tensor, settings: Balancing) -> RouterMetrics:
    """The losses and figures of a micro batch, from the router's logits [T, E] and its choices [T, K]."""
    samples = settings.samples if settings.kind == "seq_aux_loss" else 1
    logits = _by_sequence(logits.float(), samples, settings.experts)
    probabilities = normalized_scores(logits, settings.score)
    counts = _count(indices, samples, settings.experts)
    none = logits.new_zeros(())
    aux, z = none, none
    if settings.has_loss:
        together = _summed(counts, settings.group)
        tokens = (together.sum(-1, keepdim=True) / settings.topk).clamp_min(1)  # [samples, 1], over the group
        if settings.has_aux_loss:
            aux = settings.aux_loss * _aux_loss(probabilities, together, tokens, settings)
        if settings.router_z_loss > 0:
            z = settings.router_z_loss * logits.logsumexp(-1).square().sum() / tokens.sum()
    entropy = torch.special.entr(probabilities.detach()).sum()
    return RouterMetrics(aux, z, counts.sum(0), entropy)


def normalized_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Probabilities over all experts: a softmax, or sigmoids divided by their sum."""
    if score == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)


def _aux_loss(
    probabilities: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor, settings: Balancing
) -> torch.Tensor:
    """E · Σ f·P: 1 under perfect balance. f is the fraction of pairs an expert got, P its mean probability."""
    if settings.kind == "global_aux_loss":
        counts = _summed(counts, settings.dp_group)
    fraction = counts / counts.sum(-1, keepdim=True).clamp_min(1)
    mean_probability = probabilities.sum(1) / tokens  # this rank's tokens over the group's number
    return settings.experts * (fraction * mean_probability).sum(-1).mean()


def _by_sequence(logits: torch.Tensor, samples: int, experts: int) -> torch.Tensor:
    rows = logits.reshape(-1, experts)
    if rows.shape[0] % samples:
        reason = f"the router saw {rows.shape[0]} tokens, which are not {samples} sequences of one length"
        raise InputError(reason, field="micro_batch", value=samples, fix=("moe.balancing=aux_loss",))
    return rows.view(samples, rows.shape[0] // samples, experts)


def _count(indices: torch.Tensor, samples: int, experts: int) -> torch.Tensor:
    chosen = indices.detach().reshape(samples, indices.numel() // samples)
    return chosen.new_zeros((samples, experts)).scatter_add_(1, chosen, torch.ones_like(chosen))


def _summed(counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is None:
        return counts
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    return counts

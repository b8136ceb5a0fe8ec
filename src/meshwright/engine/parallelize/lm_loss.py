"""The language-model head computes the loss: logits never leave it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.engine.collectives import gather
from meshwright.engine.losses import Loss, TokenLoss, head_loss
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.stage import Stage
from meshwright.engine.parallelize.output_recompute import OutputNotes
from meshwright.engine.parallelize.recompute import regathers_in_backward
from meshwright.engine.parallelize.tensor_parallel import TOKENS, shard_parameter
from meshwright.engine.patching import Patch, apply
from meshwright.recipes.types import Recipe


def apply_lm_loss(stage: Stage, mesh: Mesh, recipe: Recipe, loss: TokenLoss | None = None) -> None:
    """Patch the last stage's head to take hidden states, labels and loss weights and to return the loss.

    With `loss`, that function of logits and labels takes the place of the cross entropy. The same three inputs of
    multi-token prediction may follow; their loss is added with its own factor.
    """
    tp, sp = mesh.tp, recipe.layout.sp
    if tp.size > 1:
        _shard_vocabulary(stage, mesh)
    config: Any = stage.body.config
    settings: dict[str, Any] = {
        "method": recipe.kernels.loss,
        "softcap": getattr(config, "final_logit_softcapping", None),
        "group": tp.group,
        "reduce_hidden": not sp,  # the backward pass of the gather sums already
        "function": loss,
    }
    gather_tokens = partial(gather, axis=tp) if sp and tp.size > 1 else None
    again = regathers_in_backward(recipe.layout)
    stage.lm_head.loss = LossSettings(
        settings, recipe.train.z_loss, recipe.train.mtp_loss, gather_tokens, again, stage.losses
    )
    apply(stage.lm_head, LmLoss)


@dataclass(frozen=True)
class LossSettings:
    """How the head computes the loss of a micro batch."""

    head: dict[str, Any]  # arguments of `head_loss`
    z_loss: float
    mtp_loss: float
    gather_tokens: Callable[..., torch.Tensor] | None  # with sequence parallelism
    gathers_again: bool  # in the backward pass, so that only this rank's tokens are saved
    losses: list[torch.Tensor]  # the stage's log


class LmLoss(Patch):
    """A language-model head that returns the loss instead of logits."""

    tag = "Loss"

    def forward(
        self: Any, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, *mtp: torch.Tensor
    ) -> torch.Tensor:
        settings: LossSettings = self.loss
        if not mtp:
            return loss_of_head(self, hidden, labels, weights)
        main = _loss(self, settings.z_loss, hidden, labels, weights)
        second = _loss(self, 0.0, *mtp)
        settings.losses.append(torch.stack([main.cross_entropy, main.z, second.cross_entropy]))
        return main.total + settings.mtp_loss * second.total


def loss_of_head(head: Any, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the loss of a head with loss settings and add its parts to the log."""
    main = _loss(head, head.loss.z_loss, hidden, labels, weights)
    head.loss.losses.append(torch.stack([main.cross_entropy, main.z, torch.zeros_like(main.z)]))
    return main.total


def _loss(head: Any, z_loss: float, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> Loss:
    settings: LossSettings = head.loss
    if settings.gather_tokens is None:
        return _local_loss(head, z_loss, hidden, labels, weights)
    gather_tokens = partial(settings.gather_tokens, dim=hidden.dim() + TOKENS)
    if not settings.gathers_again:
        return _local_loss(head, z_loss, gather_tokens(hidden), labels, weights)
    notes = OutputNotes()
    with notes.hooks():
        return _local_loss(head, z_loss, notes.gathered(gather_tokens, hidden), labels, weights)


def _local_loss(head: Any, z_loss: float, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> Loss:
    weight, bias = _local(head.weight), _local(head.bias)
    arguments = (hidden.flatten(0, 1), weight, bias, labels.flatten(), weights.flatten())
    return head_loss(*arguments, z_loss=z_loss, **head.loss.head)


def _shard_vocabulary(stage: Stage, mesh: Mesh) -> None:
    head = stage.lm_head
    if stage.first and getattr(stage.body.config, "tie_word_embeddings", False):
        head.weight = stage.embedding.weight  # already sharded, with the embedding
    else:
        shard_parameter(head, "weight", mesh.state["tp"], 0)
    if head.bias is not None:
        shard_parameter(head, "bias", mesh.state["tp"], 0)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

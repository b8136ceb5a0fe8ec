"""The head of the model turned into the loss: logits are never handed around, only what the loss needs of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.engine.collectives import gather
from meshwright.engine.losses import Loss, head_loss
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.stage import Stage
from meshwright.engine.parallelize.output_recompute import Notes
from meshwright.engine.parallelize.recompute import gathers_again
from meshwright.engine.parallelize.tensor import TOKENS, cut_parameter
from meshwright.recipes.types import Recipe


def make_loss(stage: Stage, mesh: Mesh, recipe: Recipe) -> None:
    """Makes the last stage's head take labels and weights and return the loss of its micro batch.

    Behind them it takes the same three things of multi-token prediction, whose loss is added with its own weight.
    """
    head, tp, sp = stage.lm_head, mesh.tp, recipe.layout.sp
    if tp.size > 1:
        _cut_vocabulary(stage, mesh)
    config: Any = stage.body.config
    settings: dict[str, Any] = {
        "kind": recipe.kernels.loss,
        "softcap": getattr(config, "final_logit_softcapping", None),
        "group": tp.group,
        "reduce_hidden": not sp,  # the gather below sums already
    }

    def loss_of(z_loss: float, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> Loss:
        weight, bias = _local(head.weight), _local(head.bias)
        tokens = hidden.flatten(0, 1)
        return head_loss(tokens, weight, bias, labels.flatten(), weights.flatten(), z_loss=z_loss, **settings)

    def loss_of_all(z_loss: float, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> Loss:
        whole = partial(gather, axis=tp, dim=hidden.dim() + TOKENS)
        if not gathers_again(recipe.layout):
            return loss_of(z_loss, whole(hidden), labels, weights)
        notes = Notes()
        with notes.hooks():
            return loss_of(z_loss, notes.gathered(whole, hidden), labels, weights)

    loss = loss_of_all if sp and tp.size > 1 else loss_of

    def forward(
        hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, *further: torch.Tensor
    ) -> torch.Tensor:
        main = loss(recipe.train.z_loss, hidden, labels, weights)
        if not further:
            stage.losses.append(torch.stack([main.cross_entropy, main.z, torch.zeros_like(main.z)]))
            return main.total
        second = loss(0.0, *further)
        stage.losses.append(torch.stack([main.cross_entropy, main.z, second.cross_entropy]))
        return main.total + recipe.train.mtp_loss * second.total

    head.forward = forward


def _cut_vocabulary(stage: Stage, mesh: Mesh) -> None:
    head = stage.lm_head
    if stage.first and getattr(stage.body.config, "tie_word_embeddings", False):
        head.weight = stage.embedding.weight  # cut already, with the embedding
    else:
        cut_parameter(head, "weight", mesh.state["tp"], 0)
    if head.bias is not None:
        cut_parameter(head, "bias", mesh.state["tp"], 0)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

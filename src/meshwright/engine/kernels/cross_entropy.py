"""Cross entropy that overwrites the logits with their gradient: no second tensor of their size is allocated."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.engine.kernels.device_caps import launch, on_gpu

# Columns per pass of a program. On an H200 every choice between 2048 and 32768 takes 0.8 ms for 4096 rows of 128256.
BLOCK, WARPS = 16384, 32


def logits_to_gradient_(
    logits: Tensor, labels: Tensor, weights: Tensor, z_loss: float = 0.0, softcap: float | None = None
) -> Tensor:
    """Overwrite logits [tokens, vocabulary] with the gradient of the loss; return log-sum-exp and target logit.

    The loss is the sum of weights * (log_sum - target + z_loss * log_sum²). A label outside the vocabulary (of another
    rank's shard) has target zero; only the softmax term contributes to its gradient.
    """
    if on_gpu(logits):
        return _on_gpu(logits, labels, weights, z_loss, softcap)
    statistics = slice_statistics(logits, labels, softcap)
    logits.copy_(logit_gradient(logits, labels, statistics[0], weights, z_loss, softcap))
    return statistics


def _on_gpu(logits: Tensor, labels: Tensor, weights: Tensor, z_loss: float, softcap: float | None) -> Tensor:
    rows, columns = logits.shape
    statistics = torch.empty(2, rows, device=logits.device, dtype=torch.float32)
    launch(
        "logits_to_gradient", (rows,),
        logits, labels, weights, statistics, rows, columns, logits.stride(0), z_loss, softcap or 1.0,
        CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return statistics


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor in fp32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits in fp32, soft-capped to ±softcap if it is set."""
    return upcast(logits) if softcap is None else softcap * torch.tanh(upcast(logits) / softcap)


def slice_statistics(logits: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    """Return the log-sum-exp of a vocabulary shard, and the label's logit if the shard has it, as [2, n]."""
    within = capped(logits, softcap)
    columns = logits.shape[1]
    inside = (labels >= 0) & (labels < columns)
    target = within.gather(1, labels.clamp(0, columns - 1)[:, None])[:, 0]
    return torch.stack([torch.logsumexp(within, 1), torch.where(inside, target, 0.0)])


def logit_gradient(
    logits: Tensor, labels: Tensor, log_sum: Tensor, weights: Tensor, z_loss: float, softcap: float | None
) -> Tensor:
    """Return the gradient of the weighted loss with respect to the raw logits, in their dtype."""
    within = capped(logits, softcap)
    slope = weights * (1 + 2 * z_loss * log_sum)
    gradient = torch.exp(within - log_sum[:, None]) * slope[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.where(columns == labels[:, None], gradient - weights[:, None], gradient)
    if softcap is not None:
        gradient = gradient * (1 - (within / softcap) ** 2)
    return gradient.to(logits.dtype)

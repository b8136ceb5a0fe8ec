"""Cross entropy whose logits become their own gradient: nothing of their size is made beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.engine.kernels._where import on_gpu

# Columns per pass of a program. On an H200 every choice between 2048 and 32768 takes 0.8 ms for 4096 rows of 128256.
BLOCK, WARPS = 16384, 32


def logits_to_gradient_(
    logits: Tensor, labels: Tensor, weights: Tensor, z_loss: float = 0.0, softcap: float | None = None
) -> Tensor:
    """Turns logits [tokens, vocabulary] into the gradient of the weighted loss; gives log-sum-exp and target logit.

    The loss is the sum of weights * (log_sum - target + z_loss * log_sum²); a label outside the vocabulary has target
    zero and no share in the gradient but the softmax's.
    """
    if on_gpu(logits):
        return _on_gpu(logits, labels, weights, z_loss, softcap)
    statistics = _statistics(logits, labels, softcap)
    logits.copy_(_gradient(logits, labels, weights, statistics[0], z_loss, softcap))
    return statistics


def _on_gpu(logits: Tensor, labels: Tensor, weights: Tensor, z_loss: float, softcap: float | None) -> Tensor:
    from meshwright.engine.kernels import _triton

    rows, columns = logits.shape
    statistics = torch.empty(2, rows, device=logits.device, dtype=torch.float32)
    _triton.logits_to_gradient[(rows,)](
        logits, labels, weights, statistics, rows, columns, logits.stride(0), z_loss, softcap or 1.0,
        CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return statistics


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    wide = logits.float()
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def _statistics(logits: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    capped = _capped(logits, softcap)
    columns = logits.shape[1]
    held = (labels >= 0) & (labels < columns)
    target = capped.gather(1, labels.clamp(0, columns - 1)[:, None])[:, 0]
    return torch.stack([torch.logsumexp(capped, 1), torch.where(held, target, 0.0)])


def _gradient(
    logits: Tensor, labels: Tensor, weights: Tensor, log_sum: Tensor, z_loss: float, softcap: float | None
) -> Tensor:
    capped = _capped(logits, softcap)
    slope = weights * (1 + 2 * z_loss * log_sum)
    gradient = torch.exp(capped - log_sum[:, None]) * slope[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.where(columns == labels[:, None], gradient - weights[:, None], gradient)
    return gradient if softcap is None else gradient * (1 - (capped / softcap) ** 2)

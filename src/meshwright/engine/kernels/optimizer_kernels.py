"""Optimizer-step kernels: once per step over every parameter, in as few passes over memory as possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.engine.kernels.device_caps import launch, on_gpu

BLOCK = 4096
WARPS = 8
CHUNK = 8192  # elements per program, all loaded at once


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, in fp32, as a tensor on their device."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros(())
    if not on_gpu(filled[0]):
        return torch.stack([tensor.float().square().sum() for tensor in filled]).sum()
    counts = [(tensor.numel() + CHUNK - 1) // CHUNK for tensor in filled]
    partial = torch.empty(sum(counts), device=filled[0].device, dtype=torch.float32)
    for tensor, place in zip(filled, torch.split(partial, counts), strict=True):
        grid = (len(place),)
        launch("sum_of_squares", grid, tensor, place, tensor.numel(), CHUNK=CHUNK, BLOCK=CHUNK, num_warps=WARPS)
    return partial.sum()


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    factor: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Apply one AdamW update in place; the gradient is multiplied by a factor on the GPU, such as that of clipping.

    The four tensors are contiguous, in any dtypes; arithmetic is fp32. On an H200 3.9 TB/s, 1.35 times torch's fused
    AdamW, without its separate pass for clipping.
    """
    beta1, beta2 = betas
    step_size = lr / (1 - beta1**step)
    root_correction = (1 - beta2**step) ** -0.5
    keep = 1 - lr * weight_decay
    if not on_gpu(parameter):
        _adamw_(parameter, gradient.float() * factor, average, square, step_size, keep, betas, root_correction, eps)
        return
    count = parameter.numel()
    launch(
        "adamw", ((count + BLOCK - 1) // BLOCK,), parameter, gradient, average, square, factor, count,
        step_size, keep, beta1, beta2, 1 - beta1, 1 - beta2, root_correction, eps,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _adamw_(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    step_size: float,
    keep: float,
    betas: tuple[float, float],
    root_correction: float,
    eps: float,
) -> None:
    beta1, beta2 = betas
    m = average.float() * beta1 + gradient * (1 - beta1)
    v = square.float() * beta2 + gradient.square() * (1 - beta2)
    parameter.copy_(parameter.float() * keep - step_size * m / (v.sqrt() * root_correction + eps))
    average.copy_(m)
    square.copy_(v)


def scale_unless_one_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place by a factor on the GPU; does not touch the tensor if it is one."""
    if not on_gpu(tensor):
        return tensor.mul_(factor)
    count = tensor.numel()
    grid = ((count + BLOCK - 1) // BLOCK,)
    launch("scale_unless_one", grid, tensor, factor, count, BLOCK=BLOCK, num_warps=WARPS)
    return tensor

"""Where a tensor lies."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor's data lies on a CUDA GPU: a dry run's tensors have none, and own kernels cannot follow them."""
    return type(tensor) in (Tensor, Parameter) and tensor.is_cuda

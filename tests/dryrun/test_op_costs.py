"""FLOPs of single operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright
from meshwright.dryrun.op_costs import counts_flops, flops_of
from meshwright.dryrun.stack_origin import HIDDEN, PARTS_BY_FILE


class FlopCounter(TorchDispatchMode):
    """Sums the FLOPs of everything that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if counts_flops(func):
            name = func._overloadpacket.__name__
            self.flops[name] = self.flops.get(name, 0) + flops_of(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize(("groups", "channels"), [(8, 1), (2, 4), (1, 8)])
def test_convolution_flops_respect_groups(groups: int, channels: int) -> None:
    x, weight = torch.randn(2, 8, 10, requires_grad=True), torch.randn(8, channels, 4, requires_grad=True)
    with FlopCounter() as counter:
        functional.conv1d(x, weight, groups=groups).sum().backward()
    forward = 2 * (2 * 8 * 7) * channels * 4
    assert counter.flops == {"convolution": forward, "convolution_backward": 2 * forward}


def test_gradients_that_are_not_required_are_not_counted() -> None:
    x, weight = torch.randn(2, 8, 10), torch.randn(8, 1, 4, requires_grad=True)
    with FlopCounter() as counter:
        functional.conv1d(x, weight, groups=8).sum().backward()
    assert counter.flops["convolution_backward"] == counter.flops["convolution"]


@pytest.mark.parametrize("path", [*(path for path, _ in PARTS_BY_FILE), *HIDDEN])
def test_paths_that_classify_allocations_exist(path: str) -> None:
    if path.startswith("meshwright/"):
        assert (Path(meshwright.__file__).parents[1] / path).exists()

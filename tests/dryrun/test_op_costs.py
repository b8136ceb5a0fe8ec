"""What is counted of single operations: floating-point operations of products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.dryrun.op_costs import counts_flops, flops_of


class Counted(TorchDispatchMode):
    """Adds up what is counted of everything that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if counts_flops(func):
            name = func._overloadpacket.__name__
            self.flops[name] = self.flops.get(name, 0) + flops_of(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize(("groups", "seen"), [(8, 1), (2, 4), (1, 8)])
def test_channels_of_a_convolution_see_their_own_group_alone(groups: int, seen: int) -> None:
    x, weight = torch.randn(2, 8, 10, requires_grad=True), torch.randn(8, seen, 4, requires_grad=True)
    with Counted() as counted:
        functional.conv1d(x, weight, groups=groups).sum().backward()
    forward = 2 * (2 * 8 * 7) * seen * 4
    assert counted.flops == {"convolution": forward, "convolution_backward": 2 * forward}


def test_a_gradient_that_nobody_asks_for_is_not_counted() -> None:
    x, weight = torch.randn(2, 8, 10), torch.randn(8, 1, 4, requires_grad=True)
    with Counted() as counted:
        functional.conv1d(x, weight, groups=8).sum().backward()
    assert counted.flops["convolution_backward"] == counted.flops["convolution"]

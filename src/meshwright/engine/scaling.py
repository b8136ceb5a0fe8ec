"""The loss scale of fp16 training: as large as the gradients allow, agreed by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.engine.kernels.device_caps import DRY, has_data

START = 2.0**16
FACTOR = 2.0
SMALLEST = 2.0**-14  # below it a loss is broken, not badly scaled


class LossScale:
    """Multiplies the loss so that fp16 gradients do not vanish; halves when they overflow, doubles after good steps."""

    def __init__(self, good_steps: int = 2000, start: float = START) -> None:
        self.value = start
        self.good_steps = good_steps
        self._good = 0

    def unscale(self, gradients: Iterable[Tensor]) -> bool:
        """Divides the gradients by the scale in place; whether all of them are finite on every rank.

        The division needs no clean gradients: when the answer is no, the step is skipped.
        """
        local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        bad = self._overflows(local)
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return not has_data(bad) or not bool(bad.item())  # a dry run has no bad steps

    def update(self, finite: bool) -> None:
        """Takes note of a step; call it once for every `unscale`."""
        if not finite:
            self.value, self._good = max(self.value / FACTOR, SMALLEST), 0
            return
        self._good += 1
        if self._good == self.good_steps:
            self.value, self._good = self.value * FACTOR, 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must remember."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from a checkpoint."""
        self.value, self._good = float(state["value"]), int(state["good"])

    def _overflows(self, gradients: list[Tensor]) -> Tensor:
        # Ranks without a gradient take part in the all-reduce too, on the device the others use.
        device = gradients[0].device if gradients else _collective_device()
        bad = torch.zeros((), device=device)
        inverse = torch.full((), 1 / self.value, device=device)
        if gradients and has_data(gradients[0]):  # in place: nothing comes into being
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, bad, inverse)
        return bad.to(_collective_device()) if dist.is_initialized() else bad


def _collective_device() -> torch.device:
    backend = dist.get_backend() if dist.is_initialized() else ""
    if "fake" in backend:
        return torch.device(DRY)
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

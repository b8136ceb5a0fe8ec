"""Dynamic loss scaling for fp16 training, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.engine.kernels.device_caps import DRY, has_data

START = 2.0**16
FACTOR = 2.0
SMALLEST = 2.0**-14  # a loss that overflows even here is broken, not badly scaled


class LossScale:
    """Scales the loss so that fp16 gradients do not underflow; halves on overflow, doubles after `good_steps`."""

    def __init__(self, good_steps: int = 2000, start: float = START) -> None:
        self.value = start
        self.good_steps = good_steps
        self._good = 0

    def unscale(self, gradients: Iterable[Tensor]) -> bool:
        """Divide the gradients by the scale in place; return whether all of them are finite on every rank.

        Non-finite gradients are divided too: the step is skipped then.
        """
        local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        bad = self._overflows(local)
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return not has_data(bad) or not bool(bad.item())  # gradients of a dry run have no values

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step; call it once per `unscale`."""
        if not finite:
            self.value, self._good = max(self.value / FACTOR, SMALLEST), 0
            return
        self._good += 1
        if self._good == self.good_steps:
            self.value, self._good = self.value * FACTOR, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.value, self._good = float(state["value"]), int(state["good"])

    def _overflows(self, gradients: list[Tensor]) -> Tensor:
        # Ranks without gradients take part in the all-reduce too, on the device of the others.
        device = gradients[0].device if gradients else _collective_device()
        bad = torch.zeros((), device=device)
        inverse = torch.full((), 1 / self.value, device=device)
        if gradients and has_data(gradients[0]):  # in place: a dry run has nothing to record
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, bad, inverse)
        return bad.to(_collective_device()) if dist.is_initialized() else bad


def _collective_device() -> torch.device:
    backend = dist.get_backend() if dist.is_initialized() else ""
    if "fake" in backend:
        return torch.device(DRY)
    on_gpu = "nccl" in backend or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # gloo: ranks that share a GPU, or on CPUs
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

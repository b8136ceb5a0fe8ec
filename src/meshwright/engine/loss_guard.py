"""Stops or skips steps whose loss or gradient norm is not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.engine.faults import RunError
from meshwright.engine.metrics.jsonl import Lines, json_float, warn
from meshwright.engine.run_spec import NanPolicy
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    import torch

LAG = 2  # steps after which unread values are read, so that reading them does not make the CPU wait for the GPU


class LossGuard:
    """Keeps a loss or gradient norm that is not finite away from the weights; the same decision on all ranks.

    `stop` ends the run; `skip` skips the step, and ends the run after more than `limit` consecutive bad steps.
    Either way the sample numbers are recorded in `bad_batches.jsonl`. `suspects` are overrides that may help: settings
    of the run that can be the cause. Without `kept` the folder is temporary.
    """

    def __init__(
        self,
        policy: NanPolicy,
        limit: int,
        folder: Path,
        device: torch.device,
        suspects: Sequence[str] = (),
        kept: bool = True,
    ) -> None:
        if policy not in ("stop", "skip"):
            raise InputError("must be stop or skip", field="--on-nan", value=policy, fix=("stop", "skip"))
        if limit < 1:
            raise InputError("must be at least 1", field="limit of skipped steps", value=limit)
        self.policy, self.limit, self.path = policy, limit, Path(folder) / "bad_batches.jsonl"
        self.skipped_in_a_row = 0
        self.suspects, self.kept = tuple(suspects), kept
        self._device = device
        self._unread: deque[tuple[int, torch.Tensor, torch.cuda.Event, list[int]]] = deque()

    def allows(
        self, step: int, loss: torch.Tensor | float, grad_norm: torch.Tensor | float, samples: Sequence[int] = ()
    ) -> bool:
        """Whether the optimizer may take this step; a collective with the same result on every rank."""
        if not self._any_rank_is_bad(loss, grad_norm):
            self.skipped_in_a_row = 0
            return True
        bad = self._record(step, float(_local(loss)), float(_local(grad_norm)), samples)
        self.skipped_in_a_row += 1
        if self.policy == "skip" and self.skipped_in_a_row <= self.limit:
            return False
        raise self._stopped(step, bad)

    def allows_unread(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, samples: Sequence[int]) -> bool:
        """Take the step at once on a GPU and read its values LAG steps later, so that the CPU does not wait for it.

        Loss and gradient norm are the same on every rank, so every rank stops in the same step.
        """
        import torch

        if self._device.type != "cuda":
            return self.allows(step, loss, grad_norm, samples)
        values = torch.stack([_local(loss).float().reshape(()), _local(grad_norm).float().reshape(())])
        copy = torch.empty(2, pin_memory=True).copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._unread.append((step, copy, copied, [*samples]))
        if len(self._unread) > LAG:
            self._read_oldest()
        return True

    def read_all(self) -> None:
        """Check the steps that were not read yet; called after the last one."""
        while self._unread:
            self._read_oldest()

    def _read_oldest(self) -> None:
        step, values, copied, samples = self._unread.popleft()
        copied.synchronize()
        loss, norm = values.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._stopped(step, self._record(step, loss, norm, samples))

    def _any_rank_is_bad(self, *values: torch.Tensor | float) -> bool:
        import torch
        import torch.distributed as dist

        finite = [torch.as_tensor(_local(value), device=self._device).isfinite().all() for value in values]
        bad = (~torch.stack(finite).all()).to(torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad.item())

    def _record(self, step: int, loss: float, grad_norm: float, samples: Sequence[int]) -> list[dict[str, Any]]:
        """Record the batches of the bad ranks; return the lines on every rank."""
        from meshwright.engine.object_collectives import gathered, rank

        mine = {
            "step": step,
            "rank": rank(),
            "loss": json_float(loss),
            "grad_norm": json_float(grad_norm),
            "samples": [*samples],
        }
        bad = [line for line in gathered(mine) if isinstance(line["loss"], str) or isinstance(line["grad_norm"], str)]
        if rank() == 0:
            self._write(bad)
        return bad

    def _write(self, bad: list[dict[str, Any]]) -> None:
        try:
            file = Lines(self.path)
        except InputError as error:  # the run's outcome must not depend on this file
            warn(error.message)
            return
        for line in bad:
            file.write({**line, "policy": self.policy})
        file.close()

    def _stopped(self, step: int, bad: list[dict[str, Any]]) -> RunError:
        first = bad[0]
        what = "loss" if isinstance(first["loss"], str) else "gradient norm"
        value = first[what.replace("gradient ", "grad_")]
        skipped = f", after {self.limit} skipped steps in a row" if self.policy == "skip" else ""
        ranks = ", ".join(str(line["rank"]) for line in bad[:8]) + (" …" if len(bad) > 8 else "")
        where = f"; the batches are in {self.path}" if self.kept else ""
        return RunError(f"the {what} is {value} in step {step} on rank {ranks}{skipped}{where}", fix=self._fixes(step))

    def _fixes(self, step: int) -> tuple[str, ...]:
        # No update precedes the first step, so the learning rate is not its cause.
        rate = ("a lower optimizer.lr", "a longer schedule.warmup_steps") if step > 1 else ()
        samples = "inspect the recorded samples" if self.kept else "--out DIR to record its samples"
        return (*rate, *self.suspects, samples)


def _local(value: Any) -> Any:
    """Return this rank's shard of a tensor: if any shard is not finite, neither is the tensor."""
    if isinstance(value, float | int):
        return value
    plain = value.detach()
    return plain.to_local() if hasattr(plain, "to_local") else plain


def suspects(recipe: Recipe) -> tuple[str, ...]:
    """Return overrides that turn off what may compute wrongly in a run: low precision and compiled kernels."""
    found = []
    if recipe.precision.compute == "fp16":
        found.append("precision.compute=bf16")
    if recipe.precision.matmul != "same":
        found.append("precision.matmul=same")
    if recipe.kernels.compile:
        found.append("kernels.compile=false")
    return tuple(found)

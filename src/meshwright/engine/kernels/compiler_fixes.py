"""Corrections of torch's compiler, whose kernels computed wrong gradients without an error.

A kernel that reduces rows in a loop may store an intermediate tensor and read it back in a second loop. Triton may give
the store and the load different layouts, so that a thread reads what another one writes, and nothing makes it wait
(pytorch issue 190517, triton issue 10924). On an H200 with torch 2.11 that made gradients of Gemma 3's keys ten
thousand times too large; one more barrier before the second loop makes threads wait.

Sums over rows and over columns in one kernel ("mix-order reductions") leave some sums unwritten (pytorch issue 193061,
torch 2.10 to 2.13); the compiler writes two kernels without them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from meshwright.engine.patching import symbol

BARRIER = "tl.debug_barrier()"


@cache
def correct_compiler() -> None:
    """Let kernels for GPUs wait before they read back what they stored, and reduce in one order only."""
    if not torch.cuda.is_available():
        return
    settings = symbol("torch._inductor.config", "triton")
    if hasattr(settings, "mix_order_reduction"):
        settings.mix_order_reduction = False
    kernel = symbol("torch._inductor.codegen.triton", "TritonKernel")
    kernel.load = waiting(kernel.load)


def waiting(load: Any) -> Any:
    """Return the method that writes the code of a load, with a barrier before a loop that reads back a stored buffer.

    At that time the body ends with the loops before this one.
    """

    def load_after_barrier(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in self.cse.invalidated_stores:
            self.body.writeline(BARRIER)
        return load(self, name, *args, **kwargs)

    return load_after_barrier

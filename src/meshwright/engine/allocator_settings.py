"""Settings of torch's CUDA allocator in the engine's processes, and what they are for a dry run.

With expandable segments a pool is one address range that grows, so that free memory between tensors can be merged. They
are on unless the user has set the allocator. They conflict with CUDA graphs and buffers registered with NCCL, and the
engine uses neither. Measured on an H200, four layers of Llama 3 8B went from 1.39 to 1.29 times the allocated memory
(benchmarks/results/dryrun_h200_2026-11-15.json); figures of other models are simulated (simulated_reserved.json there).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads both; the first wins
EXPANDABLE = "expandable_segments:True"


def set_by_user(env: Mapping[str, str] = os.environ) -> str:
    """Return the user's allocator settings; empty if there are none."""
    return next((env[name] for name in VARIABLES if env.get(name)), "")


def is_expandable(amd: bool = False, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a process with this environment has expandable segments; ROCm's allocator has none."""
    given = set_by_user(env)
    return not amd and (EXPANDABLE.lower() in given.replace(" ", "").lower() if given else True)


def use_expandable_segments() -> None:
    """Turn expandable segments on unless the user has set the allocator; call it before memory is allocated."""
    import torch

    if not set_by_user() and is_expandable(amd=torch.version.hip is not None):
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # which some supported versions may lack
        (newer or torch.cuda.memory._set_allocator_settings)(EXPANDABLE)

# mypy: ignore-errors
"""A Triton kernel that waits for some nanoseconds of the GPU's clock."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import globaltimer


@triton.jit
def wait_ns(ns):
    """Wait for some nanoseconds."""
    start = globaltimer()
    now = start
    while now - start < ns:
        now = globaltimer()

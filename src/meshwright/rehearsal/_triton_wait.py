"""A Triton kernel that waits for some nanoseconds of the GPU's clock."""

from __future__ import annotations

import triton  # type: ignore[import-untyped,unused-ignore]
from triton.language.extra.cuda import globaltimer  # type: ignore[import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def wait_ns(ns):  # type: ignore[no-untyped-def]
    """Wait for some nanoseconds."""
    start = globaltimer()
    now = start
    while now - start < ns:
        now = globaltimer()

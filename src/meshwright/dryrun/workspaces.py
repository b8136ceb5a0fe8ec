"""Memory that no tensor of ours holds: what kernels need while they run, and what libraries keep for themselves.

Every figure was measured on an H200 with torch 2.11 (benchmarks/results/dryrun_h200_2026-11-15.json, `workspaces`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MIB = 1 << 20
HOPPER_BYTES = 32 * MIB  # what torch gives cuBLAS on Hopper and later, for every thread that multiplies
OLDER_BYTES = 8 * MIB + 128 * 1024
ROWS_BY_THREAD = 10  # of embedding's backward pass: so many rows end in one partial sum
FEW_ROWS = 3072  # below, it sums without partial sums


def transient(operation: Any, args: Any) -> int:
    """Bytes that an operation takes while it runs, beside what it is given and gives."""
    found = TRANSIENT.get(operation._overloadpacket.__name__)
    return found(args) if found is not None else 0


def lasting(operation: Any, capability: tuple[int, int]) -> dict[str, int]:
    """Bytes that a library keeps once this operation has run, by who keeps them; once for each thread of the step."""
    name = operation._overloadpacket.__name__
    if name in PRODUCTS:
        return {"cuBLAS": HOPPER_BYTES if capability >= (9, 0) else OLDER_BYTES}
    if name in OWN_PRODUCTS:
        return {"cublasLt, ours": HOPPER_BYTES}
    return {}


PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))
OWN_PRODUCTS = frozenset(("product", "product_add"))  # one for all threads


def _attention_backward(heads: int, tokens: int) -> Callable[[Any], int]:
    """Gradients of queries in fp32 and a sum per row; keys' and values' for every query head where heads share them."""

    def count(args: Any) -> int:
        _, q, k, v = args[:4]
        rows = q.shape[0] * q.shape[heads] * q.shape[tokens]
        shared = q.shape[heads] != k.shape[heads]
        keys = q.shape[0] * q.shape[heads] * k.shape[tokens]
        expanded = keys * (k.shape[-1] + v.shape[-1]) * k.element_size() if shared else 0
        return int(rows * q.shape[-1] * 4 + rows * 4 + expanded)

    return count


def _embedding_backward(args: Any) -> int:
    """Partial sums of rows, in fp32."""
    gradient, indices, words = args[:3]
    count = indices.numel()
    if count <= FEW_ROWS:
        return 0
    return int((min(count, words) + count // ROWS_BY_THREAD + 1) * gradient.shape[-1] * 4)


TRANSIENT: dict[str, Callable[[Any], int]] = {
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward(1, 2),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(1, 2),
    "_flash_attention_backward": _attention_backward(2, 1),
    "embedding_dense_backward": _embedding_backward,
}

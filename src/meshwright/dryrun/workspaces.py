"""Memory outside our tensors: kernel workspaces, and buffers that libraries keep.

Every figure was measured on an H200 with torch 2.11 (benchmarks/results/dryrun_h200_2026-11-15.json, `workspaces`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MIB = 1 << 20
HOPPER_BYTES = 32 * MIB  # torch's cuBLAS workspace on Hopper and later, per thread that multiplies
OLDER_BYTES = 8 * MIB + 128 * 1024
ROWS_BY_THREAD = 10  # in embedding's backward pass: rows per partial sum
FEW_ROWS = 3072  # up to this many, there are no partial sums


def transient(operation: Any, args: Any) -> int:
    """Return the bytes an operation allocates while it runs, besides its inputs and outputs."""
    found = TRANSIENT.get(operation._overloadpacket.__name__)
    return found(args) if found is not None else 0


def lasting(operation: Any, capability: tuple[int, int]) -> dict[str, int]:
    """Return the bytes a library keeps after this operation, by library; once per thread of the step."""
    name = operation._overloadpacket.__name__
    if name in PRODUCTS:
        return {"cuBLAS": HOPPER_BYTES if capability >= (9, 0) else OLDER_BYTES}
    if name in OWN_PRODUCTS:
        return {"cublasLt, ours": HOPPER_BYTES}
    return {}


PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))
OWN_PRODUCTS = frozenset(("product", "product_add"))  # one workspace for all threads


def _attention_backward(heads: int, tokens: int) -> Callable[[Any], int]:
    """fp32 query gradients and one sum per row; grouped-query attention also expands key and value gradients."""

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
    gradient, indices, vocabulary = args[:3]
    count = indices.numel()
    if count <= FEW_ROWS:
        return 0
    return int((min(count, vocabulary) + count // ROWS_BY_THREAD + 1) * gradient.shape[-1] * 4)


TRANSIENT: dict[str, Callable[[Any], int]] = {
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward(1, 2),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(1, 2),
    "_flash_attention_backward": _attention_backward(2, 1),
    "embedding_dense_backward": _embedding_backward,
}

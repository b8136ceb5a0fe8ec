"""The Triton kernels of the Mamba-2 scan in Triton's interpreter: errors of outputs and gradients as JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import torch
from tests.engine import scans, test_state_space, triton_interpreter
from torch import Tensor

from meshwright.engine.kernels import state_space, state_space_triton

NAMES = ("out", "x", "dt", "A", "B", "C", "D", "bias")
OPEN = (0.0, float("inf"))
IDS = torch.tensor([[0] * 31 + [1] * 33 + [2] + [3] * 65, [5] * 100 + [6] * 25 + [5] * 5])
BF16 = {"dtype": torch.bfloat16}
# Rows, tokens, groups, heads per group, head, state; options.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "step limits": ((1, 70, 2, 2, 16, 16), {"limits": (0.3, 2.5)}),
    "one token": ((1, 1, 1, 1, 16, 16), {}),
    "heads of 80": ((1, 66, 1, 2, 80, 16), {}),
    "padded sizes, nothing optional": ((2, 130, 1, 3, 24, 20), {"optional": False, "softplus": False}),
    "more heads than a program has": ((1, 64, 1, 9, 16, 16), {}),
    "packed documents": ((2, 130, 1, 2, 16, 16), {"documents": IDS}),
    "channels before tokens": ((1, 70, 1, 2, 16, 16), {"channels_first": True}),
    "bf16": ((1, 140, 2, 2, 16, 32), BF16),
    "bf16, packed documents": ((2, 130, 1, 2, 16, 16), {**BF16, "documents": IDS}),
}


def by_document(scan: Any, documents: Tensor | None, *tensors: Any) -> Tensor:
    """Run a scan on each document alone."""
    x, dt, a, b, c, *more = tensors
    if documents is None:
        found: Tensor = scan(x, dt, a, b, c, *more)
        return found
    rows = []
    for row, ids in enumerate(documents):
        ends = [0, *(ids.diff().nonzero().flatten() + 1).tolist(), len(ids)]
        parts = [[one[row : row + 1, i:j] for one in (x, dt, b, c)] for i, j in pairwise(ends)]
        rows.append(torch.cat([scan(x, dt, a, b, c, *more) for x, dt, b, c in parts], 1))
    return torch.cat(rows)


def outcome(scan: Any, tensors: list[Tensor | None], *settings: Any) -> dict[str, Tensor]:
    """Return the output and all gradients, for a loss with random weights."""
    given = [None if one is None else one.detach().requires_grad_() for one in tensors]
    out = scan(*given, *settings)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    wanted = [one for one in given if one is not None]
    grads = torch.autograd.grad(out, wanted, weights)
    names = [name for name, one in zip(NAMES[1:], given, strict=True) if one is not None]
    return dict(zip(("out", *names), (out.detach(), *grads), strict=True))


def errors(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    limits: tuple[float, float] = OPEN,
    softplus: bool = True,
    optional: bool = True,
    documents: Tensor | None = None,
    channels_first: bool = False,
    device: str = "cpu",
) -> dict[str, float]:
    """Return the errors of the kernels against our scan in fp64, relative to the largest value of each tensor."""
    rows, tokens, groups, heads, width, state = shape
    tensors: list[Any] = [
        one.detach().to(device) for one in test_state_space.inputs(rows, tokens, groups, heads, width, state, dtype)
    ]
    documents = None if documents is None else documents.to(device)
    tensors[2] = -tensors[2].exp()
    tensors[6] -= 3  # small steps, so that states pass from chunk to chunk
    if not softplus:
        tensors[1] = tensors[1].abs() / 4
    if not optional:
        tensors[5] = tensors[6] = None
    if channels_first:
        for i in (0, 3, 4):
            tensors[i] = tensors[i].flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(tensors[i].shape)

    def plain(*given: Any) -> Tensor:
        return by_document(state_space.state_space_scan, documents, *given, softplus, limits)

    def kernels(*given: Any) -> Tensor:
        found: Tensor = state_space_triton._scan(*given, documents, softplus, *limits)
        return found

    exact = outcome(plain, [None if one is None else one.double() for one in tensors])
    return scans.differences(outcome(kernels, tensors), exact, floor=1e-6)


if __name__ == "__main__":
    triton_interpreter.install()
    print(json.dumps({name: errors(shape, **options) for name, (shape, options) in CASES.items()}))

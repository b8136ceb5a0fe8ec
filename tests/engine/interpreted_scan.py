"""The Triton kernels of Mamba-2 mixers in Triton's interpreter: errors of outputs and gradients as JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import torch
from tests.engine import scans, test_state_space, triton_interpreter
from torch import Tensor

from meshwright.engine.kernels import causal_conv, state_space, state_space_triton

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


# Rows, tokens, channels and taps; dtype; options.
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "convolution": ((2, 130, 70, 4), torch.float32, {}),
    "convolution, few tokens": ((1, 2, 64, 4), torch.float32, {"bias": False}),
    "convolution without activation": ((1, 70, 20, 3), torch.float32, {"activation": None}),
    "convolution, packed documents": ((2, 130, 70, 4), torch.float32, {"documents": IDS}),
    "convolution, bf16, packed documents": ((2, 130, 70, 4), torch.bfloat16, {"documents": IDS}),
}


def convolution_errors(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: bool = True,
    activation: str | None = "silu",
    documents: Tensor | None = None,
    device: str = "cpu",
) -> dict[str, float]:
    """Return the errors of the convolution's kernels against torch's convolution in fp64, of each document alone."""
    rows, tokens, channels, taps = shape
    generator = torch.Generator().manual_seed(tokens)
    joined = torch.randn(rows, tokens, channels + 9, generator=generator)
    weight, offset = torch.randn(channels, taps, generator=generator), torch.randn(channels, generator=generator)
    tensors: list[Any] = [one.to(device, dtype) for one in (joined, weight)]
    tensors[0] = tensors[0][..., 4:-5]  # part of a wider tensor, as in a mixer
    tensors += [offset.to(device, dtype)] if bias else []
    documents = None if documents is None else documents.to(device)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        def one(x: Tensor) -> Tensor:
            return causal_conv.causal_convolution(x, weight, bias, activation)

        if documents is None:
            return one(x)
        found = []
        for row, ids in enumerate(documents):
            ends = [0, *(ids.diff().nonzero().flatten() + 1).tolist(), tokens]
            found.append(torch.cat([one(x[row : row + 1, i:j]) for i, j in pairwise(ends)], 1))
        return torch.cat(found)

    def kernels(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = causal_conv._conv(x, weight, bias, activation is not None, documents)
        return found

    def by_taps(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return causal_conv.causal_convolution(x, weight, bias, activation, documents)

    def through(function: Any, given: list[Tensor]) -> dict[str, Tensor]:
        given = [one.detach().requires_grad_() for one in given]
        out = function(*given)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        names = ("out", "x", "weight", "bias")[: len(given) + 1]
        return dict(zip(names, (out.detach(), *torch.autograd.grad(out, given, weights)), strict=True))

    exact = through(plain, [one.double() for one in tensors])
    fallback = scans.differences(through(by_taps, [one.double() for one in tensors]), exact, floor=1e-6)
    assert max(fallback.values()) < 1e-12, fallback
    return scans.differences(through(kernels, tensors), exact, floor=1e-6)


if __name__ == "__main__":
    triton_interpreter.install()
    found = {name: errors(shape, **options) for name, (shape, options) in CASES.items()}
    found |= {name: convolution_errors(*arguments, **more) for name, (*arguments, more) in CONVOLUTIONS.items()}
    print(json.dumps(found))

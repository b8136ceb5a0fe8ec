"""Attention variants of the supported models, and their definition in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Heads, widths and mask options of an attention variant."""

    heads: int = 4
    kv_heads: int = 4
    width: int = 8
    value_width: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    documents: bool = False
    causal: bool = True


CASES = {
    "plain": Case(),
    "gqa": Case(heads=8, kv_heads=2),
    "mqa": Case(kv_heads=1),
    "odd groups": Case(heads=12, kv_heads=3),
    "mla": Case(width=12, value_width=8),
    "window": Case(kv_heads=2, window=7),
    "wide window": Case(window=21),
    "softcap": Case(kv_heads=2, softcap=1.5),
    "sinks": Case(kv_heads=2, sinks=True),
    "window and sinks": Case(kv_heads=2, sinks=True, window=5),
    "documents": Case(kv_heads=2, documents=True),
    "everything": Case(8, 2, 12, 8, window=9, softcap=2.0, sinks=True, documents=True),
    "both sides": Case(kv_heads=2, causal=False),
}


def inputs(case: Case, seq_length: int, batch: int = 2, spread: float = 1.5) -> dict[str, Tensor]:
    """Return q, k, v, the output's gradient, sinks and documents, the same on every rank."""
    noise = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    found = {
        "q": spread * normal(batch, case.heads, seq_length, case.width),
        "k": spread * normal(batch, case.kv_heads, seq_length, case.width),
        "v": normal(batch, case.kv_heads, seq_length, case.value_width),
        "grad": normal(batch, seq_length, case.heads, case.value_width),
    }
    if case.sinks:
        found["sinks"] = normal(case.heads)
    if case.documents:
        starts = torch.rand(batch, seq_length, generator=noise) < 4 / seq_length
        found["documents"] = starts.cumsum(1)
    return found


def expected(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the output and the gradients of q, k, v and sinks by definition."""
    leaves = {name: given[name].double().requires_grad_() for name in ("q", "k", "v", "sinks") if name in given}
    group, tokens = case.heads // case.kv_heads, given["q"].shape[2]
    k, v = (leaves[name].repeat_interleave(group, 1) for name in ("k", "v"))
    scores = leaves["q"] @ k.transpose(-1, -2) * case.width**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    at = torch.arange(tokens, device=scores.device)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=scores.device)
    if case.causal:
        mask = mask & (at <= at[:, None])
    if case.window:
        mask = mask & (at[:, None] - at < case.window)
    if case.documents:
        ids = given["documents"]
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = scores.masked_fill(~mask, float("-inf"))
    if case.sinks:
        scores = torch.cat([scores, leaves["sinks"][None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    out = (scores.softmax(-1)[..., :tokens] @ v).transpose(1, 2)
    out.backward(given["grad"].double())
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def options(case: Case, given: dict[str, Tensor]) -> dict[str, Any]:
    """Return the keyword arguments that a model's attention module would pass."""
    return {
        "sliding_window": case.window,
        "softcap": case.softcap,
        "documents": given.get("documents"),
        "is_causal": case.causal,
    }


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference divided by the largest value."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())

"""Experts in fp8: both passes equal bf16 up to the rounding of fp8, and only the switch turns them on."""

from __future__ import annotations

import pytest
import torch
from tests.engine.ranks import run

from meshwright.engine.experts.grouped_mm import one_by_one
from meshwright.engine.kernels.fp8_grouped import SWITCH, fits, fp8_grouped_mm
from meshwright.engine.parallelize.quantize import _experts_reason

ENDS = [5, 5, 16, 32]  # one expert without tokens, groups that are no multiple of 16


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def errors(rank: int, world: int) -> dict[str, float]:
    """Return the relative errors of output and gradients against fp32."""
    torch.manual_seed(0)
    rows = torch.randn(32, 64).bfloat16().requires_grad_()
    columns = (torch.randn(4, 64, 48) * torch.logspace(-2, 2, 48)).bfloat16().requires_grad_()
    grad, ends = torch.randn(32, 48).bfloat16(), torch.tensor(ENDS, dtype=torch.int32)
    out = fp8_grouped_mm(rows, columns, ends)
    out.backward(grad)
    exact_rows, exact_columns = (one.detach().float().requires_grad_() for one in (rows, columns))
    exact = one_by_one(exact_rows, exact_columns, ends)
    exact.backward(grad.float())
    assert rows.grad is not None
    assert columns.grad is not None
    assert exact_rows.grad is not None
    assert exact_columns.grad is not None
    assert not columns.grad[1].any()  # the expert without tokens
    grad_rows, frozen = rows.grad.clone(), columns.detach()
    fp8_grouped_mm(rows, frozen, ends).sum().backward()
    assert frozen.grad is None
    by_column = (out.float() - exact).norm(dim=0) / exact.norm(dim=0)
    return {
        "out": float(by_column.max()),  # columns of very different sizes: each has its own scale
        "rows": relative(grad_rows, exact_rows.grad),
        "columns": relative(columns.grad, exact_columns.grad),
    }


def test_grouped_fp8_is_within_the_rounding_of_fp8() -> None:
    found = run(1, errors)[0]
    assert 1e-3 < found["out"] < 0.08, found
    assert 1e-3 < found["rows"] < 0.08, found
    assert found["columns"] < 0.01, found  # in bf16


def test_only_the_switch_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert SWITCH in _experts_reason("row")
    monkeypatch.setenv(SWITCH, "1")
    assert _experts_reason("row") == ""
    assert "per row only" in _experts_reason("tensor")
    assert fits(torch.empty(2, 32, 48, dtype=torch.bfloat16, device="meta"))
    assert not fits(torch.empty(2, 32, 40, dtype=torch.bfloat16, device="meta"))
    assert not fits(torch.empty(2, 32, 48, device="meta"))

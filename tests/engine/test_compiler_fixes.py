"""Corrections of torch's compiler: the barrier before a loop that reads back what a kernel stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codegen.common import CSE, IndentedBuffer
from torch._inductor.codegen.triton import TritonKernel

from meshwright.engine.kernels import compiler_fixes


def test_a_barrier_is_written_before_a_stored_buffer_is_read_back() -> None:
    kernel = SimpleNamespace(body=IndentedBuffer(), cse=CSE())
    load = compiler_fixes.waiting(lambda self, name, index: f"tl.load({name} + {index})")
    kernel.body.writeline("for r0_offset in tl.range(0, r0_numel, R0_BLOCK): ...")
    assert load(kernel, "buf0", 3) == "tl.load(buf0 + 3)"
    assert "barrier" not in kernel.body.getvalue()
    kernel.cse.store_cache["buf0"] = "tmp0"
    kernel.cse.invalidate(keep_vars=set())  # as the compiler does at the end of a loop
    load(kernel, "buf1", 3)
    assert "barrier" not in kernel.body.getvalue()
    load(kernel, "buf0", 3)
    assert kernel.body.getvalue().splitlines()[-1] == "tl.debug_barrier()"


def test_the_compiler_of_this_torch_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that are patched exist; without a GPU nothing changes."""
    before: Any = TritonKernel.load
    compiler_fixes.correct_compiler.__wrapped__()
    assert torch.cuda.is_available() or TritonKernel.load is before
    monkeypatch.setattr(TritonKernel, "load", before)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = torch._inductor.config.triton
    monkeypatch.setattr(settings, "mix_order_reduction", True)
    compiler_fixes.correct_compiler.__wrapped__()
    assert TritonKernel.load is not before
    assert settings.mix_order_reduction is False

"""The Triton kernels of the Mamba-2 scan on a GPU, against our scan in torch operations; run where a GPU is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.engine import interpreted_scan, scans, test_fla_scan
from torch import Tensor

from meshwright.engine.kernels import scan_choice, scan_patch, state_space, state_space_triton
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.parallelize.document_isolation import isolate_documents


def reason() -> str:
    return scan_choice.triton_unusable("cuda") if torch.cuda.is_available() else "needs a CUDA GPU"


pytestmark = pytest.mark.skipif(bool(reason()), reason=reason() or "runs")
LIMIT = 2**-6  # of bf16 products, relative to the largest value of a tensor
# Heads, head, groups, state.
MODELS = {
    "Nemotron-H 8B": (128, 64, 8, 128),
    "Nemotron Nano 9B v2": (128, 80, 8, 128),
    "Zamba2 2.7B": (80, 64, 1, 64),
    "Falcon-H1 0.5B": (24, 64, 1, 256),
    "wide": (16, 128, 1, 256),
}
# Triton 3.6 compiles their outputs wrong on Hopper GPUs; `fits` lets no mixer of such a size run them.
TOO_SMALL = ("bf16",)


def inputs(heads: int, width: int, groups: int, state: int, tokens: int) -> list[Tensor]:
    """bf16 inputs as in a mixer: x, B and C are parts of one tensor with channels before tokens."""
    torch.manual_seed(0)
    widths = [heads * width, groups * state, groups * state]
    joined = torch.randn(1, sum(widths), tokens, device="cuda").to(torch.bfloat16).transpose(1, 2)
    x, b, c = joined.split(widths, -1)
    dt = torch.randn(1, tokens, heads, device="cuda").to(torch.bfloat16)
    a, skip = -torch.linspace(1, 16, heads, device="cuda"), torch.ones(heads, device="cuda")
    bias = torch.randn(heads, device="cuda") - 4
    x, b, c = x.unflatten(-1, (heads, width)), b.unflatten(-1, (groups, state)), c.unflatten(-1, (groups, state))
    return [x, dt, a, b, c, skip, bias]


def plain(documents: Tensor | None, *tensors: Tensor) -> Tensor:
    return interpreted_scan.by_document(state_space.state_space_scan, documents, *tensors, True)


def kernels(documents: Tensor | None, *tensors: Tensor) -> Tensor:
    return state_space_triton.state_space_scan(*tensors, softplus=True, documents=documents)


@pytest.mark.parametrize("case", interpreted_scan.CASES)
def test_kernels_equal_the_exact_scan(case: str) -> None:
    """The cases of the interpreter, in bf16."""
    if case in TOO_SMALL:
        pytest.skip("heads of 16 with states of 32")
    shape, options = interpreted_scan.CASES[case]
    found = interpreted_scan.errors(shape, **{**options, "dtype": torch.bfloat16}, device="cuda")
    assert max(found.values()) < LIMIT, found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [4096, 8192, 4001])
@pytest.mark.parametrize("model", MODELS)
def test_kernels_equal_torch_operations(model: str, tokens: int, packed: bool) -> None:
    tensors = inputs(*MODELS[model], tokens)
    documents = None
    if packed:
        ends = torch.tensor([0, 31, 64, 65, tokens // 3, tokens // 2, tokens - 1, tokens])
        documents = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())[None].cuda()
    run: Any = interpreted_scan.outcome
    expected = run(partial(plain, documents), [one.float() for one in tensors])
    found = scans.differences(run(partial(kernels, documents), tensors), expected, floor=1e-6)
    usual = scans.differences(run(partial(plain, documents), tensors), expected, floor=1e-6)
    print({name: f"{value:.1e} ({usual[name]:.1e} in torch)" for name, value in found.items()})
    assert all(value < max(LIMIT, 2 * usual[name]) for name, value in found.items()), (found, usual)


def test_results_are_the_same_bits_again() -> None:
    tensors = inputs(*MODELS["Nemotron Nano 9B v2"], 1000)
    first, second = (interpreted_scan.outcome(partial(kernels, None), tensors) for _ in range(2))  # type: ignore[arg-type]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_long_sequences_have_large_offsets() -> None:
    """More than 2³¹ numbers in x: the last chunk equals a scan that starts there, if all before decays."""
    heads, width, tokens = 128, 64, 262_144 + 100
    x = torch.zeros(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    dt = torch.zeros(1, tokens, heads, device="cuda", dtype=torch.bfloat16)
    b, c = (torch.zeros(1, tokens, 1, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for one in (x, dt, b, c):
        one[:, -100:] = torch.randn_like(one[:, -100:])
    a = -torch.ones(heads, device="cuda")
    found = state_space_triton.state_space_scan(x, dt, a, b, c, softplus=True)[:, -100:]
    last = [one[:, -100:].float() for one in (x, dt, b, c)]
    expected = state_space.state_space_scan(*last[:2], a, *last[2:], softplus=True)
    assert scans.differences({"out": found}, {"out": expected}, floor=1e-6)["out"] < LIMIT


@pytest.mark.parametrize("case", interpreted_scan.CONVOLUTIONS)
def test_convolutions_equal_the_exact_one(case: str) -> None:
    shape, _, options = interpreted_scan.CONVOLUTIONS[case]
    found = interpreted_scan.convolution_errors(shape, torch.bfloat16, **options, device="cuda")
    assert max(found.values()) < LIMIT, found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_mixers_are_as_exact_as_with_torch_operations(
    compiled: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = test_fla_scan.DOCUMENTS.cuda() if packed else None
    monkeypatch.setattr(scan_patch, "FITS", {})  # tiny mixers have narrow heads
    found = {}
    for kernel, dtype in (("exact", torch.float64), ("torch", torch.bfloat16), ("triton", torch.bfloat16)):
        holder: Any = test_fla_scan.mixers("nemotron_h")[0].bfloat16().to(dtype).cuda()
        use_chunked_scans(holder, "triton" if kernel == "triton" else "torch")
        isolate_documents(holder)
        if compiled and kernel == "triton":
            holder[0].compile(fullgraph=True)
        found[kernel] = test_fla_scan.through(holder, documents)
    worst, usual = (scans.differences(found[one], found["exact"], floor=1e-3) for one in ("triton", "torch"))
    assert all(value < max(2 * LIMIT, 2 * usual[name]) for name, value in worst.items()), (worst, usual)

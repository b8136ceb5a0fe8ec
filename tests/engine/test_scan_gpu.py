"""fla's kernels on a GPU: outputs and gradients against our scans in fp64; run where a GPU and fla are.

`MESHWRIGHT_UNGUARDED_FLA=1` also runs them with the Triton versions that fla refuses on Hopper GPUs.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine import test_delta_rule, test_fla_scan, test_state_space
from tests.engine.scans import differences
from torch import Tensor

from meshwright.engine.kernels import delta_rule, fla_scan, state_space

UNGUARDED = os.environ.get("MESHWRIGHT_UNGUARDED_FLA") == "1"


def reason() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    found = fla_scan.unusable("cuda")
    return "" if UNGUARDED and "Triton" in found else found


pytestmark = pytest.mark.skipif(bool(reason()), reason=reason() or "runs")
TOKENS = 200  # not a multiple of fla's chunk
ENDS = (0, 31, 64, 65, 170, TOKENS)
# fp32 products may run as tf32, like every matrix product of the engine.
LIMITS = {torch.bfloat16: 3e-2, torch.float32: 5e-3}


@pytest.fixture(autouse=True)
def _lift_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    if UNGUARDED:
        from fla.ops.common import chunk_o

        monkeypatch.setattr(chunk_o, "TRITON_ABOVE_3_7_1", True)


def rule(kernels: Any, *tensors: Tensor, **options: Any) -> Tensor:
    found: Tensor = kernels.gated_delta_rule(*tensors, norm=True, **options)
    return found


def scan(kernels: Any, x: Tensor, dt: Tensor, a_log: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    found: Tensor = kernels.state_space_scan(x, dt, -a_log.exp(), *rest, softplus=True, **options)
    return found


KINDS: dict[str, Any] = {
    "delta rule": (rule, delta_rule, lambda dtype: test_delta_rule.inputs(2, TOKENS, 4, 2, 128, 128, dtype)),
    "state space": (scan, state_space, lambda dtype: test_state_space.inputs(2, TOKENS, 2, 4, 64, 128, dtype)),
    "state space, heads of 80": (
        scan,
        state_space,
        lambda dtype: test_state_space.inputs(2, TOKENS, 2, 4, 80, 128, dtype),
    ),
}


def outcome(function: Any, tensors: list[Tensor]) -> dict[str, Tensor]:
    given = [one.detach().requires_grad_() for one in tensors]
    out = function(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, given, weights)
    return {str(i): one.detach() for i, one in enumerate((out, *grads))}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_fla_equals_our_scan(kind: str, dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function, own, inputs = KINDS[kind]
    documents = None
    ours = partial(function, own)
    if packed:
        lengths = torch.diff(torch.tensor(ENDS))
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        ids = torch.stack([row, row.flip(0)])
        monkeypatch.setattr(test_fla_scan, "DOCUMENTS", ids)
        ours, documents = test_fla_scan.by_document(ours, TOKENS), ids.cuda()
    tensors = [one.detach().cuda() for one in inputs(dtype)]
    expected = outcome(ours, [one.double() for one in tensors])
    worst = differences(outcome(partial(function, fla_scan, documents=documents), tensors), expected, floor=1e-6)
    assert max(worst.values()) < LIMITS[dtype], worst


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", test_fla_scan.MODELS)
def test_mixers_with_fla_equal_ours(family: str, packed: bool) -> None:
    """The whole mixer: also the convolution, whose weight is frozen here, and compiled as one graph."""
    from meshwright.engine.kernels.scan_patch import use_chunked_scans
    from meshwright.engine.parallelize.document_isolation import isolate_documents

    documents = test_fla_scan.DOCUMENTS.cuda() if packed else None
    found = {}
    for kernel in ("torch", "fla", "compiled"):
        holder: Any = test_fla_scan.mixers(family)[0].float().cuda()
        use_chunked_scans(holder, "torch" if kernel == "torch" else "fla")
        isolate_documents(holder)
        if kernel == "compiled":
            holder[0].compile(fullgraph=True)
        found[kernel] = test_fla_scan.through(holder, documents)
    for kernel in ("fla", "compiled"):
        worst = differences(found[kernel], found["torch"], floor=1e-3)
        assert max(worst.values()) < LIMITS[torch.float32], (kernel, worst)

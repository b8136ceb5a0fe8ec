"""The Triton kernels of the gated delta rule in Triton's interpreter: they equal the torch version."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine import test_delta_rule, triton_interpreter
from tests.engine.scans import differences, kept_bytes
from tests.engine.test_delta_rule import inputs, outcome
from torch import Tensor

from meshwright.dryrun.allocation_log import AllocationLog, SegmentKey
from meshwright.dryrun.fake_device import fake_rank
from meshwright.engine.kernels import delta_rule, delta_rule_triton
from meshwright.engine.kernels.device_caps import DRY

# Documents end within chunks and between them, one has one token, and ids recur.
DOCUMENTS = torch.tensor([[0] * 31 + [1] * 33 + [2] + [0] * 65, [3] * 64 + [4] * 66])
# rows, tokens, groups, heads of a group, key and value width; whether keys are normalized; packed; chunks of a span.
CASES: dict[str, tuple[tuple[int, ...], bool, bool, int]] = {
    "shared keys": ((1, 70, 1, 2, 16, 32), True, False, 100),
    "spans, raw keys": ((2, 130, 1, 1, 32, 16), False, False, 2),
    "documents": ((2, 130, 1, 2, 16, 16), True, True, 2),
}
# The exact products of fp32 numbers show errors of the formulas, those of bf16 numbers that nothing is rounded twice.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def by_document(rule: Any, documents: Tensor, *tensors: Tensor) -> Tensor:
    """Run a rule on each document alone."""
    rows = []
    for row, ids in enumerate(documents):
        ends = [0, *(ids.diff().nonzero().flatten() + 1).tolist(), len(ids)]
        rows.append([rule(*(one[row : row + 1, a:b] for one in tensors)) for a, b in pairwise(ends)])
    return torch.cat([torch.cat(parts, 1) for parts in rows])


def tensors_of(name: str, dtype: torch.dtype) -> list[Tensor]:
    shape, norm, _, _ = CASES[name]
    tensors = inputs(*shape, dtype)
    if not norm:
        key = tensors[1].detach().float()
        tensors[1] = (key / key.norm(dim=-1, keepdim=True)).to(dtype).requires_grad_()
    return tensors


def expected(name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The torch version in fp64, each document alone."""
    rule = partial(delta_rule.gated_delta_rule, norm=CASES[name][1])
    high = [one.detach().double().requires_grad_() for one in tensors]
    return outcome(partial(by_document, rule, DOCUMENTS) if CASES[name][2] else rule, high)


def main(name: str) -> None:
    """Print the largest difference of every tensor, by dtype; in the interpreter."""
    triton_interpreter.install()
    (_, _, groups, heads, key, value), norm, packed, chunks = CASES[name]
    delta_rule_triton.runs = lambda *_: True
    delta_rule_triton.STATE_BYTES = chunks * 2 * groups * heads * key * value
    rule = partial(delta_rule_triton.gated_delta_rule, norm=norm, documents=DOCUMENTS if packed else None)
    found = {}
    for dtype in LIMITS:
        tensors = tensors_of(name, dtype)
        found[str(dtype)] = differences(outcome(rule, tensors), expected(name, tensors), floor=1e-6)
    print(json.dumps(found))


@pytest.mark.slow
@triton_interpreter.needs_triton
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_torch_version(name: str) -> None:
    found = triton_interpreter.run("tests.engine.test_delta_triton", name)
    for dtype, limit in LIMITS.items():
        assert max(found[str(dtype)].values()) < limit, found


def test_other_tensors_run_torch_operations() -> None:
    """Also packed: no state passes the boundary of documents."""
    for name in CASES:
        (_, norm, packed, _), tensors = CASES[name], tensors_of(name, torch.float32)
        rule = partial(delta_rule_triton.gated_delta_rule, norm=norm, documents=DOCUMENTS if packed else None)
        worst = differences(outcome(rule, tensors), expected(name, tensors), floor=1e-6)
        assert max(worst.values()) < 1e-5, (name, worst)


def test_shapes_and_saved_tensors_are_known_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule_triton, "runs", lambda *_: True)
    monkeypatch.setattr(delta_rule_triton, "STATE_BYTES", 2 * 2 * 4 * 16 * 32)  # spans of two chunks
    shapes = test_delta_rule.inputs(2, 300, 2, 2, 16, 32, torch.bfloat16)
    tensors = [one.detach().to("meta").requires_grad_() for one in shapes]
    out = delta_rule_triton.gated_delta_rule(*tensors, norm=True)  # type: ignore[misc]  # five tensors
    grads = torch.autograd.grad(out.sum(), tensors)
    assert (out.shape, out.dtype) == (tensors[2].shape, torch.bfloat16)
    assert [(one.shape, one.dtype) for one in grads] == [(one.shape, one.dtype) for one in tensors]
    monkeypatch.setattr(delta_rule_triton, "launch", lambda *_, **__: None)
    states = 2 * (3 - 1) * 4 * 16 * 32 * 4
    saved = kept_bytes(partial(delta_rule_triton.gated_delta_rule, norm=True), shapes)
    assert saved == sum(one.nbytes for one in shapes) + states


def test_a_dry_run_has_the_memory_and_the_flops_of_the_kernels() -> None:
    log = AllocationLog(capability=(9, 0))
    tokens, groups, heads, key, value = 512, 2, 4, 64, 128

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, tokens, *shape, device=DRY, dtype=dtype, requires_grad=True)

    with fake_rank(1, 0, log.record), log.patch_torch():
        log.begin(SegmentKey(0, "forward"))
        q, k, v = empty(groups, key), empty(groups, key), empty(heads, value)
        out = delta_rule_triton.gated_delta_rule(q, k, v, empty(heads, dtype=torch.float32), empty(heads), norm=True)
        forward = sum(log.segments[-1].flops.values())
        log.begin(SegmentKey(0, "backward"))
        out.sum().backward()
    per_head = 64**2 * (3 * key + 2 * value) + 3 * 64 * key * value
    assert forward == 2 * tokens // 64 * heads * per_head
    assert sum(log.segments[-1].flops.values()) > 2 * forward
    sizes = [log.blocks[event].bytes for event in log.segments[-1].events if event >= 0]
    assert sizes.count(tokens // 64 * heads * key * value * 2) >= 2  # the states and their gradients


@pytest.mark.parametrize(("name", "width"), [("head_k_dim", 96), ("head_v_dim", 512)])
def test_mixers_with_other_widths_are_refused(name: str, width: int) -> None:
    """In a run with kernels.scan=triton; with auto they run torch operations."""
    reason = f"{name} is {width}, and the kernels take 64, 128, 256"
    assert delta_rule_triton.fits(SimpleNamespace(**{"head_k_dim": 128, "head_v_dim": 128, name: width})) == reason


if __name__ == "__main__":
    main(sys.argv[1])

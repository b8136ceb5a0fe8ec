"""The Triton kernels of the Mamba-2 scan equal our scan in torch operations; they run where their inputs fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine import scans, test_fla_scan, test_state_space, triton_interpreter
from torch import Tensor

from meshwright.dryrun.allocation_log import AllocationLog, SegmentKey
from meshwright.dryrun.fake_device import fake_rank
from meshwright.engine.kernels import fla_scan, scan_choice, scan_patch, state_space_triton
from meshwright.engine.kernels.device_caps import DRY
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.parallelize.document_isolation import isolate_documents, isolates_documents
from meshwright.engine.patching import patches
from meshwright.errors import InputError
from meshwright.recipes.types import Kernels

LIMITS = {False: 5e-6, True: 2**-6}  # of fp32 and bf16 inputs


@pytest.mark.slow
@triton_interpreter.needs_triton
def test_kernels_equal_the_scan_in_torch_operations() -> None:
    for name, found in triton_interpreter.run("tests.engine.interpreted_scan").items():
        assert max(found.values()) < LIMITS["bf16" in name], (name, found)


@pytest.mark.parametrize(("width", "block", "padded"), [(16, 16, 16), (64, 64, 64), (80, 32, 96), (128, 64, 128)])
def test_heads_are_padded_little(width: int, block: int, padded: int) -> None:
    x, b = torch.empty(1, 5, 12, width, device="meta"), torch.empty(1, 5, 1, 100, device="meta")
    tiles = state_space_triton._tiles(state_space_triton._sizes(x, b))
    assert (tiles.head_block, tiles.padded_width, tiles.padded_state) == (block, padded, 128)
    assert tiles.heads == 6  # the largest divisor of a group's 12 heads up to 8


def test_segments_number_the_documents_of_each_row() -> None:
    found: Any = state_space_triton.number_documents(torch.tensor([[4, 4, 2, 2, 4], [0, 0, 0, 0, 0]]))
    assert found.tolist() == [[0, 0, 1, 1, 2], [0, 0, 0, 0, 0]]


def test_other_inputs_run_torch_operations() -> None:
    tensors = [one.detach() for one in test_state_space.inputs(1, 20, 1, 2, 8, 8, torch.bfloat16)]
    found = state_space_triton.state_space_scan(*tensors, softplus=True)
    assert torch.equal(found, test_state_space.state_space_scan(*tensors, softplus=True))


@pytest.mark.parametrize("family", test_fla_scan.MODELS)
def test_mixers_isolate_packed_documents_without_padding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in fp64 by torch operations; on a GPU the kernels take the same document ids."""
    monkeypatch.setattr(scan_patch, "FITS", {})  # the heads of a tiny mixer are too narrow for the kernels
    for documents in (None, test_fla_scan.DOCUMENTS):
        own, packed = test_fla_scan.mixers(family)
        assert (use_chunked_scans(own), use_chunked_scans(packed, "triton")) == (1, 1)
        isolate_documents(own)
        isolate_documents(packed)
        assert patches(packed)["0"] == ("TritonScan", "DocBoundaries")
        assert not isolates_documents(packed)  # shapes do not depend on the data: one compiled graph
        expected = test_fla_scan.through(own, documents)
        worst = scans.differences(test_fla_scan.through(packed, documents), expected, floor=1e-6)
        assert max(worst.values()) < 1e-6, worst  # transformers computes decays in fp32


def test_a_dry_run_has_the_memory_and_the_flops_of_the_kernels() -> None:
    log = AllocationLog(capability=(9, 0))
    rows, tokens, heads, width, groups, state = 1, 512, 4, 16, 2, 32

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, device=DRY, dtype=dtype, requires_grad=True)

    with fake_rank(1, 0, log.record), log.patch_torch():
        log.begin(SegmentKey(0, "forward"))
        x, dt = empty(rows, tokens, heads, width), empty(rows, tokens, heads)
        b, c = (empty(rows, tokens, groups, state) for _ in range(2))
        a = empty(heads, dtype=torch.float32)
        out = state_space_triton.state_space_scan(x, dt, a, b, c)
        forward = sum(log.segments[-1].flops.values())
        log.begin(SegmentKey(0, "backward"))
        out.sum().backward()
    per_chunk = 64**2 * (groups * state + heads * width) + 2 * heads * 64 * width * state
    assert forward == 2 * tokens // 64 * per_chunk
    assert sum(log.segments[-1].flops.values()) > 2 * forward
    sizes = [log.blocks[event].bytes for event in log.segments[-1].events if event >= 0]
    states = tokens // 64 * heads * width * state * 2
    assert sizes.count(states) >= 2  # the states and their gradients


def test_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(scan: Any, device_type: str, deterministic: bool = False) -> str:
        return scan_choice.scan_kernel(Kernels(scan=scan, deterministic=deterministic), device_type)

    monkeypatch.setattr(fla_scan, "AUTO_FLA", False)
    monkeypatch.setattr(scan_choice, "find_spec", lambda name: object())
    for auto in (False, True):
        monkeypatch.setattr(scan_choice, "AUTO_TRITON", auto)
        assert [choose("triton", one) for one in ("cuda", DRY)] == ["triton", "triton"]
        assert [choose("torch", one) for one in ("cuda", "cpu", DRY)] == ["torch"] * 3
        expected = "triton" if auto else "torch"
        assert [choose("auto", one) for one in ("cuda", "cpu", DRY)] == [expected, "torch", expected]
        assert choose("auto", "cuda", deterministic=True) == expected  # fixed tiles, no atomic sums
    with pytest.raises(InputError, match="need a CUDA GPU, and this run is on CPU") as refused:
        choose("triton", "cpu")
    assert (refused.value.field, refused.value.fix) == ("kernels.scan", ("kernels.scan=torch",))
    with pytest.raises(InputError, match=r"compute in bf16, and precision\.compute is fp32"):
        scan_choice.scan_kernel(Kernels(scan="triton"), "cuda", "fp32")
    assert scan_choice.scan_kernel(Kernels(), "cuda", "fp32") == "torch"
    assert scan_choice.missing_note(Kernels(), "cuda") == ""
    monkeypatch.setattr(scan_choice, "_shared_memory", lambda: 99 << 10)
    with pytest.raises(InputError, match="need 160 KiB of shared memory per thread block, and this GPU has 99 KiB"):
        choose("triton", "cuda")
    monkeypatch.setattr(scan_choice, "_shared_memory", lambda: 227 << 10)
    monkeypatch.setattr(scan_choice, "find_spec", lambda name: None)
    assert choose("auto", "cuda") == "torch"
    note = scan_choice.missing_note(Kernels(), "cuda")
    assert note.startswith("Mamba-2 and gated-delta layers run torch operations, slower than our Triton")
    assert note.endswith("Triton is not installed; run: pip install triton")
    with pytest.raises(InputError, match="Triton is not installed; run: pip install triton"):
        choose("triton", "cuda")

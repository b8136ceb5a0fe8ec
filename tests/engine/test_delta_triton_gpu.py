"""The Triton kernels of the gated delta rule on a GPU: the output and every gradient at the shapes of real models.

Errors are against the torch version in fp64, and may be up to twice those of the torch version from the same bf16
inputs: a wrongly compiled kernel shows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.scans import differences
from tests.engine.test_delta_rule import inputs
from tests.engine.test_delta_triton import by_document
from torch import Tensor

from meshwright.engine.kernels import delta_rule, delta_rule_triton
from meshwright.models import GatedDelta, all_specs

GPU = torch.cuda.is_available() and delta_rule_triton.HAS_TRITON
pytestmark = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU and Triton")
NAMES = ("out", "q", "k", "v", "g", "beta")
# Times the torch version's error, and the least allowed: a few roundings to bf16.
LIMITS = (2.0, 4e-3)
# groups, heads of a group, key and value width of every layer in the catalogue.
CATALOGUE = sorted(
    {
        (mixer.k_heads, mixer.v_heads // mixer.k_heads, mixer.k_head_dim, mixer.v_head_dim)
        for spec in all_specs()
        for mixer, _ in spec.mixers(GatedDelta)
    }
)


def passes(rule: Any, tensors: list[Tensor]) -> dict[str, Tensor]:
    given = [one.detach().requires_grad_() for one in tensors]
    out = rule(*given)
    weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out)
    grads = torch.autograd.grad(out, given, weights)
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def compare(tensors: list[Tensor], norm: bool = True, documents: Tensor | None = None) -> None:
    plain = partial(delta_rule.gated_delta_rule, norm=norm)
    rule = partial(by_document, plain, documents) if documents is not None else plain
    found = passes(partial(delta_rule_triton.gated_delta_rule, norm=norm, documents=documents), tensors)
    expected = passes(rule, [one.double() for one in tensors])
    limits = differences(passes(rule, tensors), expected, floor=1e-6)
    worst = differences(found, expected, floor=1e-6)
    print({name: f"{worst[name]:.1e}, in torch {limits[name]:.1e}" for name in NAMES})
    factor, least = LIMITS
    assert all(worst[name] <= max(factor * limits[name], least) for name in NAMES), (worst, limits)


def on_gpu(*shape: int) -> list[Tensor]:
    return [one.detach().cuda() for one in inputs(*shape, torch.bfloat16)]  # type: ignore[arg-type]  # six sizes


@pytest.mark.parametrize("tokens", [4096, 8192])
@pytest.mark.parametrize("shape", CATALOGUE)
def test_layers_of_the_catalogue(shape: tuple[int, int, int, int], tokens: int) -> None:
    compare(on_gpu(1, tokens, *shape))


@pytest.mark.parametrize("key", [64, 128, 256])
@pytest.mark.parametrize("value", [64, 128, 256])
def test_widths_rows_and_a_last_chunk_that_is_not_full(key: int, value: int) -> None:
    compare(on_gpu(3, 333, 2, 2, key, value))


def test_one_token() -> None:
    compare(on_gpu(2, 1, 2, 2, 128, 128))


def test_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule_triton, "STATE_BYTES", 3 * 2 * 8 * 128 * 128)  # of three chunks and one row
    compare(on_gpu(2, 1000, 4, 2, 128, 128))


def test_similar_keys_and_weak_decays() -> None:
    """The systems are far from the unit matrix: all keys of a head are nearly the same."""
    q, k, v, g, beta = on_gpu(1, 1024, 4, 2, 128, 128)
    k = (k[:, :1] + 0.1 * k).to(k.dtype)
    compare([q, k, v, g * 1e-3, (0.9 + 0.1 * beta).to(beta.dtype)])


def test_raw_keys() -> None:
    q, k, v, g, beta = on_gpu(2, 500, 4, 2, 128, 128)
    k = (k / k.float().norm(dim=-1, keepdim=True)).to(k.dtype)
    compare([q, k, v, g, beta], norm=False)


def test_packed_documents() -> None:
    lengths = torch.tensor([31, 33, 1, 63, 128, 500, 64, 1228])
    row = torch.repeat_interleave(torch.arange(8) % 3, lengths)  # ids recur
    compare(on_gpu(2, 2048, 4, 2, 128, 128), documents=torch.stack([row, row.flip(0)]).cuda())


def test_equal_runs_are_bitwise_equal() -> None:
    tensors = on_gpu(1, 1000, 16, 2, 128, 128)
    first, second = (passes(partial(delta_rule_triton.gated_delta_rule, norm=True), tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_compiles_as_one_graph() -> None:
    tensors = on_gpu(1, 300, 4, 2, 128, 128)
    rule = partial(delta_rule_triton.gated_delta_rule, norm=True)
    plain, compiled = passes(rule, tensors), passes(torch.compile(rule, fullgraph=True), tensors)
    assert all(torch.equal(plain[name], compiled[name]) for name in NAMES)

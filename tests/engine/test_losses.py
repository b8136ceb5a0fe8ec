"""Every method of the head loss is torch's cross entropy, in value and gradient, on one rank and on several."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.ranks import run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.engine.losses import Loss, LossMethod, head_loss

METHODS: tuple[LossMethod, ...] = get_args(LossMethod)
CASES = [(0.0, None, False), (1e-2, None, True), (0.0, 5.0, False), (1e-2, 5.0, True)]


def example(tokens: int, vocab: int, width: int, dtype: torch.dtype, bias: bool, seed: int = 0) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=make).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=make) * 0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=make)
    labels[::3] = -100
    weights = torch.rand(tokens, generator=make) / tokens
    shift = torch.randn(vocab, generator=make).to(dtype).requires_grad_() if bias else None
    return {"hidden": hidden, "weight": weight, "bias": shift, "labels": labels, "weights": weights}


def reference(case: dict[str, Any], z_loss: float, softcap: float | None) -> Tensor:
    bias = None if case["bias"] is None else case["bias"].double()
    logits = F.linear(case["hidden"].double(), case["weight"].double(), bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = torch.where(case["labels"] >= 0, case["weights"], 0.0).double()
    losses = F.cross_entropy(logits, case["labels"], reduction="none") + z_loss * logits.logsumexp(1) ** 2
    return (weights * losses).sum()


def gradients(loss: Tensor, case: dict[str, Any]) -> list[Tensor]:
    inputs = [case[name] for name in ("hidden", "weight", "bias") if case[name] is not None]
    return list(torch.autograd.grad(loss, inputs))


def far(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12))


def check(
    case: dict[str, Any], method: LossMethod, z_loss: float, softcap: float | None, chunk: int, limit: float
) -> None:
    expected = reference(case, z_loss, softcap)
    loss = head_loss(**case, method=method, z_loss=z_loss, softcap=softcap, chunk=chunk)
    assert float(loss.total) == pytest.approx(float(expected), rel=limit)
    assert float(loss.cross_entropy + loss.z) == pytest.approx(float(loss.total), rel=1e-6)
    for got, want in zip(gradients(3.0 * loss.total, case), gradients(3.0 * expected, case), strict=True):
        assert got.dtype == want.dtype
        assert far(got, want) < limit


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("z_loss", "softcap", "bias"), CASES)
def test_value_and_gradients_are_those_of_torch(
    method: LossMethod, z_loss: float, softcap: float | None, bias: bool
) -> None:
    check(example(23, 40, 12, torch.float32, bias), method, z_loss, softcap, 8, 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_keep_their_precision(method: LossMethod, dtype: torch.dtype) -> None:
    check(example(17, 32, 16, dtype, bias=False), method, 1e-3, 20.0, 5, 2e-2)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 20), st.integers(2, 30), st.integers(1, 9), st.integers(1, 24))
def test_any_shape_and_any_chunk(method: LossMethod, tokens: int, vocab: int, width: int, chunk: int) -> None:
    check(example(tokens + 1, vocab, width, torch.float32, bias=False, seed=chunk), method, 1e-2, None, chunk, 2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_the_derivative(method: LossMethod) -> None:
    case = example(5, 7, 3, torch.float64, bias=True)

    def total(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        inputs = {**case, "hidden": hidden, "weight": weight, "bias": bias, "weights": case["weights"].double()}
        return head_loss(**inputs, method=method, z_loss=0.1, softcap=3.0, chunk=2).total

    assert torch.autograd.gradcheck(total, (case["hidden"], case["weight"], case["bias"]))


@pytest.mark.parametrize("method", METHODS)
def test_only_what_requires_a_gradient_gets_one(method: LossMethod) -> None:
    case = example(9, 11, 4, torch.float32, bias=False)
    case["weight"].requires_grad_(False)
    expected = torch.autograd.grad(reference(case, 0.0, None), case["hidden"])[0]
    head_loss(**case, method=method, chunk=4).total.backward()
    assert far(case["hidden"].grad, expected) < 1e-5
    assert case["weight"].grad is None


@pytest.mark.parametrize("method", METHODS)
def test_without_gradients_the_value_is_the_same(method: LossMethod) -> None:
    case = example(9, 11, 4, torch.float32, bias=False)
    with torch.no_grad():
        loss = head_loss(**case, method=method, z_loss=1e-2, chunk=4)
    assert float(loss.total) == pytest.approx(float(reference(case, 1e-2, None)), rel=1e-5)
    assert not loss.total.requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_target_tokens_gives_zero(method: LossMethod) -> None:
    case = example(6, 11, 4, torch.float32, bias=False)
    case["labels"].fill_(-100)
    loss = head_loss(**case, method=method, z_loss=1e-2, chunk=4)
    assert float(loss.total) == 0.0
    assert all(not gradient.any() for gradient in gradients(loss.total, case))


def test_fused_linear_keeps_the_gradient_of_a_tiny_weight_in_fp16() -> None:
    case = example(16, 32, 16, torch.float16, bias=False)
    case["weights"] = case["weights"] * 1e-6
    loss = head_loss(**case, method="fused_linear", chunk=5).total * 2.0**20
    expected = reference(case, 0.0, None) * 2.0**20
    for got, want in zip(gradients(loss, case), gradients(expected, case), strict=True):
        assert far(got, want) < 1e-2


def test_chunked_methods_save_no_logits() -> None:
    case = example(64, 512, 4, torch.float32, bias=False)
    for method, kept in (("chunked", 64 * 4 + 512 * 4 + 6 * 64), ("fused_linear", 64 * 4 + 512 * 4 + 1)):
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            head_loss(**case, method=method, chunk=16)
        assert sum(sizes) <= kept


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_can_be_traced_on_tensors_without_data(method: LossMethod) -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(10, 8, requires_grad=True), torch.empty(16, 8, requires_grad=True)
        labels, weights = torch.zeros(10, dtype=torch.long), torch.ones(10)
        head_loss(hidden, weight, None, labels, weights, method=method, z_loss=0.1, chunk=4).total.backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


# --- several tp ranks ---------------------------------------------------------------------------------------------


def _tp_case(rank: int, world: int, z_loss: float, softcap: float | None, bias: bool) -> float:
    """The largest relative error over methods of value, gradient of hidden, and gradient of this rank's slice."""
    full = example(13, 24, 8, torch.float32, bias)
    expected = reference(full, z_loss, softcap)
    wanted = gradients(expected, full)
    rows = slice(rank * 24 // world, (rank + 1) * 24 // world)
    group = dist.group.WORLD
    worst = 0.0
    for method in METHODS:
        for reduce_hidden in (True, False):
            part = {**full, "weight": full["weight"].detach()[rows].requires_grad_()}
            part["bias"] = full["bias"].detach()[rows].requires_grad_() if bias else None
            options = {"z_loss": z_loss, "softcap": softcap, "group": group, "chunk": 5, "reduce_hidden": reduce_hidden}
            loss: Loss = head_loss(**part, method=method, **options)
            got = gradients(loss.total, part)
            if not reduce_hidden:
                dist.all_reduce(got[0])
            errors = [far(loss.total, expected), far(got[0], wanted[0])]
            errors += [far(mine, every[rows]) for mine, every in zip(got[1:], wanted[1:], strict=True)]
            worst = max(worst, *errors)
    return worst


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("z_loss", "softcap", "bias"), CASES)
def test_a_sharded_vocabulary_gives_the_same_loss(world: int, z_loss: float, softcap: float | None, bias: bool) -> None:
    assert max(run(world, _tp_case, z_loss, softcap, bias)) < 1e-5

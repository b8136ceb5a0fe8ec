"""Fused operations give transformers' and torch's own numbers."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from meshwright.engine.kernels.cross_entropy import logits_to_gradient_
from meshwright.engine.kernels.norms import fuse_norms
from meshwright.engine.kernels.updates import adamw_, scale_unless_one_, sum_of_squares

NORMS = (
    ("llama", "LlamaRMSNorm"),
    ("qwen3", "Qwen3RMSNorm"),
    ("olmoe", "OlmoeRMSNorm"),
    ("gemma2", "Gemma2RMSNorm"),
    ("gemma3", "Gemma3RMSNorm"),
    ("qwen3_next", "Qwen3NextRMSNorm"),
)


def norm_of(family: str, name: str, width: int = 16) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norm: nn.Module = getattr(module, name)(width)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
    return norm


@pytest.mark.parametrize(("family", "name"), NORMS)
def test_a_fused_norm_gives_the_familys_output_and_gradients(family: str, name: str) -> None:
    torch.manual_seed(0)
    norm = norm_of(family, name)
    rows = torch.randn(4, 3, 16, requires_grad=True)
    direction = torch.randn(4, 3, 16)

    def outcome() -> list[torch.Tensor]:
        out = norm(rows)
        return [out.detach(), *torch.autograd.grad((out * direction).sum(), [rows, norm.weight])]

    expected = outcome()
    own = type(norm).forward
    assert fuse_norms(nn.ModuleList([norm])) == 1
    assert type(norm).forward is not own and list(norm.state_dict()) == ["weight"]
    for got, want in zip(outcome(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_layers_share_one_fused_class() -> None:
    """One class for all layers is what lets them share one compiled graph."""
    model = nn.ModuleList([norm_of("llama", "LlamaRMSNorm") for _ in range(3)])
    assert fuse_norms(model) == 3 and len({type(norm) for norm in model}) == 1


def test_a_second_call_changes_nothing_but_still_counts() -> None:
    model = nn.ModuleList([norm_of("gemma3", "Gemma3RMSNorm")])
    fuse_norms(model)
    rows = torch.randn(2, 16)
    before = model[0](rows)
    fuse_norms(model)
    torch.testing.assert_close(model[0](rows), before, rtol=0, atol=0)


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    class DoubledRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    gated = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next").Qwen3NextRMSNormGated(8)
    assert fuse_norms(nn.ModuleList([DoubledRMSNorm(), gated, nn.RMSNorm(8)])) == 0


def test_norms_are_recognised_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([norm_of("llama", "LlamaRMSNorm"), norm_of("gemma3", "Gemma3RMSNorm")])
        assert fuse_norms(model) == 2
    assert model[0].weight.is_meta


@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, None), (1e-2, None), (1e-2, 3.0)])
def test_logits_become_the_gradient_of_the_weighted_loss(z_loss: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(6, 37) * 2).requires_grad_()
    labels = torch.tensor([3, 36, -100, 40, 0, 7])  # -100 and 40 lie outside: ignored, and another rank's slice
    weights = torch.tensor([0.3, 0.1, 0.0, 0.2, 0.4, 0.5])
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    held = (labels >= 0) & (labels < 37)
    target = torch.where(held, capped.gather(1, labels.clamp(0, 36)[:, None])[:, 0], 0.0)
    log_sum = capped.logsumexp(1)
    (weights * (log_sum - target + z_loss * log_sum**2)).sum().backward()
    mine = logits.detach().clone()
    statistics = logits_to_gradient_(mine, labels, weights, z_loss, softcap)
    torch.testing.assert_close(mine, logits.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(statistics, torch.stack([log_sum, target]).detach(), rtol=1e-6, atol=1e-6)


def test_adamw_is_torchs_with_the_gradient_times_the_factor() -> None:
    torch.manual_seed(0)
    mine = torch.randn(50)
    reference = nn.Parameter(mine.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    average, square = torch.zeros(50), torch.zeros(50)
    factor = torch.tensor(0.25)
    for step in range(1, 5):
        gradient = torch.randn(50)
        reference.grad = gradient * factor
        optimizer.step()
        adamw_(
            mine, gradient, average, square, factor, step=step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
    torch.testing.assert_close(mine, reference.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(square, optimizer.state[reference]["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_adamw_keeps_bf16_moments_in_their_format() -> None:
    parameter, gradient = torch.randn(8).bfloat16(), torch.randn(8).bfloat16()
    average, square = torch.zeros(8).bfloat16(), torch.zeros(8).bfloat16()
    before = parameter.clone()
    adamw_(
        parameter,
        gradient,
        average,
        square,
        torch.ones(()),
        step=1,
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
    )
    assert average.dtype is torch.bfloat16 and parameter.dtype is torch.bfloat16
    torch.testing.assert_close(parameter.float(), before.float() - 0.1 * gradient.float().sign(), rtol=0, atol=2e-2)


def test_sum_of_squares_counts_every_element_in_fp32() -> None:
    tensors = [torch.full((3, 4), 2.0), torch.empty(0), torch.full((5,), 300.0).half()]  # 300² is beyond fp16
    assert sum_of_squares(tensors).item() == 12 * 4.0 + 5 * 90000.0
    assert sum_of_squares([]).item() == 0.0


def test_scaling_by_one_and_by_another_number() -> None:
    values = torch.arange(5.0)
    assert scale_unless_one_(values, torch.tensor(1.0)) is values
    torch.testing.assert_close(scale_unless_one_(values, torch.tensor(0.5)), torch.arange(5.0) / 2)

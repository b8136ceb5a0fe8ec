"""Fused operations equal those of transformers and torch."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from meshwright.engine.kernels import linears
from meshwright.engine.kernels.cross_entropy import logits_to_gradient_
from meshwright.engine.kernels.fp8 import ACTIVATION, to_fp8
from meshwright.engine.kernels.gelu import fuse_gelus
from meshwright.engine.kernels.linears import TunedLinear, tune_linears, use_fp8
from meshwright.engine.kernels.matmul import product, product_add
from meshwright.engine.kernels.norms import fuse_norms
from meshwright.engine.kernels.optimizer_kernels import adamw_, scale_unless_one_, sum_of_squares
from meshwright.engine.kernels.residuals import fuse_residuals

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
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
def test_a_fused_norm_equals_the_original(family: str, name: str) -> None:
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
    assert type(norm).forward is not own
    assert list(norm.state_dict()) == ["weight"]
    for got, want in zip(outcome(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_layers_share_one_fused_class() -> None:
    """Layers share one compiled graph only if they share one class."""
    model = nn.ModuleList([norm_of("llama", "LlamaRMSNorm") for _ in range(3)])
    assert fuse_norms(model) == 3
    assert len({type(norm) for norm in model}) == 1


def test_a_second_call_changes_nothing() -> None:
    model = nn.ModuleList([norm_of("gemma3", "Gemma3RMSNorm")])
    fuse_norms(model)
    rows = torch.randn(2, 16)
    before = model[0](rows)
    fuse_norms(model)
    torch.testing.assert_close(model[0](rows), before, rtol=0, atol=0)


def test_other_norms_are_not_patched() -> None:
    class DoubledRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    gated = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next").Qwen3NextRMSNormGated(8)
    assert fuse_norms(nn.ModuleList([DoubledRMSNorm(), gated, nn.RMSNorm(8)])) == 0


def test_norms_are_recognized_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([norm_of("llama", "LlamaRMSNorm"), norm_of("gemma3", "Gemma3RMSNorm")])
        assert fuse_norms(model) == 2
    assert model[0].weight.is_meta


@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, None), (1e-2, None), (1e-2, 3.0)])
def test_logits_are_overwritten_with_the_gradient_of_the_weighted_loss(z_loss: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(6, 37) * 2).requires_grad_()
    labels = torch.tensor([3, 36, -100, 40, 0, 7])  # -100 is ignored, 40 is in another rank's shard
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


def test_adamw_equals_torchs_with_a_scaled_gradient() -> None:
    torch.manual_seed(0)
    mine = torch.randn(50)
    reference = nn.Parameter(mine.clone())
    optimizer = torch.optim.AdamW([reference], **SETTINGS, weight_decay=0.1)
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


def test_adamw_keeps_bf16_moments_in_bf16() -> None:
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
    assert {parameter.dtype, average.dtype, square.dtype} == {torch.bfloat16}
    torch.testing.assert_close(parameter.float(), before.float() - 0.1 * gradient.float().sign(), rtol=0, atol=2e-2)


def test_sum_of_squares_counts_every_element_in_fp32() -> None:
    tensors = [torch.full((3, 4), 2.0), torch.empty(0), torch.full((5,), 300.0).half()]  # 300² is beyond fp16
    assert sum_of_squares(tensors).item() == 12 * 4.0 + 5 * 90000.0
    assert sum_of_squares([]).item() == 0.0


def test_scaling_by_one_and_by_another_number() -> None:
    values = torch.arange(5.0)
    assert scale_unless_one_(values, torch.tensor(1.0)) is values
    torch.testing.assert_close(scale_unless_one_(values, torch.tensor(0.5)), torch.arange(5.0) / 2)


@pytest.mark.parametrize(("left_t", "right_t"), [(False, True), (False, False), (True, False)])
def test_gemms_have_the_right_value_shape_and_flops(left_t: bool, right_t: bool) -> None:
    torch.manual_seed(0)
    left = torch.randn((5, 3) if left_t else (3, 5))
    right = torch.randn((4, 5) if right_t else (5, 4))
    expected = (left.t() if left_t else left) @ (right.t() if right_t else right)
    with FlopCounterMode(display=False) as counted:
        got = product(left, right, left_t, right_t)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert counted.get_total_flops() == 2 * 3 * 5 * 4
    assert product(left.to("meta"), right.to("meta"), left_t, right_t).shape == expected.shape


def test_a_gemm_adds_a_matrix() -> None:
    torch.manual_seed(0)
    add, left, right = torch.randn(3, 4), torch.randn(3, 5), torch.randn(4, 5)
    before = add.clone()
    torch.testing.assert_close(product_add(add, left, right, True), before + left @ right.t(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(add, before, rtol=0, atol=0)
    assert product_add(add.to("meta"), left.to("meta"), right.to("meta"), True).shape == (3, 4)


def outcome(module: nn.Module, rows: torch.Tensor, direction: torch.Tensor) -> list[torch.Tensor]:
    out = module(rows)
    return [out.detach(), *torch.autograd.grad((out * direction).sum(), [rows, *module.parameters()])]


@pytest.fixture(params=[linears.SMALL, 0], ids=["torch's GEMM", "our GEMM"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs below this many FLOPs are torch's own."""
    monkeypatch.setattr(linears, "SMALL", request.param)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bias", [False, True])
def test_a_tuned_linear_layer_equals_torchs(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 4, bias=bias)
    rows, direction = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 4)
    expected = outcome(linear, rows, direction)
    assert tune_linears(nn.ModuleList([linear, nn.Bilinear(2, 2, 2)])) == 1
    assert isinstance(linear, TunedLinear)
    for got, want in zip(outcome(linear, rows, direction), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_fp8_keeps_the_precision_of_the_format() -> None:
    values = torch.tensor([[1000.0, -3.0], [0.5, 0.0]])
    narrow, unit = to_fp8(values, ACTIVATION)
    assert narrow.float().abs().max() == torch.finfo(ACTIVATION).max
    torch.testing.assert_close(narrow.float() * unit, values, rtol=0.07, atol=0.01)
    assert to_fp8(torch.zeros(2, 2), ACTIVATION)[0].float().abs().max() == 0


@pytest.mark.parametrize("exact", [True, False])
def test_an_fp8_linear_layer_is_near_torchs(exact: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    rows, direction = torch.randn(2, 16, 64, requires_grad=True), torch.randn(2, 16, 32)
    expected = outcome(linear, rows, direction)
    assert use_fp8(nn.ModuleList([linear, nn.Linear(64, 24)]), exact_gradients=exact) == 1  # 24 does not divide
    for got, want in zip(outcome(linear, rows, direction), expected, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error < 0.08, error
    assert (linear(rows) - expected[0]).abs().max() > 0, "it computes in fp32"


def test_fp8_is_not_used_for_odd_numbers_of_tokens() -> None:
    linear = nn.Linear(16, 16)
    rows = torch.randn(5, 16)
    expected = linear(rows)
    use_fp8(linear)
    torch.testing.assert_close(linear(rows), expected, rtol=0, atol=0)


def tiny(family: str) -> Any:
    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
        pad_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("family", "fused"), [("llama", 4), ("qwen2", 4), ("qwen3", 4), ("mistral", 4), ("olmoe", 2), ("gemma3_text", 0)]
)
def test_fused_residuals_do_not_change_gradients(family: str, fused: int) -> None:
    """An expert block has no output projection: only attention's is fused. Gemma norms before the residual."""
    model = tiny(family)
    tokens = torch.randint(64, (2, 8))
    expected = gradients(model, tokens)
    tune_linears(model.model.layers)
    assert fuse_residuals(model) == fused
    got = gradients(model, tokens)
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-6, msg=name)


def test_only_long_gemms_are_ours() -> None:
    """Llama 3 8B with 8,192 tokens runs our kernels, a 0.6B model with 4,096 torch's, which start sooner."""
    hidden, weight = torch.empty(8192, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    assert not linears.is_small(hidden, weight)
    assert linears.is_small(torch.empty(4096, 1024, device="meta"), torch.empty(3072, 1024, device="meta"))


def test_residuals_of_other_projections_are_not_fused() -> None:
    model = tiny("llama")
    assert fuse_residuals(model) == 0  # not tuned: nothing to gain
    tune_linears(model.model.layers)
    model.model.layers[0].self_attn.o_proj.__class__ = type("Adapted", (nn.Linear,), {})
    assert fuse_residuals(model) == 3


def test_all_layers_share_one_compiled_graph() -> None:
    model = tiny("llama")
    fuse_norms(model)
    tune_linears(model.model.layers)
    fuse_residuals(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    hidden = torch.randn(2, 8, 32, requires_grad=True)
    rope = model.model.rotary_emb(hidden, torch.arange(8)[None])
    for layer in model.model.layers:
        hidden = layer(hidden, position_embeddings=rope)
    hidden.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@on_a_gpu
@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, None), (1e-2, 3.0)])
def test_gpu_cross_entropy_equals_cpu(z_loss: float, softcap: float | None) -> None:
    torch.manual_seed(0)
    logits, weights = torch.randn(9, 40003), torch.rand(9)
    labels = torch.tensor([3, 40002, -100, 50000, 0, 7, 9, 11, 13])
    mine = logits.cuda()
    statistics = logits_to_gradient_(mine, labels.cuda(), weights.cuda(), z_loss, softcap)
    torch.testing.assert_close(
        statistics.cpu(), logits_to_gradient_(logits, labels, weights, z_loss, softcap), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(mine.cpu(), logits, rtol=1e-4, atol=1e-7)


@on_a_gpu
def test_gpu_updates_equal_cpu() -> None:
    torch.manual_seed(0)
    here = [torch.rand(30001) for _ in range(4)]
    there = [one.cuda() for one in here]
    factor = torch.tensor(0.3)
    adamw_(*here, factor, step=3, **SETTINGS, weight_decay=0.1)
    adamw_(*there, factor.cuda(), step=3, **SETTINGS, weight_decay=0.1)
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum_of_squares(there).cpu(), sum_of_squares(here), rtol=1e-5, atol=0)
    torch.testing.assert_close(scale_unless_one_(there[1], factor.cuda()).cpu(), here[1] * 0.3, rtol=1e-6, atol=0)


@on_a_gpu
@pytest.mark.parametrize(("left_t", "right_t"), [(False, True), (False, False), (True, False)])
def test_gpu_tuned_gemms_equal_torchs(left_t: bool, right_t: bool) -> None:
    torch.manual_seed(0)
    for rows, columns, inner in ((512, 4096, 1024), (512, 14336, 512), (256, 65536, 128), (1024, 8, 64)):
        left = torch.randn((inner, rows) if left_t else (rows, inner), device="cuda", dtype=torch.bfloat16)
        right = torch.randn((columns, inner) if right_t else (inner, columns), device="cuda", dtype=torch.bfloat16)
        exact = (left.t() if left_t else left).double() @ (right.t() if right_t else right).double()
        torch.testing.assert_close(product(left, right, left_t, right_t).double(), exact, rtol=1e-2, atol=0.2)
        if not left_t:
            add = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            got = product_add(add, left, right, right_t).double()
            torch.testing.assert_close(got, exact + add.double(), rtol=1e-2, atol=0.2)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
def test_an_elementwise_gelu_becomes_one_operation(name: str) -> None:
    model = nn.Sequential(ACT2FN[name], nn.GELU())
    given = torch.linspace(-6, 6, 4001, dtype=torch.float64, requires_grad=True)
    expected = model[0](given)
    (slope,) = torch.autograd.grad(expected.sum(), given)
    assert fuse_gelus(model) == 1
    found = model[0](given)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), given, retain_graph=True)[0], slope, rtol=1e-6, atol=1e-8
    )
    assert [type(node[0]).__name__ for node in found.grad_fn.next_functions] == ["AccumulateGrad"]

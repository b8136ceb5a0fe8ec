"""fp8 linear layers: codes and scales equal torchao's, results are near torch's, skipped layers are reported."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.parity import recipe
from tests.engine.ranks import run
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright import api
from meshwright.engine.data.mock import Mock
from meshwright.engine.kernels import mxfp8
from meshwright.engine.kernels.fp8 import ACTIVATION, GRADIENT, Scaling, fp8_linear, to_fp8, to_fp8_rows
from meshwright.engine.kernels.fp8_weight import Fp8Weight
from meshwright.engine.kernels.linears import FP8_PATCHES, use_fp8
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.parallelize.quantize import describe
from meshwright.engine.trainer import Trainer
from meshwright.errors import InputError
from meshwright.recipes import types

SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "mx")


def uneven(rows: int, columns: int) -> Tensor:
    """Return rows of very different magnitudes, for which one scale is bad."""
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.logspace(-4, 2, rows)[:, None]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def outcome(linear: nn.Module, rows: Tensor, direction: Tensor) -> list[Tensor]:
    out = linear(rows)
    return [out.detach(), *torch.autograd.grad((out * direction).sum(), [rows, *linear.parameters()])]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_near_torchs_in_both_passes(scaling: Scaling, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, bias=bias)
    rows, direction = torch.randn(2, 32, 64, requires_grad=True), torch.randn(2, 32, 32)
    expected = outcome(linear, rows, direction)
    assert use_fp8(nn.ModuleList([linear, nn.Linear(64, 24)]), scaling=scaling) == 1  # 24 does not divide
    assert isinstance(linear, FP8_PATCHES[scaling])
    for got, want in zip(outcome(linear, rows, direction), expected, strict=True):
        assert error(got, want) < 0.08
    assert (linear(rows) - expected[0]).abs().max() > 0, "it computes in fp32"


def test_a_scale_for_each_row_keeps_small_rows() -> None:
    values = uneven(64, 32)
    whole, rows = to_fp8(values, ACTIVATION), to_fp8_rows(values)
    lost = whole.codes.float()[:16] * whole.unit
    kept = rows.codes.float()[:16] * rows.unit[:16]
    assert error(kept, values[:16]) < 0.03 < error(lost, values[:16])
    exponents = torch.log2(rows.unit)
    assert torch.equal(exponents, exponents.round()), "scales of rows are powers of two"
    assert rows.codes.float().abs().amax(1).min() > torch.finfo(ACTIVATION).max / 2 - 17  # each row uses the format


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_weight_needs_no_weight_gradient_gemm(scaling: Scaling, trained: bool) -> None:
    hidden = torch.randn(32, 64, requires_grad=True)
    weight = torch.randn(32, 64, requires_grad=trained)
    with FlopCounterMode(display=False) as counted:
        fp8_linear(hidden, weight, True, scaling).sum().backward()
    assert counted.get_total_flops() == (3 if trained else 2) * 2 * 32 * 64 * 32
    assert (weight.grad is not None) == trained


def test_a_block_has_the_smallest_power_of_two_scale_without_overflow() -> None:
    values = uneven(64, 128)
    values[3, :32] = 0
    codes, scales = mxfp8.to_blocks(values)
    assert (codes.shape, scales.shape) == ((64, 128), (64, 128 // mxfp8.BLOCK))
    assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    power = scales.float()
    largest = values.view(64, -1, 32).abs().amax(-1)
    filled = largest > 0
    assert bool((largest <= 448 * power).all())
    assert bool((largest > 448 * power / 2)[filled].all()), "a smaller power of two would do"
    back = mxfp8.from_blocks(codes, scales)
    assert bool(((back - values).abs() <= values.abs() * 2**-4 + power.repeat_interleave(32, 1) * 2**-10).all())


def test_tiles_of_scales_are_in_hardware_order() -> None:
    exponents = torch.arange(150 * 6).remainder(251).to(torch.uint8).view(150, 6)
    flat = mxfp8.tile_scales(exponents.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert flat.numel() == 2 * 2 * 512
    for row, column in ((0, 0), (31, 3), (32, 0), (127, 3), (128, 0), (149, 5), (70, 4)):
        tile = (row // 128) * 2 + column // 4
        place = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
        assert flat[place] == exponents[row, column]


def test_scales_and_codes_equal_torchaos() -> None:
    pytest.importorskip("torchao")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    values = uneven(48, 64)
    for dtype in (ACTIVATION, GRADIENT["tensor"]):
        scale = tensor_to_scale(values, dtype)
        codes, unit = to_fp8(values, dtype)
        torch.testing.assert_close(unit, scale.reciprocal(), rtol=0, atol=0)
        assert torch.equal(codes.float(), to_fp8_saturated(values * scale, dtype).float())
    for matrix in (values, values.t()):
        scale = tensor_to_scale(
            matrix,
            ACTIVATION,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )
        codes, unit = to_fp8_rows(matrix)
        assert torch.equal(unit, scale.reciprocal())
        assert torch.equal(codes.float(), to_fp8_saturated(matrix * scale, ACTIVATION).float())


def test_blocks_and_tiles_equal_torchaos() -> None:
    pytest.importorskip("torchao")
    formats: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    utils: Any = importlib.import_module("torchao.prototype.mx_formats.utils")
    values = uneven(48, 64)
    mode = formats.ScaleCalculationMode.RCEIL
    scales, codes = formats.to_mx(values, torch.float8_e4m3fn, mxfp8.BLOCK, mode)
    mine, my_scales = mxfp8.to_blocks(values)
    assert torch.equal(my_scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(mine.float(), codes.float())
    assert torch.equal(mxfp8.tile_scales(my_scales).view(torch.uint8), utils.to_blocked(scales.view(torch.uint8)))


@pytest.mark.parametrize(("scaling", "theirs"), [("tensor", "tensorwise"), ("row", "rowwise")])
def test_a_layer_equals_torchaos(scaling: Scaling, theirs: str) -> None:
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    linear = nn.Linear(64, 32, bias=False)
    other = nn.Sequential(nn.Linear(64, 32, bias=False))
    other[0].load_state_dict(linear.state_dict())
    # Emulated: the same casts, then GEMMs of the dequantized values.
    convert_to_float8_training(other, config=replace(Float8LinearConfig.from_recipe_name(theirs), emulate=True))
    use_fp8(linear, scaling=scaling)
    rows, direction = uneven(48, 64).requires_grad_(), torch.randn(48, 32)
    for got, want in zip(outcome(linear, rows, direction), outcome(other, rows, direction), strict=True):
        assert error(got, want) < 1e-5


def test_a_gathered_weight_is_fp8_for_gemms_and_dequantized_for_other_operations() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    codes, unit = to_fp8(weight, ACTIVATION)
    gathered = nn.Parameter(Fp8Weight(codes, unit, torch.float32))
    hidden = torch.randn(16, 64)
    whole = fp8_linear(hidden, weight, True)
    assert torch.equal(fp8_linear(hidden, gathered, True), whole)
    torch.testing.assert_close(torch.nn.functional.linear(hidden, gathered), hidden @ (codes.float() * unit).t())
    part = gathered.narrow(0, 16, 16)
    assert isinstance(part, Fp8Weight)
    torch.testing.assert_close(fp8_linear(hidden, part, True), whole[:, 16:], rtol=1e-6, atol=1e-6)
    fp8_linear(hidden, gathered, True).sum().backward()
    assert gathered.grad is not None
    assert type(gathered.grad) is Tensor
    assert gathered.grad.dtype is torch.float32


def trained(rank: int, world: int, family: str, given: types.Recipe, steps: int) -> dict[str, Any]:
    config = transformers_config(FAMILIES[family])
    source = Mock(config.vocab_size, given.data.seq_length, 1)
    trainer = Trainer(given, config, build_mesh(given.layout, "cpu"), torch.device("cpu"), source)
    results = [trainer.step(step) for step in range(steps)]
    classes = {type(m).__name__ for stage in trainer.stages for m in stage.modules() if hasattr(m, "lora_A")}
    return {"report": describe(trainer.stages), "losses": [result.loss for result in results], "bases": classes}


def recipe_in(matmul: str, goal: str = "pretrain", **precision: Any) -> types.Recipe:
    layout = types.Layout(micro_batch_size=2)
    chosen = types.Precision(compute="fp32", matmul=matmul, **precision)  # type: ignore[arg-type]  # one of its names
    given = recipe(layout, precision=chosen)
    return types.Recipe(**{**{n: getattr(given, n) for n in given.__struct_fields__}, "goal": goal})


@pytest.mark.parametrize(("matmul", "count"), [("fp8_tensor", 28), ("fp8_row", 28), ("mxfp8", 20)])
def test_losses_stay_near_those_without_fp8(matmul: str, count: int) -> None:
    wide = run(1, trained, "llama", recipe_in("same"), 3)[0]
    low = run(1, trained, "llama", recipe_in(matmul), 3)[0]
    assert wide["report"] == []
    assert low["report"][0] == f"precision.matmul={matmul}: {count} linear layers in fp8"
    assert len(low["report"]) == (3 if matmul == "mxfp8" else 1)  # the tiny keys and values have width 16: half a block
    assert low["losses"] == pytest.approx(wide["losses"], rel=5e-3)
    assert low["losses"] != wide["losses"]


@pytest.mark.parametrize(
    ("family", "first_last", "count", "reasons"),
    [
        ("llama", True, 14, ("first_last_bf16",)),
        ("olmoe", False, 16, ("mlp.gate (4x)", "mlp.experts (4x)", "grouped GEMM")),
        ("qwen3_next", False, 26, ("shared_expert_gate", "1 × 32 is not a multiple of 16", "a router")),
        ("gpt2", False, 0, ("attn.c_attn", "stored transposed")),
    ],
)
def test_skipped_layers_are_reported(family: str, first_last: bool, count: int, reasons: tuple[str, ...]) -> None:
    report = run(1, trained, family, recipe_in("fp8_tensor", first_last_bf16=first_last), 1)[0]["report"]
    assert report[0].startswith(f"precision.matmul=fp8_tensor: {count} linear layer"), report
    for reason in reasons:
        assert any(reason in line for line in report[1:]), (reason, report)


@pytest.mark.parametrize("matmul", ["fp8_tensor", pytest.param("fp8_row", marks=pytest.mark.slow)])
def test_adapters_work_on_fp8_bases(matmul: str) -> None:
    wide = run(1, trained, "llama", recipe_in("same", "peft"), 3)[0]
    low = run(1, trained, "llama", recipe_in(matmul, "peft"), 3)[0]
    assert wide["bases"] == {"Linear[LoRA]"}
    assert low["bases"] == {{"fp8_tensor": "Linear[FP8, LoRA]", "fp8_row": "Linear[FP8Row, LoRA]"}[matmul]}
    assert low["losses"] == pytest.approx(wide["losses"], rel=5e-3)


@pytest.mark.parametrize("matmul", ["nvfp4", "fp8_block", "fp8_delayed"])
def test_other_formats_are_errors(matmul: str) -> None:
    from meshwright.engine.parallelize.quantize import apply_fp8

    stage: Any = nn.Module()
    with pytest.raises(InputError, match="fp8_tensor, fp8_row, mxfp8") as refused:
        apply_fp8(stage, types.Precision(matmul=matmul), 4)  # type: ignore[arg-type]  # one of its names
    assert "precision.matmul=fp8_tensor" in refused.value.fix


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@on_a_gpu
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_gpu_fp8_equals_cpu(scaling: Scaling) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=False)
    use_fp8(linear, scaling=scaling)
    rows, direction = uneven(128, 256), torch.randn(128, 512)
    expected = outcome(linear, rows.clone().requires_grad_(), direction)
    there = linear.cuda().bfloat16()
    got = outcome(there, rows.cuda().bfloat16().requires_grad_(), direction.cuda().bfloat16())
    for one, want in zip(got, expected, strict=True):
        assert error(one.float().cpu(), want) < 0.05


@pytest.mark.parametrize("matmul", ["fp8_tensor", "fp8_row", "mxfp8"])
def test_every_format_can_be_estimated(matmul: str) -> None:
    found = api.check("llama3_8b_pretrain_config", gpus="8xB200", overrides=[f"precision.matmul={matmul}"])
    assert found.estimate.step_s > 0
    assert found.ok

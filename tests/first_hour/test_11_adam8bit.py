"""`optimizer.name=adamw8bit`: 8-bit moments that train like AdamW, in every layout, and are priced as such."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from meshwright import extras
from meshwright.engine.optimizers import build_optimizer
from meshwright.engine.optimizers.eight_bit import dequantize, levels_for, quantize
from meshwright.recipes.types import Optimizer, Precision

NAME = "model.layers.0.mlp.up_proj.weight"
STEPS = 12


def against_torchao(rank: int, world: int) -> tuple[float, float, float]:
    """Return the differences of the weights to torchao's AdamW8bit and to AdamW, and a round trip's error."""
    torch.compile = lambda function, **_: function  # type: ignore[assignment]  # torchao compiles its step
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    gradients = [torch.randn(32, 512) * 0.1 for _ in range(STEPS)]
    theirs = Parameter(torch.ones(32, 512))
    reference = AdamW8bit([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    trained = {}
    for name in ("adamw", "adamw8bit"):
        trained[name] = Parameter(torch.ones(32, 512))
        settings = Optimizer(name=name, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]
        optimizer = build_optimizer([(NAME, trained[name])], settings, Precision(), "cpu")
        for gradient in gradients:
            trained[name].grad = gradient.clone()
            optimizer.step()
    for gradient in gradients:
        theirs.grad = gradient.clone()
        reference.step()
    values = torch.randn(4, 512)
    levels = levels_for(values, True)
    codes, scales = quantize(values, levels, 256)
    error = (dequantize(codes, scales, levels, 256) - values).abs().max() / values.abs().max()
    moved = (trained["adamw"] - 1).abs().mean()
    return (
        float(((trained["adamw8bit"] - theirs).abs().mean() / moved).detach()),
        float(((trained["adamw8bit"] - trained["adamw"]).abs().mean() / moved).detach()),
        float(error),
    )


def test_steps_are_torchaos_and_close_to_adamw() -> None:
    to_torchao, to_adamw, error = run(1, against_torchao)[0]
    assert to_torchao < 1e-5
    assert 0 < to_adamw < 0.05
    assert error < 0.02


def sharded_steps(rank: int, world: int) -> Any:
    """Return the weights and 8-bit codes of a linear layer after some steps, sharded over the ranks by FSDP2."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 30, bias=False)  # rows do not divide evenly
    if world > 1:
        fully_shard(linear, mesh=init_device_mesh("cpu", (world,)))
    optimizer = build_optimizer([(NAME, linear.weight)], Optimizer(name="adamw8bit", lr=1e-2), Precision(), "cpu")
    for step in range(3):
        inputs = torch.randn(8, 512, generator=torch.Generator().manual_seed(step))
        linear(inputs).square().mean().backward()
        optimizer.step()
        linear.zero_grad()
    state = optimizer.state[linear.weight]
    found = (linear.weight.detach(), state["exp_avg_codes"], state["exp_avg_scales"])
    return [(one.full_tensor() if isinstance(one, DTensor) else one).numpy() for one in found]


def test_fsdp_shards_codes_and_scales_like_the_weights() -> None:
    alone, sharded = run(1, sharded_steps)[0], run(2, sharded_steps)[0]
    weight, codes, scales = zip(alone, sharded, strict=True)
    assert weight[0] == pytest.approx(weight[1], rel=1e-5)
    assert (codes[0] == codes[1]).mean() > 0.999
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)


@pytest.mark.slow
def test_training_is_close_to_adamw_and_resumes_bit_for_bit(meshwright: Any, tmp_path: Path) -> None:
    def train(name: str, out: str) -> list[float]:
        words = ("train", "llama3_8b_pretrain_config", "--tiny", "--nproc", "2", "--dataset", "mock", "--json")
        saved = ("--out", str(tmp_path / out), "checkpoint.save_every=4", "checkpoint.export=none", "train.steps=8")
        answer = meshwright(*words, *saved, f"optimizer.name={name}", "optimizer.lr=1e-3", "layout.tp=1", "layout.cp=1")
        assert answer.code == 0, answer.out + answer.err
        losses: list[float] = answer.json["losses"]
        return losses

    plain, low = train("adamw", "plain"), train("adamw8bit", "low")
    assert low == pytest.approx(plain, rel=5e-3)
    assert low != plain
    last = max((tmp_path / "low" / "checkpoints").glob("step-*"))
    shutil.rmtree(last)
    assert train("adamw8bit", "low")[-4:] == low[-4:]  # resumed from step 4


def test_memory_is_a_quarter_of_the_moments(meshwright: Any) -> None:
    def optimizer_gib(name: str) -> float:
        words = ("estimate", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--json", f"optimizer.name={name}")
        return float(meshwright(*words).json["estimate"]["memory_gib"]["optimizer"])

    assert optimizer_gib("adamw8bit") == pytest.approx(optimizer_gib("adamw") * (2 + 2 * 4 / 256) / 8, rel=0.01)


@pytest.mark.slow
def test_the_dry_run_counts_what_the_estimate_prices(meshwright: Any) -> None:
    words = ("llama3_8b_pretrain_config", "--gpus", "8xH100", "--json", "optimizer.name=adamw8bit", "layout.tp=1")
    counted = meshwright("dryrun", *words).json["memory_gib"]["optimizer"]
    priced = meshwright("estimate", *words).json["estimate"]["memory_gib"]["optimizer"]
    assert counted == pytest.approx(priced, rel=0.05)


def test_without_torchao_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_problem", lambda package: extras.MISSING)
    with pytest.raises(extras.MissingPackageError) as refused:
        build_optimizer([(NAME, Parameter(torch.ones(2)))], Optimizer(name="adamw8bit"), Precision(), "cpu")
    assert "torchao" in str(refused.value)
    assert "pip install" in refused.value.fix[0]


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "kempnerforge", "deepspeed"])
def test_other_engines_refuse_it(engine: str, meshwright: Any) -> None:
    words = ("estimate", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--json", "--engine", engine)
    found = meshwright(*words, "optimizer.name=adamw8bit").json["findings"]
    assert "optimizer.supported" in [finding["rule"] for finding in found]


def test_the_trainer_has_it(meshwright: Any) -> None:
    """adamw_8bit of Trainer and Unsloth programs."""
    words = ("estimate", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--json", "--engine", "fsdp1")
    found = meshwright(*words, "optimizer.name=adamw8bit").json["findings"]
    assert "optimizer.supported" not in [finding["rule"] for finding in found]
    refused = meshwright(*words, "optimizer.name=muon").json["findings"]
    assert "optimizer.supported" in [finding["rule"] for finding in refused]


def test_automodel_gets_torchaos_class(meshwright: Any) -> None:
    words = ("export", "llama3_8b_sft_config", "--to", "automodel", "--json", "optimizer.name=adamw8bit")
    answer = meshwright(*words).json
    assert any("torchao.optim.AdamW8bit" in text for text in answer["files"].values())
    assert "optimizer.name" not in [field["field"] for field in answer["unmapped"]]

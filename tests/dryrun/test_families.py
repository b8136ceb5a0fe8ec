"""The engine's own step runs on the fake GPU, for every model family and layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.families import FAMILIES
from tests.engine.parity import Ragged

from meshwright.dryrun import fake_device
from meshwright.dryrun.fake_device import fake_rank
from meshwright.engine import experts
from meshwright.engine.data.mock import Mock
from meshwright.engine.kernels.device_caps import DRY
from meshwright.engine.mesh import build_mesh, sizes
from meshwright.engine.model.build import transformers_config
from meshwright.engine.model.config import with_layers
from meshwright.engine.trainer import StepResult, Trainer
from meshwright.recipes import types

SEQ = 32
STEPS = 2  # the second meets the optimizer's state and what the first left behind


@dataclass(frozen=True)
class Case:
    """A family cut to some layers, in a layout."""

    family: str
    world: int
    layout: Mapping[str, Any]
    layers: tuple[int, ...] = (0, 1)
    sections: Mapping[str, Any] = field(default_factory=dict)
    mtp: bool = False
    ranks: tuple[int, ...] = (0,)


TP_SP = {"tp": 2, "sp": True}
FOUR = (0, 1, 2, 3)
MUON = {"optimizer": types.Optimizer(name="muon")}
PACKED = {"data": types.Data(seq_length=SEQ, packing=True, prefetch=0)}
SELECTIVE = {"recompute": "selective"}

CASES = {
    "hsdp-tp-sp": Case("llama", 8, {**TP_SP, "dp_replicate": 2}),
    "a2a+ring": Case("qwen3", 4, {"cp": 4, "cp_comm": "a2a+ring", "cp_inner": 2}),
    "allgather-packed": Case("gemma3_text", 2, {"cp": 2, "cp_comm": "allgather"}, sections=PACKED),
    "tp": Case("gpt2", 2, {"tp": 2, "recompute": "full"}),
    "etp": Case("gpt_oss", 4, {"ep": 2, "etp": 2}),
    "1f1b-mtp": Case("deepseek_v3", 4, {"pp": 2, "ep": 2, **SELECTIVE}, mtp=True, ranks=(3,)),
    "1f1b-mtp-first": Case("deepseek_v3", 4, {"pp": 2, "ep": 2, **SELECTIVE}, mtp=True),
    "dualpipe_v": Case("qwen3_moe", 2, {"pp": 2, "vp": 2, "pp_schedule": "dualpipe_v"}, FOUR),
    "interleaved": Case("qwen2", 2, {"pp": 2, "vp": 2, "pp_schedule": "interleaved_1f1b"}, FOUR, ranks=(1,)),
    "offload-optimizer": Case("nemotron_h", 2, {**TP_SP, "offload": "optimizer"}, FOUR),
    "offload-params-pp": Case("qwen2", 2, {"pp": 2, "offload": "params"}, ranks=(1,)),
    "offload-activations": Case("mixtral", 1, {"offload": "activations"}),
    "gated-delta": Case("qwen3_next", 2, {**SELECTIVE, "recompute_modules": ("layernorm", "moe_act")}),
    "ddp-muon": Case("olmoe", 2, {"strategy": "ddp"}, sections=MUON),
}


# Parts of others: hsdp-tp-sp, allgather-packed, dualpipe_v (also a first stage), offloaded weights below. Muon and
# offloaded activations are in the parity tests.
SLOW = ("tp", "a2a+ring", "interleaved", "1f1b-mtp-first", "offload-params-pp", "offload-activations", "ddp-muon")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def config_of(case: Case) -> Any:
    return transformers_config(with_layers(FAMILIES[case.family], list(case.layers)))


def recipe_of(case: Case) -> types.Recipe:
    layout = types.Layout(**case.layout)
    n = sizes(layout, case.world)
    micro_batches = layout.pp * layout.vp  # the fewest that every schedule takes
    given = {
        "data": types.Data(seq_length=SEQ, prefetch=0),
        "train": types.Train(
            global_batch_size=n["dp_replicate"] * n["dp_shard"] * micro_batches, mtp_loss=0.1 if case.mtp else 0.0
        ),
    }
    return types.Recipe(
        name="dry", model="llama3_8b", goal="pretrain", cluster="1xH100", layout=layout, **{**given, **case.sections}
    )


def trainer_of(case: Case, device: torch.device) -> Trainer:
    recipe, config = recipe_of(case), config_of(case)
    source = Ragged(Mock(config.vocab_size, SEQ, recipe.train.seed), recipe.data.packing)
    return Trainer(recipe, config, build_mesh(recipe.layout, device.type), device, source)


def parts(trainer: Trainer) -> dict[str, tuple[torch.Size, str]]:
    """Return shape and device of this rank's shard of every parameter."""
    found = ((name, p) for stage in trainer.stages for name, p in stage.named_parameters())
    local = ((name, p.to_local() if hasattr(p, "to_local") else p) for name, p in found)
    return {name: (part.shape, part.device.type) for name, part in local}


def check_step(case: Case, result: StepResult) -> None:
    assert result.losses.shape == (2,)
    assert result.norm.shape == ()
    assert result.losses.device.type == result.norm.device.type == DRY
    assert not result.skipped
    assert 0 < result.tokens <= result.computed


def test_two_steps_run_without_data(case: Case) -> None:
    for rank in case.ranks:
        with fake_rank(case.world, rank) as device:
            trainer = trainer_of(case, device)
            before = parts(trainer)
            for step in range(STEPS):
                check_step(case, trainer.step(step, figures=False))
            assert parts(trainer) == before
            place = "cpu" if case.layout.get("offload") in ("optimizer", "params") else DRY
            assert {where for _, where in before.values()} == {place}
            states = [value for state in trainer.optimizer.state.values() for value in state.values()]
            assert {s.device.type for s in states if isinstance(s, torch.Tensor) and s.dim()} == {place}
            assert all(p.grad is None for stage in trainer.stages for p in stage.parameters())


def test_offloaded_weights_are_fake_tensors_on_the_cpu() -> None:
    case = Case("llama", 1, {"offload": "params"})
    with fake_rank(1, 0) as device:
        stage = trainer_of(case, device).stages[0]
        for parameter in stage.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            assert local.device.type == "cpu"
            assert isinstance(local, fake_device.FakeTensor)


def test_experts_receive_equal_shares_of_tokens() -> None:
    case = CASES["etp"]
    with fake_rank(case.world, 0) as device:
        stage = trainer_of(case, device).stages[0]
        block = next(iter(experts.expert_blocks(stage)))
        tokens = torch.empty(6, stage.body.config.hidden_size, dtype=torch.bfloat16, device=device)
        chosen = torch.zeros(6, 2, dtype=torch.int64, device=device)
        weights = torch.empty(6, 2, device=device)
        block.experts.unshard()
        assert block.experts(tokens, chosen, weights).shape == tokens.shape


def _changed_names() -> Iterator[tuple[Any, str, Any]]:
    for owner, name, _ in fake_device._patches((9, 0)):
        yield owner, name, vars(owner).get(name)


@pytest.mark.parametrize("fails", [False, True], ids=["end", "error"])
def test_torch_is_restored_on_exit(fails: bool) -> None:
    before = list(_changed_names())
    threads = torch.autograd.is_multithreading_enabled()
    try:
        with fake_rank(4, 1) as device:
            assert dist.get_world_size() == 4
            assert torch.empty(2, device=device).add(1).device.type == DRY
            if fails:
                raise KeyError("on purpose")
    except KeyError:
        assert fails
    assert not dist.is_initialized()
    assert torch.autograd.is_multithreading_enabled() == threads
    for (owner, name, value), (_, _, now) in zip(before, _changed_names(), strict=True):
        assert now is value, f"{owner}.{name}"
    assert torch.ones(2).sum().item() == 2.0


def test_cpu_tensors_are_computed() -> None:
    with fake_rank(2, 0) as device:
        assert torch.arange(4).sum().item() == 6
        with pytest.raises(Exception, match="_local_scalar_dense"):
            torch.empty(4, device=device).sum().item()

"""Gathering weights in fp8 gives exactly the result of gathering first and casting then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.parity import compile_without_a_compiler, full_tensors, recipe
from tests.engine.ranks import run
from torch.distributed.tensor import DTensor

from meshwright.engine.data.mock import Mock
from meshwright.engine.kernels.fp8_weight import Fp8Weight
from meshwright.engine.kernels.linears import Fp8Linear
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.optimizers.base import local
from meshwright.engine.parallelize.fp8_gather import Fp8Shard, sync_scales
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

STEPS = 2
ADAM = types.Optimizer(name="adamw", lr=1e-2)


def trained(rank: int, world: int, family: str, *recipes: types.Recipe) -> list[dict[str, Any]]:
    """Train each recipe; return losses, weights, and the classes of the gathered weights."""
    return [_trained(family, given) for given in recipes]


def _trained(family: str, given: types.Recipe) -> dict[str, Any]:
    if given.kernels.compile:
        compile_without_a_compiler()
    config = transformers_config(FAMILIES[family])
    source = Mock(config.vocab_size, given.data.seq_length, 1)
    trainer = Trainer(given, config, build_mesh(given.layout, "cpu"), torch.device("cpu"), source)
    seen: set[str] = set()
    for stage in trainer.stages if not given.kernels.compile else ():  # a hook would break the graph
        for module in stage.modules():
            if isinstance(module, Fp8Linear):
                module.register_forward_pre_hook(lambda m, _: seen.add(_class_name(m.weight)))
    results = [trainer.step(step) for step in range(STEPS)]
    parameters = [p for stage in trainer.stages for p in stage.parameters()]
    states = [t for state in trainer.optimizer.state.values() for t in state.values()]
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": full_tensors(trainer, "data"),
        "seen": seen,
        "hooks": [hook.__module__ for stage in trainer.stages for hook in [*stage._forward_pre_hooks.values()][:1]],
        "units": [_given_unit(p) for p in parameters],
        "shards": sum(isinstance(getattr(p, "_local_tensor", p), Fp8Shard) for p in parameters),
        "stored": {str(local(p).dtype) for p in parameters} | {str(local(t).dtype) for t in states},
        "saved": {type(local(p).detach()) for p in parameters} | {type(local(t)) for t in states},
    }


def _given_unit(parameter: torch.nn.Parameter) -> bool:
    """Whether the hook before the all-gather makes no unit of its own, on FSDP's stream, and cuBLAS can read it."""
    shard: Any = getattr(parameter, "_local_tensor", parameter)
    if not isinstance(shard, Fp8Shard):
        return True
    policy = SimpleNamespace(param_dtype=torch.bfloat16)
    return (
        shard.fsdp_pre_all_gather(None, None, None, None, policy)[1][0] is shard.unit
        and shard.unit.data_ptr() % 16 == 0
    )


def _class_name(weight: torch.Tensor) -> str:
    return type(weight.to_local() if isinstance(weight, DTensor) else weight).__name__


def recipe_with(gather: bool, layout: dict[str, Any], sections: dict[str, Any]) -> types.Recipe:
    precision = types.Precision(**{"compute": "fp32", "matmul": "fp8_tensor", **sections.get("precision", {})})
    train = types.Train(global_batch_size=8 if "pp" in layout else 4, steps=100)
    given = recipe(
        types.Layout(**{"micro_batch_size": 2, **layout}),
        optimizer=ADAM,
        **{"train": train, **sections, "precision": types.Precision(**{**_fields(precision), "fp8_gather": gather})},
    )
    return types.Recipe(**{**_fields(given), "goal": sections.get("goal", "pretrain")})


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], int]] = {
    "bf16": (2, "llama", {}, {"precision": {"compute": "bf16"}}, 28),
    "recompute": (2, "qwen3_moe", {"recompute": "full"}, {}, 16),
}
SLOW = {
    "fsdp2": (2, "llama", {}, {}, 28),
    "hsdp-kept": (4, "llama", {"dp_replicate": 2, "micro_batch_size": 1, "reshard_after_forward": False}, {}, 28),
    "pp": (4, "llama", {"pp": 2}, {}, 14),
    "interleaved": (4, "llama", {"pp": 2, "vp": 2, "pp_schedule": "interleaved_1f1b"}, {}, 14),
    "tp-sp": (4, "llama", {"tp": 2, "sp": True}, {}, 20),  # keys and values have local width 8
    "compile": (2, "llama", {}, {"kernels": types.Kernels(compile=True)}, 28),
    "state-space": (2, "nemotron_h", {}, {}, 9),
}


@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW.values())], ids=[*CASES, *SLOW]
)
def test_fp8_gathers_change_nothing(case: tuple[int, str, dict[str, Any], dict[str, Any], int]) -> None:
    world, family, layout, sections, count = case
    wide, low = run(world, trained, family, *(recipe_with(gather, layout, sections) for gather in (False, True)))[0]
    assert (wide["shards"], low["shards"]) == (0, count)
    if "kernels" not in sections:
        assert "Fp8Weight" in low["seen"]
        assert "Fp8Weight" not in wide["seen"]
    assert low["losses"] == wide["losses"]
    assert low["norms"] == wide["norms"]
    for name, value in wide["weights"].items():
        assert np.array_equal(low["weights"][name], value), name
    assert low["stored"] == wide["stored"], "stored and trained weights keep their dtype"
    assert low["saved"] == {torch.Tensor}
    assert set(low["hooks"]) == {sync_scales.__module__}, "scales are queued before FSDP's streams wait"
    assert all(low["units"])


def test_unsupported_weights_are_gathered_as_usual() -> None:
    """Row scales, offloaded weights, uneven shards."""
    scaled_by_row = recipe_with(True, {}, {"precision": {"matmul": "fp8_row"}})
    by_rows, offloaded = run(2, trained, "llama", scaled_by_row, recipe_with(True, {"offload": "params"}, {}))[0]
    (unequal,) = run(3, trained, "llama", recipe_with(True, {"micro_batch_size": 1}, {"train": TRAIN}))[0]
    assert (by_rows["shards"], offloaded["shards"], unequal["shards"]) == (0, 0, 0)


TRAIN = types.Train(global_batch_size=3, steps=100)


def test_codes_of_a_gathered_weight_take_half_the_bytes() -> None:
    codes = torch.zeros(32, 64, dtype=torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.ones(()), torch.bfloat16)
    assert (weight.dtype, weight.codes.nbytes) == (torch.bfloat16, weight.numel())
